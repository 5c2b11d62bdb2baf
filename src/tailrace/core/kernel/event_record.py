"""What the kernel writes down of each event that it makes: one row of int64 slots, at these byte offsets.

Compiled code fills the rows; ``KernelBatch`` gives each slot as a column. Places in the event are offsets into the
buffer of events, places in the entry offsets into ``raw``.
"""

from __future__ import annotations

ENTRY = 0  # the number of the entry that the event is made of
START = 8  # of the event, and its end
END = 16
CLUSTER_TIME = 24  # packed; the bits of a uint64
OPERATION = 32  # a place in ``OPERATION_TYPES``
TOKEN_START = 40
TOKEN_END = 48
NS_START = 56
NS_END = 64
KEY_START = 72  # of the document key's value
KEY_END = 80
SPLICE = 88  # where the element ``fullDocument`` stands or would stand
UUID_FIRST = 96  # the collection's UUID: its first and its last eight bytes
UUID_LAST = 104
IMAGE_TIME = 112  # where the pre-image is filed: the cluster time of its entry, and its place there
IMAGE_INDEX = 120
OBJECT = 128  # the operation's document ``o``, in ``raw``
PLACES = 136  # a word for each part of the event that a column may show (``event_parts``)
RECORD_SIZE = 248
