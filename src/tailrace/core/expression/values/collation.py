"""Collations: the option as the server checks it, and the order of values that it means.

Only the checks are ours. The order of strings comes from ICU through PyICU (the extra ``icu``), which is imported when
a collation is first used. mongod bundles ICU 57.1 whatever its own version: what it knows of locales and their defaults
is listed here as it was measured, so that another ICU refuses what mongod refuses; only the order of some characters
may differ (docs/reference/differences.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from tailrace.core import raw_bson
from tailrace.core.event.bson_text import spaced_document_text
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import SIMPLE, Order, collated
from tailrace.core.expression.values.value import Value
from tailrace.errors import UsageError

SIMPLE_LOCALE: Final = "simple"
#: The only version that a ``version`` in the option may name.
ICU_VERSION: Final = "57.1"
INSTALL: Final = "Install ICU for Python: pip install 'tailrace[icu]'"

_LOCALES: Final = """
af am ar as az be bg bn bo bs bs_Cyrl ca chr cs cy da de de_AT dsb dz ee el en en_US en_US_POSIX eo es et fa fa_AF fi
fil fo fr fr_CA ga gl gu ha haw he hi hr hsb hu hy id ig is it ja ka kk kl km kn ko kok ky lb lkt ln lo lt lv mk ml mn
mr ms mt my nb ne nl nn om or pa pl ps pt ro ru se si sk sl smn sq sr sr_Latn sv sw ta te th to tr ug uk ur vi wae yi yo
zh zh_Hant zu"""
LOCALES: Final = frozenset(_LOCALES.split())
#: What may stand after ``@collation=``: with every locale, and with some.
_TYPES: Final = frozenset({"emoji", "eor", "search"})
_TYPES_OF: Final[dict[str, frozenset[str]]] = {
    "ar": frozenset({"compat"}),
    "bn": frozenset({"traditional"}),
    "de": frozenset({"phonebook"}),
    "de_AT": frozenset({"phonebook"}),
    "es": frozenset({"traditional"}),
    "fi": frozenset({"traditional"}),
    "ja": frozenset({"unihan"}),
    "kn": frozenset({"traditional"}),
    "ko": frozenset({"searchjl", "unihan"}),
    "ln": frozenset({"phonetic"}),
    "si": frozenset({"dictionary"}),
    "sv": frozenset({"standard"}),
    "vi": frozenset({"traditional"}),
    "zh": frozenset({"big5han", "gb2312han", "standard", "stroke", "unihan", "zhuyin"}),
    "zh_Hant": frozenset({"big5han", "gb2312han", "pinyin", "standard", "unihan", "zhuyin"}),
}
#: Orders that later versions of ICU left out, or call otherwise.
_GONE: Final = frozenset({"big5han", "gb2312han"})
_RENAMED: Final = {"sv@collation=standard": "sv@collation=traditional"}

_NORMALIZED: Final = """
as bn el fa fa_AF gu he hi ig km kn kok mr my or pa ps si ta te th vi yi yo
bn@collation=traditional kn@collation=traditional si@collation=dictionary vi@collation=traditional"""
_NORMALIZING: Final = frozenset(_NORMALIZED.split())
_NORMALIZING_TYPES: Final = ("@collation=search", "@collation=searchjl")
_UPPER_FIRST: Final = frozenset({"da", "mt"})
_BACKWARDS: Final = frozenset({"fr_CA"})
_SHIFTED: Final = frozenset({"th"})

_BOOLEANS: Final = ("caseLevel", "numericOrdering", "normalization")
_ENUMERATIONS: Final[dict[str, tuple[str, ...]]] = {
    "caseFirst": ("upper", "lower", "off"),
    "alternate": ("non-ignorable", "shifted"),
    "maxVariable": ("punct", "space"),
}


@dataclass(frozen=True, slots=True)
class Collation:
    """A collation other than the simple one, every option filled in with the server's default for its locale.

    ``strength``  1 compares base letters, 2 accents too, 3 case and variants too, 4 punctuation where it is else left
    out, 5 breaks every tie
    """

    locale: str
    strength: int = 3
    case_level: bool = False
    case_first: str = "off"
    numeric_ordering: bool = False
    alternate: str = "non-ignorable"
    max_variable: str = "punct"
    normalization: bool = False
    backwards: bool = False


# ── the option ───────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_collation(document: bytes) -> Collation | None:
    """The collation that a command's ``collation`` document asks for; ``None`` for the simple one, and for ``{}``.

    Raises ``UsageError`` with the server's code and message. ICU is not needed for it.
    """
    if document == raw_bson.EMPTY_DOCUMENT:
        return None
    given: dict[str, Any] = {}
    seen: set[str] = set()
    for raw_name, kind, data in v.fields_of(document):
        name = raw_name.decode("utf-8", "replace")
        if name in seen:
            raise UsageError(f"BSON field 'collation.{name}' is a duplicate field", code=40413)
        seen.add(name)
        value = _option(name, (kind, data))
        if value is not None:
            given[name] = value
    if "locale" not in given:
        raise UsageError("BSON field 'collation.locale' is missing but a required field", code=40414)
    if given["locale"] == SIMPLE_LOCALE:
        return None
    shown = spaced_document_text(document)
    _check_locale(given["locale"], shown)
    _check_version(given.get("version"), shown)
    collation = _filled(given)
    _check_together(collation, shown)
    return collation


def _option(name: str, value: Value) -> Any:
    """One option of the document, ``None`` where it is null. Raises what the server raises while it reads the field."""
    kind = value[0]
    if name == "backwards":  # the server reads this one apart: null is not "not said"
        if kind != v.BOOL:
            found = v.type_name(value)
            raise UsageError(f"Field 'backwards' should be a boolean value, but found: {found}", code=14)
        return value == v.TRUE
    if name not in ("locale", "version", "strength", *_BOOLEANS, *_ENUMERATIONS):
        raise UsageError(f"BSON field 'collation.{name}' is an unknown field.", code=40415)
    if kind == v.NULL_TYPE:
        return None
    if name == "strength":
        return _strength(value)
    if name in _BOOLEANS:
        if kind != v.BOOL:
            raise _wrong_type(name, value, "type 'bool'")
        return value == v.TRUE
    if kind != v.STRING:
        raise _wrong_type(name, value, "type 'string'")
    text = v.bytes_of(value).decode("utf-8", "replace")
    if name in _ENUMERATIONS and text not in _ENUMERATIONS[name]:
        raise _not_a_value(name, text)
    return text


def _strength(value: Value) -> int:
    if value[0] not in v.NUMERIC:
        raise _wrong_type("strength", value, "types '[long, int, decimal, double']")
    number = v.number_of(value)
    whole = 0
    if not v.is_nan(number):
        bounded = max(Decimal(v.INT32_MIN), min(Decimal(number), Decimal(v.INT32_MAX)))
        whole = int(bounded)
    if whole > 5:
        raise UsageError(f"BSON field 'strength' value must be <= 5, actual value '{whole}'", code=51024)
    if whole < 0:
        raise UsageError(f"BSON field 'strength' value must be >= 0, actual value '{whole}'", code=51024)
    if whole == 0:
        raise _not_a_value("strength", "0")
    return whole


def _wrong_type(name: str, value: Value, expected: str) -> UsageError:
    type_name = v.type_name(value)
    return UsageError(f"BSON field 'collation.{name}' is the wrong type '{type_name}', expected {expected}", code=14)


def _not_a_value(name: str, text: str) -> UsageError:
    return UsageError(f"Enumeration value '{text}' for field 'collation.{name}' is not a valid value.", code=2)


def _check_locale(locale: str, shown: str) -> None:
    if not locale:
        raise UsageError(f"Field 'locale' cannot be the empty string in: {shown}", code=2)
    if "\0" in locale:
        raise UsageError(f"Field 'locale' cannot contain null byte. Collation spec: {shown}", code=2)
    base, at, keyword = locale.partition("@")
    name, _, kind = keyword.partition("=")
    known = base in LOCALES and (not at or (name == "collation" and kind in _TYPES | _TYPES_OF.get(base, frozenset())))
    if not known:
        nearest = _nearest(base)
        meant = f". Did you mean '{nearest}'?" if nearest else ""
        raise UsageError(f"Field 'locale' is invalid in: {shown}{meant}", code=2)


def _nearest(locale: str) -> str | None:
    """The locale that the server suggests: the same in the usual spelling, or the longest beginning of it."""
    language, *rest = re.split("[-_]", locale)
    parts = [language.lower(), *(part.title() if len(part) == 4 else part.upper() for part in rest)]
    while parts:
        if "_".join(parts) in LOCALES:
            return "_".join(parts)
        parts.pop()
    return None


def _check_version(version: str | None, shown: str) -> None:
    if version is not None and version != ICU_VERSION:
        raise UsageError(
            f"Requested collation version {version} but the only available collator version was {ICU_VERSION}. "
            f"Requested collation spec: {shown}",
            code=161,
        )


def _filled(given: dict[str, Any]) -> Collation:
    locale = given["locale"]
    return Collation(
        locale=locale,
        strength=given.get("strength", 3),
        case_level=given.get("caseLevel", False),
        case_first=given.get("caseFirst", "upper" if locale in _UPPER_FIRST else "off"),
        numeric_ordering=given.get("numericOrdering", False),
        alternate=given.get("alternate", "shifted" if locale in _SHIFTED else "non-ignorable"),
        max_variable=given.get("maxVariable", "punct"),
        normalization=given.get("normalization", locale in _NORMALIZING or locale.endswith(_NORMALIZING_TYPES)),
        backwards=given.get("backwards", locale in _BACKWARDS),
    )


def _check_together(collation: Collation, shown: str) -> None:
    """Options that contradict each other, a locale's own defaults included."""
    if collation.backwards and collation.strength == 1:
        raise UsageError(f"'backwards' is invalid with 'strength' of 1 in: {shown}", code=2)
    if collation.case_first != "off" and not collation.case_level and collation.strength < 3:
        raise UsageError(
            f"'caseFirst' is invalid unless 'caseLevel' is on or 'strength' is greater than 2 in: {shown}", code=2
        )


# ── the order ────────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=16)
def order_of(collation: Collation | None) -> Order:
    """The order of values under a collation; the simple one without.

    Raises ``UsageError`` (115) where ICU is not installed or lacks the collation.
    """
    if collation is None:
        return SIMPLE
    sort_key = _collator(collation).getSortKey

    def string_key(data: bytes) -> bytes:
        key: bytes = sort_key(data[4:-1].decode("utf-8", "replace"))
        return key

    return collated(string_key)


def _collator(collation: Collation) -> Any:
    """ICU's collator with every option set: what a locale implies here must not depend on ICU's version."""
    try:
        import icu  # noqa: PLC0415  an extra, and only a collation needs it
    except ImportError as error:
        raise UsageError(
            f"the collation '{collation.locale}' needs ICU, which cannot be imported ({error}); only the simple "
            "collation works without it",
            code=115,
            hint=INSTALL,
        ) from None
    locale = _RENAMED.get(collation.locale, collation.locale)
    if locale.partition("=")[2] in _GONE:
        raise UsageError(
            f"the collation '{collation.locale}' is not supported: ICU {icu.ICU_VERSION} no longer has it", code=115
        )
    attribute, value = icu.UCollAttribute, icu.UCollAttributeValue
    switch = {False: value.OFF, True: value.ON}
    strengths = (value.PRIMARY, value.SECONDARY, value.TERTIARY, value.QUATERNARY, value.IDENTICAL)
    cases = {"off": value.OFF, "upper": value.UPPER_FIRST, "lower": value.LOWER_FIRST}
    collator = icu.Collator.createInstance(icu.Locale(locale))
    collator.setAttribute(attribute.STRENGTH, strengths[collation.strength - 1])
    collator.setAttribute(attribute.CASE_LEVEL, switch[collation.case_level])
    collator.setAttribute(attribute.CASE_FIRST, cases[collation.case_first])
    collator.setAttribute(attribute.NUMERIC_COLLATION, switch[collation.numeric_ordering])
    collator.setAttribute(
        attribute.ALTERNATE_HANDLING, value.SHIFTED if collation.alternate == "shifted" else value.NON_IGNORABLE
    )
    collator.setAttribute(attribute.NORMALIZATION_MODE, switch[collation.normalization])
    collator.setAttribute(attribute.FRENCH_COLLATION, switch[collation.backwards])
    if collation.max_variable == "space":
        collator.setVariableTop(" ")  # the group that the blank is in; PyICU has no setMaxVariable
    return collator
