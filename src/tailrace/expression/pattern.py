"""Regular expressions: the server's PCRE, translated to the ``regex`` library where both mean the same.

The pattern is read token by token, and every construct that is not known to mean the same in both is refused by name
when the stream is opened. A match is bounded: where PCRE would give up at its own limit, this one gives up after
``TIME_LIMIT`` seconds of one search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import regex

from tailrace.expression import registry

#: Seconds that one search may take.
TIME_LIMIT: Final = 2.0

_OPTIONS: Final = frozenset(b"imsxu")
#: Classes as PCRE has them without its Unicode properties: ASCII alone.
_CLASSES: Final = {
    "d": "0-9",
    "w": "A-Za-z0-9_",
    "s": "\\t\\n\\x0b\\f\\r ",
    "h": "\\t \\xa0\\u1680\\u180e\\u2000-\\u200a\\u202f\\u205f\\u3000",
    "v": "\\n\\x0b\\f\\r\\x85\\u2028\\u2029",
}
_POSIX: Final = {
    "alpha": "A-Za-z",
    "digit": "0-9",
    "alnum": "A-Za-z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": "\\t\\n\\x0b\\f\\r ",
    "xdigit": "0-9A-Fa-f",
    "word": "A-Za-z0-9_",
    "blank": "\\t ",
    "punct": "!-/:-@\\[-`{-~",
}
_CONTROL: Final = {"n": "\\n", "t": "\\t", "r": "\\r", "f": "\\f", "e": "\\x1b", "a": "\\x07"}


@dataclass(frozen=True, slots=True)
class CompiledPattern:
    """A compiled pattern over UTF-8 bytes or text."""

    compiled: Any
    source: bytes

    def matches(self, data: bytes) -> bool:
        """Whether the pattern is found anywhere. A search that runs away is an error, as for the server's limits."""
        return self.search(data.decode("utf-8", "surrogateescape"), 0) is not None

    def search(self, text: str, start: int) -> Any:
        try:
            return self.compiled.search(text, start, timeout=TIME_LIMIT)
        except TimeoutError:
            raise registry.failure(
                51156,
                "Error occurred while executing the regular expression in regexMatch: it exceeded the limit of "
                f"{TIME_LIMIT:g} seconds for one search: {self.source.decode('utf-8', 'replace')}",
            ) from None


def check_options(options: bytes, code: int = 51108) -> None:
    for letter in options:
        if letter not in _OPTIONS:
            raise registry.parse_failure(code, f" invalid flag in regex options: {chr(letter)}")


_CACHE: Final[dict[tuple[bytes, bytes], CompiledPattern]] = {}


def compile_pattern(pattern: bytes, options: bytes) -> CompiledPattern:
    """Compile a pattern with its options, the letters ``imsx`` (and ``u``, which changes nothing).

    Raises 51091 for what does not compile and ``registry.NOT_SUPPORTED`` for what could mean something else here.
    """
    key = (pattern, options)
    known = _CACHE.get(key)
    if known is not None:
        return known
    text = pattern.decode("utf-8", "surrogateescape")
    translated = _Translator(text, options).translate()
    flags = regex.VERSION0 | regex.UNICODE
    for letter, flag in (("i", regex.IGNORECASE), ("m", regex.MULTILINE), ("s", regex.DOTALL)):
        if letter.encode() in options:
            flags |= flag
    try:
        compiled = regex.compile(translated, flags)
    except (regex.error, OverflowError, RecursionError) as error:
        raise registry.parse_failure(51091, f"Regular expression is invalid: {error}") from None
    result = CompiledPattern(compiled, pattern)
    if len(_CACHE) < 256:  # patterns may come from the documents; a full cache stays as it is
        _CACHE[key] = result
    return result


class _Translator:
    """One pass over a PCRE pattern. Whatever it does not know is refused, so an unknown construct is never guessed."""

    def __init__(self, text: str, options: bytes) -> None:
        self.text = text
        self.pos = 0
        self.out: list[str] = []
        #: What stands before: "" an item that may repeat, "assertion" one that PCRE does not repeat, "start" nothing,
        #: "group" a look-around or an edge whose repetition the two libraries read differently.
        self.before = "start"
        self.extended = b"x" in options
        self.caseless = b"i" in options
        #: For each open group, whether it is a look-around.
        self.groups: list[bool] = []
        self.names: set[str] = set()

    def translate(self) -> str:
        if self.text.startswith("(*"):
            raise self._refusal("a verb such as (*UTF8)")
        while self.pos < len(self.text):
            self._token()
        return "".join(self.out)

    def _refusal(self, what: str) -> Exception:
        return registry.parse_failure(
            registry.NOT_SUPPORTED, f"$regex with {what} is not supported (at {self.pos} of {self.text!r})"
        )

    def _invalid(self, what: str) -> Exception:
        return registry.parse_failure(51091, f"Regular expression is invalid: {what}")

    def _take(self, count: int = 1) -> str:
        piece = self.text[self.pos : self.pos + count]
        self.pos += count
        return piece

    def _token(self) -> None:
        letter = self._take()
        before, self.before = self.before, ""
        if letter == "\\":
            self._escape()
        elif letter == "[":
            self._bracket()
        elif letter == "(":
            self._group()
        elif letter == "{":
            self._brace(before)
        elif letter in "*+?":
            self._repeat(letter, before)
        elif letter in "|^$":
            self.before = "start" if letter == "|" else "group"
            self.out.append(letter)
        elif letter in ").":
            self.out.append(letter)
            if letter == ")" and self.groups and self.groups.pop():
                self.before = "group"
        elif self.extended and letter in " \t\n\x0b\f\r":
            self.before = "group" if before == "assertion" else before
        elif self.extended and letter == "#":
            end = self.text.find("\n", self.pos)
            self.pos = len(self.text) if end < 0 else end + 1
            self.before = before
        else:
            self.out.append(self._literal(letter))

    def _literal(self, letter: str) -> str:
        if self.caseless and ord(letter) > 127 and not _same_folding(letter):
            raise self._refusal(f"the letter {letter!r} without regard to case")
        return regex.escape(letter, special_only=False)

    def _repeat(self, quantifier: str, before: str) -> None:
        if before in ("assertion", "start"):
            raise self._invalid("nothing to repeat")
        if before == "group":
            raise self._refusal("a repeated edge or look-around")
        self.out.append(quantifier)
        following = self.text[self.pos : self.pos + 1]
        if following in ("?", "+"):  # lazy or possessive
            self.out.append(self._take())
        self.before = "assertion"

    def _brace(self, before: str) -> None:
        """A quantifier such as {2,5}; any other brace is a letter."""
        found = regex.match(r"(\d+)(,(\d*))?\}", self.text[self.pos :])
        if found is None:
            self.out.append("\\{")
            return
        low, high = int(found[1]), int(found[3]) if found[3] else None
        if low > 65535 or (high or 0) > 65535:
            raise self._invalid("number too big in {} quantifier")
        if high is not None and high < low:
            raise self._invalid("numbers out of order in {} quantifier")
        self._repeat("{" + self._take(found.end()), before)

    def _escape(self) -> None:
        if self.pos >= len(self.text):
            raise self._invalid("\\ at end of pattern")
        letter = self._take()
        if letter in "dwshv":
            self.out.append(f"[{_CLASSES[letter]}]")
        elif letter in "DWSHV":
            self.out.append(f"[^{_CLASSES[letter.lower()]}]")
        elif letter in "bB":
            word = _CLASSES["w"]
            edge = f"(?:(?<![{word}])(?=[{word}])|(?<=[{word}])(?![{word}]))"
            self.out.append(edge if letter == "b" else f"(?!{edge})")
            self.before = "assertion"
        elif letter in _CONTROL:
            self.out.append(_CONTROL[letter])
        elif letter in "AzZ":
            self.out.append({"A": "\\A", "z": "\\Z", "Z": "(?=\\n?\\Z)"}[letter])
            self.before = "assertion"
        elif letter == "N":
            self.out.append("[^\\n]")
        elif letter == "x":
            self.out.append(self._hexadecimal())
        elif letter == "Q":
            end = self.text.find("\\E", self.pos)
            quoted = self.text[self.pos :] if end < 0 else self.text[self.pos : end]
            self.pos = len(self.text) if end < 0 else end + 2
            self.out += [self._literal(each) for each in quoted]
        elif letter in "123456789":
            if self.pos < len(self.text) and self.text[self.pos].isdigit():
                raise self._refusal("a number of two digits after a backslash")
            self.out.append(f"(?:\\{letter})")
        elif letter.isascii() and letter.isalnum():
            raise self._refusal(f"\\{letter}")
        else:
            self.out.append(self._literal(letter))

    def _hexadecimal(self) -> str:
        found = regex.match(r"\{([0-9a-fA-F]{1,6})\}|([0-9a-fA-F]{2})", self.text[self.pos :])
        if found is None:
            raise self._refusal("\\x without two hexadecimal digits")
        self.pos += found.end()
        code = int(found[1] or found[2], 16)
        if code > 0x10FFFF:
            raise self._invalid("character value in \\x{} or \\o{} is too large")
        return self._literal(chr(code))

    def _bracket(self) -> None:
        """A character class, with ASCII classes and POSIX names inside."""
        parts = ["["]
        if self.text.startswith("^", self.pos):
            self.pos += 1
            parts.append("^")
        first = True
        while True:
            if self.pos >= len(self.text):
                raise self._invalid("missing terminating ] for character class")
            letter = self._take()
            if letter == "]" and not first:
                break
            first = False
            if letter == "[" and self.text[self.pos : self.pos + 1] in (":", ".", "="):
                parts.append(self._posix())
            elif letter == "\\":
                parts.append(self._class_escape())
            elif letter == "-":
                parts.append(self._hyphen(parts))
            else:
                parts.append(self._class_letter(letter))
        self.out.append("".join(parts) + "]")

    def _class_letter(self, letter: str) -> str:
        if self.caseless and ord(letter) > 127 and not _same_folding(letter):
            raise self._refusal(f"the letter {letter!r} without regard to case")
        return "\\" + letter if letter in "[]\\^-&|~#" else letter

    def _hyphen(self, parts: list[str]) -> str:
        """A range's hyphen stays one only between two single letters; beside a class it would be read differently."""
        following = self.text[self.pos : self.pos + 1]
        if following == "]" or len(parts) == 1 or parts[-1] == "^":
            return "\\-"
        if following in ("\\", "[") or len(parts[-1]) > 2:
            raise self._refusal("a range beside a class")
        end = self.text[self.pos : self.pos + 1]
        start = parts[-1][-1]
        if end and ord(end) < ord(start):
            raise self._invalid("range out of order in character class")
        if self.caseless and max(ord(start), ord(end or "a")) > 127:
            raise self._refusal("a range beyond ASCII without regard to case")
        return "-"

    def _posix(self) -> str:
        found = regex.match(r":(\^?)([a-z]+):\]", self.text[self.pos :])
        if found is None or found[1] or found[2] not in _POSIX:
            raise self._refusal("this POSIX class")
        if self.caseless and found[2] in ("upper", "lower"):
            raise self._refusal(f"[:{found[2]}:] without regard to case")
        self.pos += found.end()
        return _POSIX[found[2]]

    def _class_escape(self) -> str:
        if self.pos >= len(self.text):
            raise self._invalid("\\ at end of pattern")
        letter = self._take()
        if letter in "dwshv":
            return _CLASSES[letter]
        if letter == "b":
            return "\\x08"
        if letter in _CONTROL:
            return _CONTROL[letter]
        if letter == "x":
            return self._hexadecimal()
        if letter.isascii() and letter.isalnum():
            raise self._refusal(f"\\{letter} in a class")
        return self._class_letter(letter)

    def _group(self) -> None:
        rest = self.text[self.pos :]
        if rest.startswith("*"):
            raise self._refusal("a verb")
        self.before = "start"
        self.groups.append(rest[:2] in ("?=", "?!") or rest[:3] in ("?<=", "?<!"))
        if not rest.startswith("?"):
            self.out.append("(")
            return
        for opening in ("?:", "?=", "?!", "?>", "?<=", "?<!"):
            if rest.startswith(opening):
                self.out.append("(" + self._take(len(opening)))
                return
        found = regex.match(r"\?P?<([A-Za-z_]\w*)>", rest) or regex.match(r"\?'([A-Za-z_]\w*)'", rest)
        if found is not None:
            if found[1] in self.names:
                raise self._invalid("two named subpatterns have the same name")
            self.names.add(found[1])
            self.out.append(f"(?P<{found[1]}>")
            self.pos += found.end()
            return
        if rest.startswith("?#"):
            end = rest.find(")")
            if end < 0:
                raise self._invalid("missing ) after comment")
            self.pos += end + 1
            self.groups.pop()
            self.before = "group"
            return
        raise self._refusal(f"({rest[:3]}")


def _same_folding(letter: str) -> bool:
    """Letters whose two cases are one letter each: both libraries agree on them."""
    lower, upper = letter.lower(), letter.upper()
    return (
        letter not in "\u00b5\u017f\u0130\u0131\u00df\u1e9e\u0345"
        and len(lower) == len(upper) == 1
        and lower.upper() == upper
        and upper.lower() == lower
        and ord(letter) < 0x0250
    ) or lower == upper
