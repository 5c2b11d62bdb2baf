"""Document keys of inserts on a shard before 5.3, whose oplog does not have them.

The kernel has used only ``_id``. That is right for collections that are not sharded, or sharded by ``_id``; inserts
into others are left to the plain stages, which build the key.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from tailrace.core.event.event_block import OPERATION_TYPES
from tailrace.core.kernel import event_record
from tailrace.core.kernel.batch import KernelBatch, KernelStep
from tailrace.core.pipeline.document_key import CatalogKeys
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.request import Answer, Request
from tailrace.errors import TailraceError

_UUID = slice(event_record.UUID_FIRST // 8, event_record.UUID_LAST // 8 + 1)
_INSERT = OPERATION_TYPES.index("insert")


def insert_key_steps(pipeline: ChangeStreamPipeline) -> list[KernelStep]:
    """The step that asks the catalog, where the stream needs it."""
    return [] if pipeline.catalog_keys is None else [_step(pipeline.catalog_keys)]


def _step(keys: CatalogKeys) -> KernelStep:
    def step(made: KernelBatch) -> Generator[Request, Answer, KernelBatch]:
        inserts = made.column(event_record.OPERATION) == _INSERT
        if not inserts.any():
            return made
        places = np.flatnonzero(inserts)
        found, which = np.unique(made.records[inserts][:, _UUID], axis=0, return_inverse=True)
        uuids = [row.tobytes() for row in found]
        try:
            yield from keys.ask(uuids)
        except TailraceError:
            return made.left_plain_by_event(inserts)  # which ask again, and say what is wrong
        others = np.array([not keys.is_id_alone(uuid) for uuid in uuids], np.bool_)
        inserts[places] = others[which.reshape(-1)]
        return made.left_plain_by_event(inserts)

    return step
