"""What the compiled functions share while they work through a batch: a *job*, a block of int64 slots.

Slots are named by their byte offsets. The Python side (``tailrace.core.kernel.batch``) fills them in and keeps the
memory that they point to.
"""

from __future__ import annotations

ENTRY_STARTS = 0  # int64[count + 1]
COUNT = 8
INDEX = 16  # the entry to go on with
EVENT_NEXT = 24  # where the next event goes
EVENTS_END = 32
EVENTS = 40
KINDS = 48  # uint8[count]
RECORD_NEXT = 56  # where the next event's record goes (``event_record``)
SCOPE_KIND = 64
SCOPE = 72
SCOPE_SIZE = 80
FLAGS = 88
FRAGMENTS = 96
TABLE = 104  # of the operation that an event is made of: the entry's, or that of an operation in it
WRITER = 112
STACK = 120
DELTA = 128
KEY_STRING = 136  # scratch for key strings
KEY_DOCUMENT = 144  # scratch for a document key that has to be built
START = 152  # entries before this cluster time are skipped
RECORDS_END = 160
RAW = 168  # the batch's first byte
ENTRY_TABLE = 176
OPERATION_TABLE = 184
MEMBER_TABLE = 192
CHAIN = 200  # int64[CHAIN_MAX]: the numbers of a chain's entries
TIMES = 208  # int64[count]: the cluster time of each entry, or of one before it
COMMIT = 216  # the entry that commits what the batch's one entry holds; 0: the batch is a run of the oplog
FIRST = 224  # the number of the first operation to be done of that entry, and how many were done or passed in the end
POSITION = 232
INDEX_BASE = 240  # what the operations of the entry at hand are counted from in their transaction
# What an event takes from the entry that commits it.
EVENT_TIME = 248
EVENT_WALL = 256  # address of the value, or 0
LSID = 264  # address of the value; 0: the event shows no session
TXN_NUMBER = 272
OP_INDEX = 280
IMAGE_TIME = 288
IMAGE_INDEX = 296
JOB_SLOTS = 38

# Flags.
VERSION_2 = 1
WITH_WALL_TIME = 2
WITH_COLLECTION_UUID = 4
RAW_UPDATES = 8
UNWINDS_WITHOUT_SESSION = 16  # as the columns of the server profile
MULTI_OP_IS_NO_TRANSACTION = 32
WITH_NS_TYPE = 64
REFUSES_OLD_UPDATES = 128
REPLACEMENTS_MAY_HAVE_V = 256

# Kinds of entries.
SKIPPED = 0
EVENT = 1
PLAIN = 2
CHAIN_ENTRY = 3  # it commits a transaction whose earlier entries are not all in the batch
MEMBER_ENTRY = 4  # skipped, but a later entry may refer to it

#: A transaction of more entries in one batch is left to the Python side.
CHAIN_MAX = 1024
#: Larger document keys are left to the plain stages.
KEY_DOCUMENT_MAX = 1 << 14
KEY_STRING_MAX = 2 * KEY_DOCUMENT_MAX + 512
#: The server refuses events beyond 16 MiB and 16 KiB (10334); the plain stages say so.
EVENT_MAX = 16_793_600
#: More than all fixed parts of an event together.
FIXED_PARTS = 1024
