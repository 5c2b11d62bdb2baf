"""A ``$match`` whose test has no program: a general regular expression, or an ``$expr`` of other operators.

Compiled code finds the values that the test needs in all events together, and plain code tests them. So no event is
passed on as a whole, and the stages after it stay compiled.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tailrace.core.event.event_block import Bytes, Offsets
from tailrace.core.expression.match import tree
from tailrace.core.expression.match.test import document_test, value_test
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import SIMPLE
from tailrace.core.kernel.project import MISSING
from tailrace.core.kernel.project_external import External, PathLookUps
from tailrace.core.kernel.project_program import FAILS, NOT_KNOWN, PASSES

_VERDICTS: Final = {True: PASSES, False: FAILS, None: NOT_KNOWN}


class PlainMatch:
    """``answers`` as a ``MatchProgram`` gives them: not known is what the test fails on."""

    def __init__(self, node: tree.Pattern | tree.ExpressionIsTrue) -> None:
        self._whole = document_test(node)
        self._external: External | None = None
        if isinstance(node, tree.ExpressionIsTrue):
            self._external = External(node.bindings.compilation, [node.expression])
        else:
            self._paths = PathLookUps([tuple(node.path.split(b"."))])
            self._test = value_test(node, SIMPLE)

    def answers(self, buffer: Bytes, offsets: Offsets) -> Bytes:
        """uint8[n]: the verdict on the events ``buffer[offsets[i] : offsets[i + 1]]``; one of no bytes fails."""
        found: Bytes = np.full(offsets.size - 1, FAILS, np.uint8)
        asked = np.flatnonzero(np.diff(offsets) > 0)
        start, end = offsets[asked], offsets[asked + 1]
        look = self._matches if self._external is None else self._external.truths
        found[asked] = [_VERDICTS[truth] for truth in look(buffer, start, end)]
        return found

    def _matches(self, buffer: Bytes, start: Offsets, end: Offsets) -> list[bool | None]:
        view = memoryview(np.ascontiguousarray(buffer))  # type: ignore[arg-type]
        test, whole = self._test, self._whole
        found: list[bool | None] = []
        rows = self._paths.spans(buffer, start, end).tolist()
        for first, last, (kind, value, value_end) in zip(start.tolist(), end.tolist(), rows, strict=True):
            try:
                if kind == MISSING:
                    found.append(test(None))
                elif kind < 0 or kind == v.ARRAY:
                    found.append(whole(view[first:last].tobytes()))
                else:
                    found.append(test((kind, view[first + value : first + value_end].tobytes())))
            except Exception:  # noqa: BLE001  whatever it is, the plain stages raise it again, at its place
                found.append(None)
        return found


def plain_match(node: tree.Node) -> PlainMatch | None:
    """For a test of one pattern or one expression; ``None`` for any other, and where a path begins with a name without
    characters: the server then takes such fields out of what it tests."""
    if isinstance(node, tree.Pattern) and node.path[:1] not in (b"", b"."):
        return PlainMatch(node)
    return PlainMatch(node) if isinstance(node, tree.ExpressionIsTrue) else None
