"""Regular expressions by PCRE2, with the limits of the server's PCRE, or from 7.0 on PCRE2.

A search counts its steps and the depth of its backtracking as the server's does, and ends where the server's ends:
without a match in ``$match``, with 51156 in an expression. ``pattern_reader`` rewrites what PCRE reads otherwise,
``later_pattern_reader`` what the PCRE2 of 7.0 does. Nothing is compiled to machine code: only the interpreter counts
depth.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import pcre2

from tailrace.core.expression.language import registry
from tailrace.core.expression.language.later_pattern_reader import rewritten_later
from tailrace.core.expression.language.pattern_reader import rewritten
from tailrace.errors import UsageError

_OPTIONS: Final = frozenset(b"imsxu")
#: UTF-8, but classes such as ``\\w`` of ASCII alone.
_FLAGS: Final = pcre2.UNICODE | pcre2.ASCII
_FLAG_OF: Final = ((b"i", pcre2.IGNORECASE), (b"m", pcre2.MULTILINE), (b"s", pcre2.DOTALL), (b"x", pcre2.VERBOSE))
_NO_UTF_CHECK: Final = 0x40000000
#: A pattern without a sign that means something, for which bytes are searched as they are.
_PLAIN: Final = re.compile(rb"[^\\^$.\[|()?*+{]*")


@dataclass(frozen=True, slots=True)
class CompiledPattern:
    """A compiled pattern over UTF-8 bytes."""

    compiled: Any
    source: bytes
    #: The pattern itself where it is a plain string, which needs no library to be found.
    plain: bytes | None

    def matches(self, data: bytes) -> bool:
        """Whether the pattern is found anywhere. As on the server, a search that reaches its limit finds nothing, and
        neither does one in bytes that are not UTF-8."""
        if self.plain is not None:
            return self.plain in data and is_utf8(data)
        try:
            return self.compiled.search(data) is not None
        except pcre2.LibraryError:
            return False

    def search(self, name: str, data: bytes, start: int) -> Any:
        """The first match at or after the byte ``start``, or ``None``; 51156 where the search reaches its limit. A
        caller that continues after the first match knows that all of ``data`` is UTF-8, and need not have it checked
        again."""
        try:
            if start:
                return self.compiled._match(data, start, options=_NO_UTF_CHECK)  # no public method takes options
            return self.compiled.search(data)
        except pcre2.LibraryError as error:
            raise registry.failure(
                51156,
                f"Error occurred while executing the regular expression in {name}: {error.msg}, in "
                f"{self.source.decode('utf-8', 'replace')}",
            ) from None


def is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def check_options(options: bytes, code: int = 51108) -> None:
    for letter in options:
        if letter not in _OPTIONS:
            raise registry.parse_failure(code, f" invalid flag in regex options: {chr(letter)}")


_CACHE: Final[dict[tuple[bytes, bytes, bool], CompiledPattern]] = {}


def compile_pattern(pattern: bytes, options: bytes, *, later: bool = False) -> CompiledPattern:
    """Compile a pattern with its options, the letters ``imsx`` (and ``u``, which changes nothing). ``later``: as
    servers from 7.0 on read it.

    Raises 51091 for what does not compile and ``registry.NOT_SUPPORTED`` for what could mean something else here.
    """
    key = (pattern, options, later)
    known = _CACHE.get(key)
    if known is not None:
        return known
    compiled = _compiled(pattern, options, later=later)
    plain = _PLAIN.fullmatch(pattern) is not None and not set(options) & set(b"ix")
    result = CompiledPattern(compiled, pattern, pattern if plain else None)
    if len(_CACHE) < 256:  # patterns may come from the documents; a full cache stays as it is
        _CACHE[key] = result
    return result


def check_query_pattern(pattern: bytes, options: bytes, code: int = 51091, *, later: bool = False) -> None:
    """What a query asks of its pattern: that it compiles (``code``), in parentheses too, and has no NUL (2). A server
    before 7.0 puts it in parentheses for a match of the whole value, which nobody asks for; a comment at the end then
    hides the closing one."""
    if b"\x00" in pattern:
        raise registry.parse_failure(2, "Regular expression cannot contain an embedded null byte")
    try:
        compile_pattern(pattern, options, later=later)
        if not later:
            _compiled(pattern, options, whole=True)
    except UsageError as error:
        if error.code != 51091:
            raise
        raise registry.parse_failure(code, error.message) from None


def _compiled(pattern: bytes, options: bytes, *, whole: bool = False, later: bool = False) -> Any:
    flags = _FLAGS
    for letter, flag in _FLAG_OF:
        if letter in options:
            flags |= flag
    try:
        extended, caseless = b"x" in options, b"i" in options
        if later:
            text = rewritten_later(pattern, extended=extended, caseless=caseless)
        else:
            text = rewritten(pattern, extended=extended, caseless=caseless, whole=whole)
        return pcre2.compile(text, flags, jit=False)
    except pcre2.LibraryError as error:
        raise registry.parse_failure(51091, f"Regular expression is invalid: {error.msg}") from None
