"""Where two documents differ: the path of the first different element, with both values."""

from __future__ import annotations

import bson

from tailrace.core import raw_bson as rb
from tests.differential.wire import ANY_VALUE

_SHOWN_MAX = 400


def first_difference(expected: bytes, got: bytes) -> tuple[str, str, str]:
    """``(path, expected there, got there)`` in words; the path is empty where the documents are equal."""
    return _walk(expected, 0, got, 0, "")


def _walk(a: bytes, a_start: int, b: bytes, b_start: int, path: str) -> tuple[str, str, str]:
    left, right = list(rb.elements(a, a_start)), list(rb.elements(b, b_start))
    for index, (x, y) in enumerate(zip(left, right, strict=False)):
        if a[x.start : x.end] == b[y.start : y.end]:
            continue
        here = f"{path}.{x.name.decode('utf-8', 'replace')}" if path else x.name.decode("utf-8", "replace")
        if x.name == y.name and x.type == y.type and x.type in (rb.OBJECT, rb.ARRAY):
            return _walk(a, x.value_start, b, y.value_start, here)
        return f"{here} (element {index})", _shown(a, left[index:]), _shown(b, right[index:])
    equal = min(len(left), len(right))
    if len(left) == len(right):
        return "", "", ""
    return f"{path} (element {equal})", _shown(a, left[equal:]), _shown(b, right[equal:])


def _shown(buf: bytes, elements: list[rb.Element]) -> str:
    """The elements from the difference on, as a list: a document would hide names that occur twice."""
    if not elements:
        return "nothing more"
    parts = []
    for element in elements[:12]:
        raw = buf[element.start : element.end]
        value = bson.decode(rb.encode_document(raw), ANY_VALUE)
        parts.append(f"{value!r} [{raw.hex() if len(raw) < 60 else f'{len(raw)} bytes'}]")
    text = ", ".join(parts)
    return text if len(text) < 6 * _SHOWN_MAX else text[: 6 * _SHOWN_MAX] + " ..."
