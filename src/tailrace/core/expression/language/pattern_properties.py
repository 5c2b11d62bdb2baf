"""``\\p{..}`` in a regular expression: the properties that the server's library knows, of Unicode 7."""

from __future__ import annotations

from typing import Final

from tailrace.core.expression.language import registry

_CATEGORY_NAMES: Final = """
    Any C Cc Cf Cn Co Cs L L& Ll Lm Lo Lt Lu M Mc Me Mn N Nd Nl No P Pc Pd Pe Pf Pi Po Ps S Sc Sk Sm So
    Xan Xps Xsp Xuc Xwd Z Zl Zp Zs
    """
_CATEGORIES: Final = frozenset(_CATEGORY_NAMES.split())
#: PCRE2 takes these for one another without regard to case; the server does not.
_CASED: Final = frozenset({"Lu", "Ll", "Lt"})
_SCRIPT_NAMES: Final = """
    Arabic Armenian Avestan Balinese Bamum Bassa_Vah Batak Bengali Bopomofo Brahmi Braille Buginese Buhid
    Canadian_Aboriginal Carian Caucasian_Albanian Chakma Cham Cherokee Common Coptic Cuneiform Cypriot Cyrillic Deseret
    Devanagari Duployan Egyptian_Hieroglyphs Elbasan Ethiopic Georgian Glagolitic Gothic Grantha Greek Gujarati Gurmukhi
    Han Hangul Hanunoo Hebrew Hiragana Imperial_Aramaic Inherited Inscriptional_Pahlavi Inscriptional_Parthian Javanese
    Kaithi Kannada Katakana Kayah_Li Kharoshthi Khmer Khojki Khudawadi Lao Latin Lepcha Limbu Linear_A Linear_B Lisu
    Lycian Lydian Mahajani Malayalam Mandaic Manichaean Meetei_Mayek Mende_Kikakui Meroitic_Cursive Meroitic_Hieroglyphs
    Miao Modi Mongolian Mro Myanmar Nabataean New_Tai_Lue Nko Ogham Ol_Chiki Old_Italic Old_North_Arabian Old_Permic
    Old_Persian Old_South_Arabian Old_Turkic Oriya Osmanya Pahawh_Hmong Palmyrene Pau_Cin_Hau Phags_Pa Phoenician
    Psalter_Pahlavi Rejang Runic Samaritan Saurashtra Sharada Shavian Siddham Sinhala Sora_Sompeng Sundanese
    Syloti_Nagri Syriac Tagalog Tagbanwa Tai_Le Tai_Tham Tai_Viet Takri Tamil Telugu Thaana Thai Tibetan Tifinagh
    Tirhuta Ugaritic Vai Warang_Citi Yi
    """
_SCRIPTS: Final = frozenset(_SCRIPT_NAMES.split())


def read(text: str, pos: int, letter: str) -> tuple[str, int, bool]:
    """The property at ``pos``, after ``\\p`` or ``\\P``: as PCRE2 takes it, where it ends, and whether it is one of
    those that depend on case. A script means the letters whose script it is, not those also used with it."""
    if text.startswith("{", pos):
        end = text.find("}", pos)
        name = text[pos + 1 : end] if end >= 0 else ""
        pos = end + 1
    else:
        name = text[pos : pos + 1]
        pos += 1
    no = "^" if name.startswith("^") else ""
    name = name.removeprefix("^")
    if name in _CATEGORIES:
        return f"\\{letter}{{{no}{name}}}", pos, name in _CASED
    if name in _SCRIPTS:
        return f"\\{letter}{{{no}sc:{name}}}", pos, False
    raise registry.parse_failure(51091, "Regular expression is invalid: unknown property name after \\P or \\p")
