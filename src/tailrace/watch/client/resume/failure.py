"""What went wrong with a command of a stream, and whether the stream may be resumed after it (rules 24 and 25)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from tailrace.errors import RESUMABLE_LABEL

CursorCommand = Literal["aggregate", "getMore"]

_CURSOR_NOT_FOUND: Final = 43
#: From this wire version on (4.4) the server says by a label what may be resumed.
_LABELS_SINCE: Final = 9
#: Of older servers: the codes after which a stream is resumed.
_CODES_WITHOUT_LABELS: Final = frozenset(
    {6, 7, 63, 89, 91, 133, 150, 189, 234, 262, 9001, 10107, 11600, 11602, 13388, 13435, 13436}
)
#: The codes that a mongod labels in the reply to a stream's getMore (measured on 6.0.27).
_CODES_LABELLED: Final = frozenset({6, 7, 63, 89, 91, 133, 150, 189, 234, 262, 9001, 10107, 11600, 11602, 13435, 13436})
#: Failures that our way of reading the oplog can meet and the server's own cannot: a snapshot or a key that is not
#: there yet, a plan that was thrown away, a place in the oplog that has gone (the read that follows says whether
#: anything was lost).
_CODES_OF_OUR_READ: Final = frozenset({112, 134, 136, 175, 211, 246})
#: How a fail point of mongod's forges a reply (6.0; 5.0 and 4.4): it carries just the labels that the fail point names.
_FORGED: Final = frozenset(
    {"Failing command via 'failCommand' failpoint", "Failing command due to 'failCommand' failpoint"}
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A command of a stream has failed.

    ``command``       what was under way
    ``code``          the server's; ``None``: the server did not answer, or not in time
    ``labels``        the server's error labels
    ``wire_version``  of the connection that the failing command ran on, never one that was looked up afterwards
    ``out_of_time``   the caller's time was over (``timeoutMS``): nothing is wrong with the deployment
    """

    command: CursorCommand
    code: int | None = None
    labels: frozenset[str] = frozenset()
    wire_version: int | None = None
    out_of_time: bool = False


def is_resumable(failure: Failure) -> bool:
    """Rule 24, but for the command: whether the failure is one that passes."""
    if failure.code is None or failure.code == _CURSOR_NOT_FOUND:
        return True
    if failure.wire_version is not None and failure.wire_version < _LABELS_SINCE:
        return failure.code in _CODES_WITHOUT_LABELS
    return RESUMABLE_LABEL in failure.labels


def labels_of_stream(code: int | None, labels: Iterable[str], message: str) -> frozenset[str]:
    """The labels that a failed read of the oplog has as the failed getMore of a stream: the server would have given
    them to a stream of its own, and does not give them to a plain read."""
    given = frozenset(labels)
    if message in _FORGED or code not in _CODES_LABELLED | _CODES_OF_OUR_READ:
        return given
    return given | {RESUMABLE_LABEL}
