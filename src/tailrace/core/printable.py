"""Text for people: characters that would control a terminal, or change the order of other characters, are written as
numbers.

Names of databases, collections and fields, error messages and users' documents may hold anything. A collection called
``ESC ]0;...`` sets the title of a terminal, a newline in a name makes a second line of a log, and characters that set
the direction of text show one name as another.
"""

from __future__ import annotations

import re
from typing import Final

#: C0 without tab and newline, DEL, C1, marks and embeddings of direction (also U+061C), separators of lines and
#: paragraphs, interlinear annotations, tags, and surrogates (which no encoding can write).
_UNSAFE: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_IN_LINES: Final = re.compile(f"[{_UNSAFE}]")
_IN_A_LINE: Final = re.compile(f"[{_UNSAFE}\t\n]")


def printable(text: str) -> str:
    """``text`` of several lines for a terminal or a log: tabs and newlines stay, every other control character, and
    what sets the direction of text, becomes ``\\uXXXX``. JSON stays the same value: only its strings can hold these."""
    return _IN_LINES.sub(_number, text)


def in_a_line(text: object) -> str:
    """The same for a name or a message that must not make a second line: tabs and newlines become numbers too."""
    return _IN_A_LINE.sub(_number, str(text))


def _number(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code > 0xFFFF:  # as JSON has it: two halves
        code -= 0x10000
        return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
    return f"\\u{code:04x}"
