"""The batch kernel: many oplog entries to many change events at once, natively, without decoding a user's documents.

The plain stages (``tailrace.core.stage``, driven by ``tailrace.core.pipeline``) are the reference. The kernel does the
common case of their work in compiled code and marks every other entry; the caller runs the plain stages over exactly
those, in order. Property tests check that the two give the same bytes.

From entries to events
    ``transform_batch(raw, settings) -> KernelBatch``: ``raw`` is an ``OplogBatch.raw``, BSON entries one after the
    other; ``KernelSettings`` names scope, token version and what is shown. Of ``n`` entries, as numpy arrays:

    ``kind``          uint8[n]: ``SKIPPED`` (the stream does not show it), ``EVENT`` (all of its events were made),
                      ``PLAIN`` (for the plain stages)
    ``entry_start``   int64[n] and ``entry_end``, offsets into ``raw``. Where a length leads astray, the rest of the
                      buffer is one last entry of kind ``PLAIN``
    ``events``        uint8: the events' BSON, in the order of their entries
    ``records``       int64[m, K]: for each of ``m`` events its entry's number, where it and its parts are, its time
                      and type: the slots of ``event_record``, and of ``event_parts``
    ``block()``       the events as an ``EventBlock``

    The kernel makes the events of inserts, updates (``$v`` 1 and 2), replacements and deletes, plain ones and those of
    transactions, with document keys of the usual types (ObjectId, numbers but decimals, strings, symbols, dates,
    timestamps, booleans, null, binary, and documents and arrays of these). Where nothing ends with them, it also makes
    those of drop and rename, and with ``showExpandedEvents`` those of create, createIndexes and commitIndexBuild. It
    leaves other commands in scope, no-ops that could give an event, writes to ``system.views``, entries without UUID
    or time and all corrupt bytes. It never reads outside ``raw``.

From a pipeline's batches to events
    ``process_batch(pipeline, batch)`` does the above for a ``ChangeStreamPipeline``: the kernel where it can, the plain
    stages for the entries it leaves (all of them while the stream searches for its start). It is a generator of
    ``EventBlock`` and of requests, which are answered as a pipeline's own. After the transform stand block steps:
    images, the user's stages, the limit of an event's size. Afterwards the pipeline stands where its own ``process``
    leaves it.

From the blocks of several shards to one
    ``merge_blocks(blocks)`` gives their events in the order of their resume tokens, as
    ``tailrace.core.pipeline.waiting.merged_blocks`` does.

From events to columns
    ``locate(buffer, offsets, wanted, noted) -> {name: Part}`` finds the parts of finished events, whatever made them
    (this kernel, the plain stages, a user's ``$project``) as runs of the one buffer. Where the kernel noted the places
    of an event (``EventBlock.places``), it takes these. ``gather(buffer, start, end)`` makes a part an Arrow binary
    column (data, int32 offsets), ``is_utf8`` says whether that may be called a string column, and
    ``encode_variants(buffer, part)`` makes a document part a VARIANT column, as ``tailrace.lake.spark.reading.variant``
    would; ``encode_json`` makes it a column of relaxed Extended JSON. The column ``event`` needs no copy: its
    data are ``events`` themselves, its offsets ``offsets``.

Compiling
    The compiled code comes with the installation, as one library (``native``); it also needs numpy. Where there is
    none for this machine or for this source, numba compiles, if it can be imported (``jit``): some thirty seconds of
    CPU once, which ``warm_up`` takes at a chosen moment. ``available`` says whether one of the two is there. Importing
    this package costs nothing: all is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.core.kernel.arrays import Part, gather, is_utf8, locate
    from tailrace.core.kernel.batch import EVENT, PLAIN, SKIPPED, KernelBatch, KernelSettings, transform_batch
    from tailrace.core.kernel.fast_path import process_batch, settings_for
    from tailrace.core.kernel.json_column import JsonColumn, encode_json
    from tailrace.core.kernel.merge import merge_blocks
    from tailrace.core.kernel.variant_column import VariantColumn, encode_variants

__all__ = [
    "EVENT",
    "PLAIN",
    "SKIPPED",
    "JsonColumn",
    "KernelBatch",
    "KernelSettings",
    "Part",
    "VariantColumn",
    "available",
    "comes_compiled",
    "encode_json",
    "encode_variants",
    "gather",
    "is_utf8",
    "locate",
    "merge_blocks",
    "process_batch",
    "settings_for",
    "transform_batch",
    "warm_up",
]

#: The module of each name. A module is compiled as a whole, so none is imported because of another.
_HOMES = {
    "batch": ("EVENT", "PLAIN", "SKIPPED", "KernelBatch", "KernelSettings", "transform_batch"),
    "arrays": ("Part", "gather", "is_utf8", "locate"),
    "variant_column": ("VariantColumn", "encode_variants"),
    "json_column": ("JsonColumn", "encode_json"),
    "fast_path": ("process_batch", "settings_for"),
    "merge": ("merge_blocks",),
}
_MODULES = ("reply", "entry_index", "look_up", *_HOMES)


def available() -> bool:
    """Whether there is compiled code or numba to make it, and numpy, so that the rest of this package works."""
    try:
        importlib.import_module("numpy")
        if not comes_compiled():
            importlib.import_module("numba")
    except ImportError:  # numba also says so when it does not know this version of numpy
        return False
    return True


def comes_compiled() -> bool:
    """Whether the compiled code came with the installation, so that nothing is to be compiled."""
    return importlib.import_module("tailrace.core.kernel.native").library() is not None


def warm_up() -> None:
    """Load all compiled code, compiling it where the cache does not hold it."""
    for module in _MODULES:
        importlib.import_module(f"tailrace.core.kernel.{module}")


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"tailrace.core.kernel.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
