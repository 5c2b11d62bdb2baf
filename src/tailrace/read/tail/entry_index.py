"""Which entries of a batch are about which keys: made once, and queried for each stream.

Most entries are writes, whose namespace says it all; they are found in compiled code where that is loaded
(``tailrace.core.kernel.entry_index``), else here. Commands are read one by one, and no-ops with an ``o2``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tailrace.core import raw_bson
from tailrace.core.oplog.write_head import namespace_of_write
from tailrace.errors import OplogFormatError
from tailrace.read.tail.chains import Chains
from tailrace.read.tail.interest import EVERYONE, InterestKeys, keys_of, keys_of_entry

#: For less, which is two entries or so, the compiled code takes longer, for the fixed work of a call.
_COMPILED_BYTES_MIN: Final = 1_024
#: In place of a group's number: the entry stands among ``commands``.
COMMAND: Final = -1


class EntryIndex(NamedTuple):
    """``starts``    where each entry begins, and at the end where the last one ends
    ``numbers``   of each entry the number of its group, or ``COMMAND``
    ``groups``    the namespace of each group
    ``keys``      what each group is about
    ``commands``  the other entries, by their number, and what they are about; those about nobody are left out
    ``about``     what the entries are about together
    """

    starts: Sequence[int]
    numbers: Sequence[int]
    groups: list[bytes]
    keys: list[frozenset[bytes]]
    commands: list[tuple[int, InterestKeys]]
    about: InterestKeys

    def select(self, key: bytes, first: int = 0) -> Sequence[int]:
        """The entries that are about ``key``, from the ``first`` on, in order."""
        wanted = [number for number, keys in enumerate(self.keys) if key in keys]
        commands = [entry for entry, keys in self.commands if entry >= first and (keys is EVERYONE or key in keys)]
        if isinstance(self.numbers, list):
            found = _plain_select(self.numbers, wanted, first)
        else:
            found = _array_select(self.numbers, wanted, first)
        return sorted([*found, *commands]) if commands else found


def index_entries(raw: bytes, chains: Chains) -> EntryIndex:
    """The index of a batch. Raises nothing: an entry whose length leads astray stands, with all after it, as one
    entry that is about everyone."""
    alone = namespace_of_write(raw)
    if alone is not None and raw_bson.read_int32(raw, 0) == len(raw):  # as most come at the end of the oplog
        own = keys_of(alone)
        return EntryIndex([0, len(raw)], [0], [alone], [own], [], own)
    compiled = getattr(sys.modules.get("tailrace.core.kernel.entry_index"), "index_entries", None)
    if len(raw) < _COMPILED_BYTES_MIN:
        compiled = None
    starts, numbers, groups = (compiled and compiled(raw)) or _plain_index(raw)
    commands: list[tuple[int, InterestKeys]] = []
    for entry in _plain_select(numbers, [COMMAND], 0) if isinstance(numbers, list) else _commands(numbers):
        keys = keys_of_entry(raw[starts[entry] : starts[entry + 1]], chains)
        if keys is EVERYONE or keys:
            commands.append((entry, keys))
    group_keys = [keys_of(namespace) for namespace in groups]
    return EntryIndex(starts, numbers, groups, group_keys, commands, _together(group_keys, commands))


def _together(groups: list[frozenset[bytes]], commands: list[tuple[int, InterestKeys]]) -> InterestKeys:
    if len(groups) == 1 and not commands:
        return groups[0]
    keys: set[bytes] = set()
    for some in groups:
        keys |= some
    for _, own in commands:
        if own is EVERYONE:
            return EVERYONE
        keys |= own
    return frozenset(keys)


def _plain_index(raw: bytes) -> tuple[list[int], list[int], list[bytes]]:
    starts, numbers, groups = [0], [], dict[bytes, int]()
    size = len(raw)
    while starts[-1] < size:
        start = starts[-1]
        try:
            end = raw_bson.document_end(raw, start)
        except OplogFormatError:
            end = size
            namespace = None
        else:
            namespace = _namespace(raw, start)
        numbers.append(COMMAND if namespace is None else groups.setdefault(namespace, len(groups)))
        starts.append(end)
    return starts, numbers, list(groups)


def _namespace(raw: bytes, start: int) -> bytes | None:
    """The namespace of a write, or of a no-op without ``o2``; ``None`` for the others and for a command, and where what
    is read is not as the server writes it."""
    operation = namespace = None
    try:
        for element in raw_bson.elements(raw, start):
            if element.name == b"op" and operation is None:
                operation = raw[element.value_start : element.end]
                if element.type != raw_bson.STRING or operation == _OF_COMMANDS:
                    return None
            elif element.name == b"ns" and namespace is None:
                if element.type != raw_bson.STRING:
                    return None
                namespace = raw[element.value_start + 4 : element.end - 1]
            elif element.name == b"o2" and operation == _OF_NO_OPS:
                return None
            if operation not in (None, _OF_NO_OPS) and namespace is not None:
                return namespace
    except OplogFormatError:
        return None
    return None if operation is None else namespace or b""


_OF_COMMANDS: Final = raw_bson.encode_string("c")
_OF_NO_OPS: Final = raw_bson.encode_string("n")


def _plain_select(numbers: Sequence[int], wanted: list[int], first: int) -> list[int]:
    if not wanted:
        return []
    among = frozenset(wanted)
    return [entry for entry in range(first, len(numbers)) if numbers[entry] in among]


def _array_select(numbers: Any, wanted: list[int], first: int) -> list[int]:
    if not wanted:
        return []
    part = numbers[first:]
    if len(wanted) == 1:
        chosen = part == wanted[0]
    else:
        import numpy as np  # noqa: PLC0415  whoever made the array has loaded it

        among = np.zeros(int(part.max(initial=0)) + 2, bool)
        among[[number for number in wanted if number < len(among) - 1]] = True
        chosen = among[part]  # COMMAND is the last place, which is nobody's
    found: list[int] = (chosen.nonzero()[0] + first).tolist()
    return found


def _commands(numbers: Any) -> list[int]:
    found: list[int] = (numbers == COMMAND).nonzero()[0].tolist()
    return found
