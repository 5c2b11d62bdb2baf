"""PCRE 8.42 as the server reads it, rewritten for PCRE2.

Almost everything means the same in both and is passed on as it is. What PCRE2 learned later is turned into what the
server makes of it (an error, or plain letters), what it reads differently is rewritten so that it means the same, and
the little that cannot be expressed in PCRE2 is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NoReturn

from tailrace.core.expression.language import pattern_properties, registry

#: What the server's library was built with; a pattern may lower it.
MATCH_LIMIT: Final = 200_000
DEPTH_LIMIT: Final = 4_000
#: KiB of frames for the depth above: a frame grows with the number of groups, on the server it does not.
HEAP_LIMIT: Final = 131_072

_START_VERBS: Final = frozenset(
    {"UCP", "NO_AUTO_POSSESS", "NO_START_OPT", "CR", "LF", "CRLF", "ANYCRLF", "ANY", "BSR_ANYCRLF", "BSR_UNICODE"}
)
_START = re.compile(r"\(\*(?:(LIMIT_MATCH|LIMIT_RECURSION)=(\d*)|([A-Z0-9_]+))\)")
_VERB = re.compile(r"\*([A-Z]*)(:[^)]*)?\)")
_VERBS: Final = frozenset({"ACCEPT", "FAIL", "F", "COMMIT", "PRUNE", "SKIP", "THEN", "MARK", ""})
_QUANTIFIER = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_OPTIONS = re.compile(r"\?([A-Za-z-]*)([:)])")
_NAMED = re.compile(r"\?(?:P?<(?![=!])|')")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}", re.ASCII)
_CALL = re.compile(r"\?(?:R|[+-]?\d+|&\w+|P>\w+)\)", re.ASCII)
_CONDITION = re.compile(r"\?\((?:[+-]?\d+|<\w+>|'\w+'|R&\w+|\w+)\)", re.ASCII)
_CALLOUT = re.compile(r"\?C\d*\)", re.ASCII)
_HEXADECIMAL = re.compile(r"\{([0-9a-fA-F]*)\}|(?!\{)([0-9a-fA-F]{0,2})")
_OCTAL = re.compile(r"\{([0-7]+)\}")
_REFERENCE = re.compile(r"\{-?\d+\}|-?\d+|\{\w+\}", re.ASCII)
POSIX = re.compile(r"([:.=])[^\]\\]*?\1\]")
_NAME_REFERENCE = re.compile(r"\{\w+\}|<\w+>|'\w+'", re.ASCII)
_GROUP_CALL = re.compile(r"<[+-]?\w+>|'[+-]?\w+'", re.ASCII)
#: White space to PCRE2 in an extended pattern, and letters to the server.
_LATER_SPACE: Final = "\x85\u200e\u200f\u2028\u2029"
AROUND: Final = ("ahead", "behind")
_SPACE: Final = " \t\n\x0b\f\r"


@dataclass(slots=True)
class PatternGroup:
    """An open group: what the options are inside, and how long what it holds is.

    ``length`` is that of the branch so far, ``None`` where it varies; ``least`` its least length.
    """

    kind: str = ""
    number: int = 0
    extended: bool = False
    caseless: bool = False
    length: int | None = 0
    least: int = 0
    lengths: list[int | None] = field(default_factory=list)
    leasts: list[int] = field(default_factory=list)
    #: Of a ``(?|``: how many captures stand before it, and the most that a branch of it has reached.
    before: int = 0
    most: int = 0
    #: Where it begins in what is written.
    at: int = 0
    #: Whether parentheses alone capture nothing (``(?n)``, of PCRE2).
    unnumbered: bool = False

    def end_branch(self) -> None:
        self.lengths.append(self.length)
        self.leasts.append(self.least)
        self.length, self.least = 0, 0

    def whole(self) -> tuple[int | None, int]:
        """Length and least length of a closed group."""
        if self.kind in AROUND:
            return 0, 0
        if self.kind == "condition" and len(self.leasts) == 1:
            return self.lengths[0], 0
        same = all(length == self.lengths[0] for length in self.lengths)
        return (self.lengths[0] if same else None), min(self.leasts)


def rewritten(pattern: bytes, *, extended: bool, caseless: bool, whole: bool = False) -> bytes:
    """The pattern for PCRE2, limits included; ``whole`` puts it in parentheses, for a match of all the input.

    Raises 51091 for what the server's library does not compile, as far as PCRE2 would not say so itself, and
    ``registry.NOT_SUPPORTED`` for what PCRE2 cannot do.
    """
    try:
        text = pattern.decode("utf-8")
    except UnicodeDecodeError as error:
        raise registry.parse_failure(51091, f"Regular expression is invalid: invalid UTF-8 string: {error}") from None
    return PatternReader(text, PatternGroup(extended=extended, caseless=caseless)).read(whole=whole).encode("utf-8")


def invalid(what: str) -> NoReturn:
    """Raise 51091: the server's library does not compile the pattern."""
    raise registry.parse_failure(51091, f"Regular expression is invalid: {what}")


class PatternReader:
    """One pass over a pattern, written for PCRE."""

    def __init__(self, text: str, group: PatternGroup) -> None:
        self.text = text
        self.pos = 0
        self.out: list[str] = []
        self.groups = [group]
        self.captures = 0
        #: Length and least length of the groups that are closed, by number.
        self.closed: dict[int, tuple[int | None, int]] = {}
        self.names: dict[str, int] = {}
        #: Length and least length of the last item, for a quantifier after it.
        self.last: tuple[int | None, int] = (0, 0)
        #: Where the group that was closed last begins.
        self.opened = 0

    def read(self, *, whole: bool) -> str:
        head = self._start()
        if whole:
            self.text, self.pos = f"(?:{self.text[self.pos :]})\\z", 0
        while self.pos < len(self.text):
            self._token()
        return head + "".join(self.out)

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, what: str) -> NoReturn:
        raise registry.parse_failure(
            registry.NOT_SUPPORTED, f"$regex with {what} is not supported (at {self.pos} of {self.text!r})"
        )

    def _find(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.match(self.text, self.pos)

    def _next(self) -> str:
        if self.pos >= len(self.text):
            invalid("\\ at end of pattern")
        self.pos += 1
        return self.text[self.pos - 1]

    def _put(self, text: str, length: int | None = 1, least: int | None = None) -> None:
        """An item. ``least`` is its length unless said."""
        self.out.append(text)
        self._add(length, (length or 0) if least is None else least)

    def _add(self, length: int | None, least: int) -> None:
        group = self.groups[-1]
        self.last = (length, least)
        group.length = None if group.length is None or length is None else group.length + length
        group.least += least

    def _start(self) -> str:
        """The settings before everything else, the limits made into one each."""
        limits = {"LIMIT_MATCH": MATCH_LIMIT, "LIMIT_RECURSION": DEPTH_LIMIT}
        kept = []
        while match := self._find(_START):
            name, number, verb = match.groups()
            if name is not None:
                if int(number or "0") >= 0xFFFFFFFF:
                    invalid("(*VERB) not recognized or malformed")
                limits[name] = min(limits[name], int(number or "0"))
            elif verb in _START_VERBS:
                kept.append(match[0])
            elif verb not in ("UTF", "UTF8"):
                break
            self.pos = match.end()
        if limits["LIMIT_MATCH"] == 0:
            kept.append("(*NO_START_OPT)")  # nothing may be tried, so nothing may be known beforehand
        return (
            f"(*LIMIT_MATCH={limits['LIMIT_MATCH']})(*LIMIT_DEPTH={limits['LIMIT_RECURSION']})"
            f"(*LIMIT_HEAP={HEAP_LIMIT})" + "".join(kept)
        )

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _token(self) -> None:
        letter = self._next()
        if letter == "\\":
            self._escape()
        elif letter == "[":
            self._class()
        elif letter == "(":
            self._open()
        elif letter == ")":
            self._close()
        elif letter == "|":
            self._branch()
        elif letter in "*+?":
            self._quantify(letter, 0 if letter != "+" else 1, 1 if letter == "?" else None)
        elif letter == "{":
            self._brace()
        elif letter in "^$":
            self._put(letter, 0)
        elif self.groups[-1].extended and letter in _SPACE:
            self.out.append(letter)
        elif self.groups[-1].extended and letter == "#":
            end = self.text.find("\n", self.pos)
            self.pos = len(self.text) if end < 0 else end + 1
        else:
            self._literal(letter)

    def _branch(self) -> None:
        group = self.groups[-1]
        group.end_branch()
        if group.kind == "branch reset":
            group.most = max(group.most, self.captures)
            self.captures = group.before
        self._put("|", 0)

    def _literal(self, letter: str) -> None:
        self._put(code_point(ord(letter)) if letter in _LATER_SPACE else letter)

    def _brace(self) -> None:
        self.pos -= 1
        match = self._find(_QUANTIFIER)
        if match is None:
            self.pos += 1
            self._put("\\{")
            return
        self.pos = match.end()
        low = int(match[1][:6])
        high = low if not match[2] else int(match[3][:6]) if match[3] else None
        self._quantify(match[0], low, high)

    def _inside(self, *kinds: str) -> bool:
        return any(group.kind in kinds for group in self.groups)

    def _quantify(self, text: str, low: int, high: int | None) -> None:
        before = next((piece for piece in reversed(self.out) if piece != "\\E"), "")
        group = self.groups[-1]
        length, least = self.last
        fixed = self._is_fixed(before, low, high)
        if before == ")" and high == 0:  # PCRE2 10.47 looks for the start of a match in a look-ahead that never is
            self.out[self.opened] = "(?:" + self.out[self.opened]
            self.out.append(")")
        whole = length * low if length is not None and fixed else None
        group.length = None if group.length is None or whole is None else group.length + whole - (length or 0)
        group.least += least * (low - 1)
        self.out.append(text)
        if self.text[self.pos : self.pos + 1] in ("+", "?"):
            self.out.append(self._next())
        self.last = (whole, least * low)

    def _is_fixed(self, before: str, low: int, high: int | None) -> bool:
        """Whether what is repeated has one length, if the item ``before`` has one."""
        if before == "(*ACCEPT)":
            invalid("nothing to repeat")
        if before == ")" and low == 0:
            return False  # to the server a group that may be left out varies in length, an empty one too
        return low == high or self.last[0] == 0

    def _open(self) -> None:
        rest = self.text[self.pos : self.pos + 4]
        if rest.startswith("*"):
            self._verb()
        elif not rest.startswith("?"):
            self._push("(", "") if self.groups[-1].unnumbered else self._capture("(")
        elif rest.startswith("?#"):
            end = self.text.find(")", self.pos)
            if end < 0:
                invalid("missing ) after comment")
            self.pos = end + 1
        elif rest.startswith(("?=", "?!")):
            self._push("(" + self._skip(2), "ahead")
        elif rest.startswith(("?<=", "?<!")):
            self._push("(" + self._skip(3), "behind")
        elif rest.startswith(("?:", "?>", "?|")):
            self._push("(" + self._skip(2), "branch reset" if rest[1] == "|" else "")
        elif match := self._find(_NAMED):
            self._named(match)
        else:
            self._special()

    def _special(self) -> None:
        """``(?`` and what is no plain group."""
        if found := self._find(_CALL):
            self.pos = found.end()
            self._call("(" + found[0], self._target(found[0][1:-1]))
        elif found := self._find(_CONDITION):
            self.pos = found.end()
            self._push("(" + found[0], "condition")
        elif self.text.startswith("?(?", self.pos):
            self._push("(" + self._skip(1), "condition")
        elif found := self._find(_CALLOUT) or self._find(re.compile(r"\?P=\w+\)", re.ASCII)):
            self.pos = found.end()
            self._put("(" + found[0], 0 if found[0][1] == "C" else None)
        elif found := self._find(_OPTIONS):
            self._set_options(found)
        else:
            invalid("unrecognized character after (?")

    def _skip(self, count: int) -> str:
        self.pos += count
        return self.text[self.pos - count : self.pos]

    def _push(self, text: str, kind: str, number: int = 0) -> None:
        outer = self.groups[-1]
        at = len(self.out)
        self.out.append(text)
        made = PatternGroup(kind, number, outer.extended, outer.caseless, before=self.captures, at=at)
        made.unnumbered = outer.unnumbered
        self.groups.append(made)
        self.last = (0, 0)

    def _capture(self, text: str) -> None:
        self.captures += 1
        self._push(text, "capture", self.captures)

    def _named(self, found: re.Match[str]) -> None:
        self.pos = found.end()
        name = self._find(_NAME)
        closing = "'" if found[0].endswith("'") else ">"
        if name is None or not self.text.startswith(closing, name.end()):
            invalid("a group's name is up to 32 letters, digits and underscores, and begins with no digit")
        self.pos = name.end() + 1
        self.names[name[0]] = self.captures + 1
        self._capture(f"({found[0]}{name[0]}{closing}")

    def _close(self) -> None:
        if len(self.groups) == 1:
            invalid("unmatched parentheses")
        group = self.groups.pop()
        self.opened = group.at
        group.end_branch()
        if group.kind == "behind" and None in group.lengths:
            invalid("lookbehind assertion is not fixed length")
        self.captures = max(self.captures, group.most)
        size = group.whole()
        if group.kind == "capture":
            self.closed[group.number] = size
        self.out.append(")")
        self._add(*size)

    def _verb(self) -> None:
        match = self._find(_VERB)
        if match is None or match[1] not in _VERBS:
            invalid("(*VERB) not recognized or malformed")
        if match[2] and match[1] in ("ACCEPT", "FAIL", "F", "COMMIT"):
            invalid("an argument is not allowed for (*ACCEPT), (*FAIL), or (*COMMIT)")
        if match[1] == "SKIP" and match[2] and self._inside(*AROUND):
            self._refuse("(*SKIP:name) inside a look-around")
        self.pos = match.end()
        self._put("(" + match[0], 0)

    def _set_options(self, found: re.Match[str]) -> None:
        letters, end = found.groups()
        if set(letters) - set("imsxJUX-"):
            invalid("unrecognized character after (? or (?-")
        if "X" in letters:
            self._refuse("(?X)")
        self.pos = found.end()
        on: dict[str, bool] = {}
        way = True
        for letter in letters:
            way = way and letter != "-"
            if letter != "-":
                on[letter] = way
        text = "".join(letter for letter in on if on[letter])
        off = "".join(letter for letter in on if not on[letter])
        written = "(?" + text + ("-" + off if off else "") + end
        if end == ":":
            self._push(written, "")
        else:
            self.out.append(written)
        group = self.groups[-1]
        group.extended = on.get("x", group.extended)
        group.caseless = on.get("i", group.caseless)

    # ── calls of groups ──────────────────────────────────────────────────────────────────────────────────────────────

    def _target(self, text: str) -> int | None:
        """The number of the group that is called; ``None`` where a name says it."""
        if text == "R":
            return 0
        if not text.lstrip("+-").isdigit():
            return self.names.get(text.removeprefix("P>").removeprefix("&"))
        number = int(text.lstrip("+-"))
        if text[0] == "-":
            return self.captures - number + 1
        return self.captures + number if text[0] == "+" else number

    def _call(self, text: str, number: int | None) -> None:
        """A call of a group, which the server's library never goes back into."""
        inner = [at for at, group in enumerate(self.groups) if number is not None and group.number == number]
        reached = self.groups[inner[0] :] if inner else []
        # the server looks at neither conditions nor the later branches of a look-around
        seen = not self._inside("condition") and not any(group.kind in AROUND and group.leasts for group in reached)
        if reached and seen and all(group.least == 0 for group in reached):
            invalid("recursive call could loop indefinitely")
        if self._inside("behind") and number not in self.closed:
            self._refuse("a call of an open, later or named group inside a lookbehind")
        length, least = self.closed.get(number or 0, (None, 0))
        self._put(f"(?>{text})", length, least)

    # ── escapes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _escape(self) -> None:
        letter = self._next()
        if letter in "dDwWsShHvVN":
            self._simple(letter)
        elif letter in "bBAzZG":
            self._put("\\" + letter, 0)
        elif letter == "K":
            if self._inside(*AROUND):
                self._refuse("\\K inside a look-around")
            self._put("\\K", 0)
        elif letter in "RX":
            if self._inside("behind") and self._find(_QUANTIFIER):
                self._refuse(f"\\{letter} and a number inside a lookbehind")
            self._put("\\" + letter, None, 1)
        elif letter == "C":
            self._refuse("\\C")
        elif letter == "Q":
            end = self.text.find("\\E", self.pos)
            quoted = self.text[self.pos :] if end < 0 else self.text[self.pos : end]
            self.pos = len(self.text) if end < 0 else end + 2
            for each in quoted:
                self._put(_quoted(each))
        elif letter == "E":
            self.out.append("\\E")
        elif letter in "pP":
            self._put(self._property(letter))
        elif letter == "g":
            self._group_reference()
        elif letter == "k":
            match = self._find(_NAME_REFERENCE)
            if match is None:
                invalid("\\k is not followed by a braced, angle-bracketed, or quoted name")
            self.pos = match.end()
            self._put("\\k" + match[0], None, 0)
        elif letter in "123456789":
            self._number(letter)
        else:
            self._put(self._character(letter))

    def _simple(self, letter: str) -> None:
        if letter == "N" and self.text.startswith("{", self.pos) and not self._find(_QUANTIFIER):
            invalid("PCRE does not support \\L, \\l, \\N{name}, \\U, or \\u")
        self._put("\\" + letter)

    def _character(self, letter: str) -> str:
        """An escape for one character, in a class or outside."""
        if letter in "LlUu":
            invalid("PCRE does not support \\L, \\l, \\N{name}, \\U, or \\u")
        if letter == "x":
            return self._hexadecimal()
        if letter == "o":
            match = self._find(_OCTAL)
            if match is None:
                invalid("missing opening brace, digits or closing brace after \\o")
            self.pos = match.end()
            return code_point(int(match[1], 8))
        if letter == "c":
            control = self._next() if self.pos < len(self.text) else invalid("\\c at end of pattern")
            if ord(control) > 127:
                invalid("\\c must be followed by an ASCII character")
            return code_point(ord(control.upper()) ^ 64)
        if letter in "01234567":
            digits = re.match("[0-7]{1,3}", self.text[self.pos - 1 :])
            assert digits is not None
            self.pos += digits.end() - 1
            return code_point(int(digits[0], 8))
        if letter in "aefnrt":
            return "\\" + letter
        return _quoted(letter)  # an unknown letter stands for itself

    def _hexadecimal(self) -> str:
        match = self._find(_HEXADECIMAL)
        if match is None:
            invalid("non-hex character in \\x{} (closing brace missing?)")
        self.pos = match.end()
        if match[1] == "":
            invalid("digits missing in \\x{} or \\o{}")
        return code_point(int(match[1] or match[2] or "0", 16))

    def _number(self, letter: str) -> None:
        """A back reference if there are that many groups or it is one digit, else octal, else the digit itself."""
        match = re.match(r"\d+", self.text[self.pos - 1 :], re.ASCII)
        assert match is not None
        number = int(match[0][:10])
        if number <= self.captures or (number < 8):
            self.pos += match.end() - 1
            self._put(f"\\g{{{number}}}", None, 0)
        elif letter in "89":
            self._put(letter)
        else:
            self._put(self._character(letter))

    def _group_reference(self) -> None:
        call = self._find(_GROUP_CALL)
        if call is not None:
            self.pos = call.end()
            self._call("\\g" + call[0], self._target(call[0][1:-1]))
            return
        match = self._find(_REFERENCE)
        if match is None:
            invalid("a numbered reference must not be zero, or a name or number is missing after \\g")
        self.pos = match.end()
        self._put("\\g" + match[0], None, 0)

    def _property(self, letter: str) -> str:
        text, self.pos, cased = pattern_properties.read(self.text, self.pos, letter)
        if cased and self.groups[-1].caseless:
            return f"(?-i:{text})"
        return text

    # ── classes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _class(self) -> None:
        edge = next((name for name in ("[:<:]]", "[:>:]]") if self.text.startswith(name, self.pos)), None)
        if edge is not None:
            self.pos += len(edge)
            self._put("[" + edge, 0)
            return
        parts = ["["]
        if self.text.startswith("^", self.pos):
            parts.append(self._skip(1))
        first, quoting, after_set = True, False, False
        while True:
            if self.pos >= len(self.text):
                invalid("missing terminating ] for character class")
            letter = self._next()
            if quoting or letter == "\\":
                escape = "" if quoting else self._next()
                if quoting and letter == "\\" and self.text.startswith("E", self.pos):
                    self.pos += 1
                    quoting = False
                    continue
                if escape in ("Q", "E") and escape:
                    quoting = escape == "Q"
                    continue
                after_set = escape != "" and escape in "dDwWsShHvVpP"
                parts.append(_quoted(letter) if quoting else self._class_escape(escape))
            elif letter == "]" and not first:
                break
            elif letter == "[" and (name := self._find(POSIX)):
                self.pos = name.end()
                after_set = True
                parts.append("[" + name[0])
            else:
                parts.append("\\-" if letter == "-" and after_set else _in_class(letter))
                after_set = False
            first = False
        self._put("".join(parts) + "]")

    def _class_escape(self, letter: str) -> str:
        if letter in "dDwWsShHvVb":
            return "\\" + letter
        if letter == "N":
            invalid("\\N is not supported in a class")
        if letter in "pP":
            text, self.pos, cased = pattern_properties.read(self.text, self.pos, letter)
            if cased and self.groups[-1].caseless:
                self._refuse("\\p{Lu}, \\p{Ll} or \\p{Lt} in a class without regard to case")
            return text
        return self._character(letter)


def code_point(number: int) -> str:
    """A character by its number; 51091 for a number that is none."""
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        invalid("disallowed Unicode code point")
    return f"\\o{{{number:o}}}"


def _quoted(letter: str) -> str:
    """A letter that stands for itself. Only letters and digits of ASCII mean more after a backslash."""
    return letter if letter.isascii() and letter.isalnum() else code_point(ord(letter))


def _in_class(letter: str) -> str:
    return "\\[" if letter == "[" else letter
