"""PCRE2 as servers from 7.0 on have it (10.40), for a PCRE2 that is newer.

Almost everything is passed on as it is written. What later releases brought (lookbehinds of varying length, ``{,n}``,
spaces inside braces, options, properties, long names of groups) is answered as 10.40 answers it, and the little that
cannot be is refused by name.
"""

from __future__ import annotations

import re
from typing import Final

from tailrace.core.expression.language import registry
from tailrace.core.expression.language.pattern_reader import (
    DEPTH_LIMIT,
    HEAP_LIMIT,
    MATCH_LIMIT,
    POSIX,
    PatternGroup,
    PatternReader,
    code_point,
    invalid,
)

#: What the server's library was built with, of which a pattern may lower the first two. It gives a search more memory
#: than that depth ever needs.
_LIMITS: Final = {"MATCH": MATCH_LIMIT, "DEPTH": DEPTH_LIMIT, "HEAP": HEAP_LIMIT}

_START = re.compile(r"\(\*(?:LIMIT_(MATCH|DEPTH|RECURSION|HEAP)=(\d+)|([A-Z0-9_]+))\)", re.ASCII)
_START_VERB_NAMES: Final = """
    UTF UCP NOTEMPTY NOTEMPTY_ATSTART NO_AUTO_POSSESS NO_DOTSTAR_ANCHOR NO_JIT NO_START_OPT CR LF CRLF ANY NUL ANYCRLF
    BSR_ANYCRLF BSR_UNICODE
    """
_START_VERBS: Final = frozenset(_START_VERB_NAMES.split())
_VERB = re.compile(r"\*(ACCEPT|FAIL|F|COMMIT|PRUNE|SKIP|THEN|MARK|)(:[^)]*)?\)")
_WORDED = re.compile(r"\*([a-z_]+):")
_AHEAD_NAMES: Final = "pla nla napla positive_lookahead negative_lookahead non_atomic_positive_lookahead"
_AHEAD: Final = frozenset(_AHEAD_NAMES.split())
_BEHIND_NAMES: Final = "plb nlb naplb positive_lookbehind negative_lookbehind non_atomic_positive_lookbehind"
_BEHIND: Final = frozenset(_BEHIND_NAMES.split())
_PLAIN: Final = frozenset({"atomic", "sr", "script_run", "asr", "atomic_script_run"})
_OPTIONS = re.compile(r"\?(\^?[A-Za-z-]*)([:)])")
_LETTERS: Final = frozenset("^imnsxJU-")
_CONDITION = re.compile(r"\?\((?:[+-]?\d+|<\w+>|'\w+'|R\d*|R&\w+|VERSION>?=\d+(?:\.\d+)?|\w+)\)")
_CALL = re.compile(r"\?(?:R|[+-]?\d+|&\w+|P>\w+)\)")
_CALLOUT = re.compile(r"\?C\d*\)", re.ASCII)
_NAME = re.compile(r"[^\W\d]\w{0,31}")
_QUANTIFIER = re.compile(r"\{(\d+)(?:(,)(\d*))?\}", re.ASCII)
_REFERENCE = re.compile(r"\{[+-]?\d+\}|[+-]?\d+|\{\w+\}")
_NAME_REFERENCE = re.compile(r"\{\w+\}|<\w+>|'\w+'")
_GROUP_CALL = re.compile(r"<[+-]?\w+>|'[+-]?\w+'")
_CODE_POINT = re.compile(r"\{U\+[0-9A-Fa-f]+\}")
_DIGITS = re.compile(r"\d*", re.ASCII)
_PROPERTY = re.compile(r"\{[^}]*\}|.", re.DOTALL)
#: Properties that came after Unicode 14, which the server's library holds: letters alone, in lower case.
_LATER_PROPERTY_NAMES: Final = """
    kawi nagm nagmundari gara garay gukh gurungkhema krai kiratrai onao olonal sunu sunuwar todr todhri tutg
    tulutigalari idsunaryoperator idsu idcompatmathstart idcompatmathcontinue modifiercombiningmark mcm incb
    """
_LATER_PROPERTIES: Final = frozenset(_LATER_PROPERTY_NAMES.split())
#: PCRE2 10.43 and later take these for one another without regard to case; before, nothing does.
_CASED: Final = frozenset({"lu", "ll", "lt"})


def rewritten_later(pattern: bytes, *, extended: bool, caseless: bool) -> bytes:
    """The pattern for PCRE2, limits included.

    Raises 51091 for what the server's library does not compile, as far as this one would not say so itself, and
    ``registry.NOT_SUPPORTED`` for what cannot be expressed here.
    """
    try:
        text = pattern.decode("utf-8")
    except UnicodeDecodeError as error:
        raise registry.parse_failure(51091, f"Regular expression is invalid: invalid UTF-8 string: {error}") from None
    return (
        LaterPatternReader(text, PatternGroup(extended=extended, caseless=caseless)).read(whole=False).encode("utf-8")
    )


class LaterPatternReader(PatternReader):
    """One pass over a pattern, written for PCRE2."""

    def _start(self) -> str:
        limits = dict(_LIMITS)
        kept = []
        while match := self._find(_START):
            name, number, verb = match.groups()
            if name is not None:
                name = "DEPTH" if name == "RECURSION" else name
                if int(number) >= 0xFFFFFFFF:
                    invalid("(*VERB) not recognized or malformed")
                if name == "HEAP":
                    self._refuse("(*LIMIT_HEAP)")  # the server's library begins on the stack, this one does not
                limits[name] = min(limits[name], int(number))
            elif verb in _START_VERBS:
                kept.append(match[0])
            elif verb != "UTF8":
                break
            self.pos = match.end()
        return "".join(f"(*LIMIT_{name}={limit})" for name, limit in limits.items()) + "".join(kept)

    def _literal(self, letter: str) -> None:
        if self.groups[-1].extended and letter in "\x85\u200e\u200f\u2028\u2029":
            self.out.append(letter)
        else:
            self._put(letter)

    def _brace(self) -> None:
        self.pos -= 1
        match = self._find(_QUANTIFIER)
        if match is None:
            self.pos += 1
            self._put("\\{")  # also before ",n}" and where spaces stand: they count since 10.43
            return
        self.pos = match.end()
        low = int(match[1][:6])
        high = low if not match[2] else int(match[3][:6]) if match[3] else None
        self._quantify(match[0], low, high)

    def _is_fixed(self, before: str, low: int, high: int | None) -> bool:
        return low == high

    def _special(self) -> None:
        if self.text.startswith("?*", self.pos):
            self._push("(" + self._skip(2), "ahead")
            return
        if found := self._find(_CALL):
            self.pos = found.end()
            self._call("(" + found[0], self._target(found[0][1:-1]))
        elif found := self._find(_CONDITION):
            if found[0].startswith("?(VERSION"):
                self._refuse("(?(VERSION)")
            self.pos = found.end()
            self._push("(" + found[0], "condition")
        elif self.text.startswith(("?(?", "?(*"), self.pos):
            self._push("(" + self._skip(1), "condition")
        elif found := self._find(_CALLOUT) or self._find(re.compile(r"\?P=\w+\)")):
            self.pos = found.end()
            self._put("(" + found[0], 0 if found[0][1] == "C" else None, 0)
        elif self.text.startswith("?C", self.pos):
            self._refuse("a callout with a text")
        elif found := self._find(_OPTIONS):
            self._set_options(found)
        else:
            invalid("unrecognized character after (? or (?-")

    def _named(self, found: re.Match[str]) -> None:
        if self.text.startswith("?<*", self.pos):
            self._push("(" + self._skip(3), "behind")
            return
        self.pos = found.end()
        name = self._find(_NAME)
        closing = "'" if found[0].endswith("'") else ">"
        if name is None or not self.text.startswith(closing, name.end()):
            invalid("a group's name is up to 32 letters, digits and underscores, and begins with no digit")
        self.pos = name.end() + 1
        self.names.setdefault(name[0], self.captures + 1)
        self._capture(f"({found[0]}{name[0]}{closing}")

    def _verb(self) -> None:
        if match := self._find(_VERB):
            self.pos = match.end()
            self._put("(" + match[0], 0)
            return
        worded = self._find(_WORDED)
        if worded is None:
            invalid("(*VERB) not recognized or malformed")
        self.pos = worded.end()
        if worded[1] in _AHEAD:
            self._push("(" + worded[0], "ahead")
        elif worded[1] in _BEHIND:
            self._push("(" + worded[0], "behind")
        elif worded[1] in _PLAIN:
            self._push("(" + worded[0], "")
        else:
            invalid("(*alpha_assertion) not recognized")

    def _set_options(self, found: re.Match[str]) -> None:
        letters, end = found.groups()
        if set(letters) - _LETTERS or (letters[:1] == "^" and "-" in letters) or letters.count("-") > 1:
            invalid("unrecognized character after (? or (?-")
        self.pos = found.end()
        if end == ":":
            self._push("(" + found[0], "")
        else:
            self.out.append("(" + found[0])
        group = self.groups[-1]
        if letters[:1] == "^":
            group.extended = group.caseless = group.unnumbered = False
        way = True
        for letter in letters:
            way = way and letter != "-"
            if letter == "x":
                group.extended = way
            elif letter == "i":
                group.caseless = way
            elif letter == "n":
                group.unnumbered = way

    def _call(self, text: str, number: int | None) -> None:
        """A call of a group, which may be gone back into."""
        if self._inside("behind") and (number not in self.closed or not number):
            self._refuse("a call of an open, later or named group inside a lookbehind")
        length, least = self.closed.get(number or 0, (None, 0))
        self._put(text, length, least)

    # ── escapes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _escape(self) -> None:
        letter = self._next()
        if letter in "bBAzZGK":
            self._put("\\" + letter, 0)
        elif letter in "RX":
            self._put("\\" + letter, None, 1)
        elif letter == "C":
            self._refuse("\\C")
        elif letter in "QE":
            self.pos -= 1
            super()._escape()
        elif letter == "g" and (call := self._find(_GROUP_CALL)):
            self.pos = call.end()
            self._call("\\g" + call[0], self._target(call[0][1:-1]))
        elif letter in "gk":
            self._put("\\" + letter + self._part_of(_REFERENCE if letter == "g" else _NAME_REFERENCE), None, 0)
            self._check_reference()
        elif letter in "123456789":
            self._put("\\" + letter + self._part_of(_DIGITS), None, 0)
            self._check_reference()
        else:
            self._put(self._character(letter))

    def _check_reference(self) -> None:
        if self._inside("behind"):
            self._refuse("a back reference inside a lookbehind")

    def _part_of(self, pattern: re.Pattern[str]) -> str:
        """What the pattern finds here; 51091 where it does not."""
        match = self._find(pattern)
        if match is None:
            invalid("a number, a name or a code point is missing or malformed")
        self.pos = match.end()
        return match[0]

    def _character(self, letter: str) -> str:
        """An escape as it is written, up to its end; a number as the character that it means, since the library here
        reads ``\\x`` and ``\\u`` as JavaScript does."""
        if letter in "xoLlUu":
            return super()._character(letter)
        if letter == "N" and self.text.startswith("{", self.pos) and not self._find(_QUANTIFIER):
            return code_point(int(self._part_of(_CODE_POINT)[3:-1], 16))
        if letter == "c":
            return "\\c" + (self._next() if self.pos < len(self.text) else "")
        if letter in "0123456789":
            return "\\" + letter + self._part_of(_DIGITS)
        if letter in "pP":
            return self._property(letter)
        return "\\" + letter

    def _property(self, letter: str) -> str:
        name = self._part_of(_PROPERTY)
        plain = re.sub(r"[\s_{}^-]", "", name).lower()
        if plain.rpartition("=")[2].rpartition(":")[2] in _LATER_PROPERTIES or plain in _LATER_PROPERTIES:
            invalid("unknown property after \\P or \\p")
        if plain in _CASED and self.groups[-1].caseless:
            self._refuse("\\p{Lu}, \\p{Ll} or \\p{Lt} without regard to case")
        return "\\" + letter + name

    # ── classes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _class(self) -> None:
        """A class as it is written; what is wrong in it is the same to all releases."""
        edge = next((name for name in ("[:<:]]", "[:>:]]") if self.text.startswith(name, self.pos)), None)
        if edge is not None:
            self.pos += len(edge)
            self._put("[" + edge, 0)
            return
        parts = ["["]
        if self.text.startswith("^", self.pos):
            parts.append(self._skip(1))
        if self.text.startswith("]", self.pos):
            parts.append(self._skip(1))
        while not self.text.startswith("]", self.pos):
            if self.pos >= len(self.text):
                invalid("missing terminating ] for character class")
            parts.append(self._class_item())
        self.pos += 1
        self._put("".join(parts) + "]")

    def _class_item(self) -> str:
        letter = self._next()
        if letter == "[" and (posix := self._find(POSIX)):
            self.pos = posix.end()
            return letter + posix[0]
        if letter == "\\" and self.text.startswith("Q", self.pos):
            end = self.text.find("\\E", self.pos)
            end = len(self.text) if end < 0 else end + 2
            return letter + self._skip(end - self.pos)
        if letter != "\\" or self.pos >= len(self.text):
            return letter
        following = self._next()
        if following == "k":
            invalid("escape sequence is invalid in character class")
        return self._character(following)
