"""The demo's act on ``tailrace sync``: another shop goes from one MongoDB to a newer one, and its doors stay open."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import bson
import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.base.threads import CheckedThread
from tailrace.core import raw_bson
from tailrace.demo.shop import DATABASE
from tailrace.demo.shop_process import open_doors, open_shop, words
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.sync import Sync

OLD, NEW = "5.0.4", "6.0.27"
_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(document_class=RawBSONDocument)
_LOOK_S: Final = 0.1
_PATIENCE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class UpgradeResult:
    """``operations`` of the shop; ``verified`` documents were compared while it worked, ``documents`` and definitions
    at the end; ``cut_over_s``: from the shop's last write until the new deployment had taken the old one's place."""

    operations: int
    verified: int
    documents: int
    cut_over_s: float
    differences: int


def upgrade(*, seconds: float, rate: float, seed: int, say: Callable[[str], None]) -> UpgradeResult:
    """Run a shop on the old version, bring what it has to the new one while it works, and compare both. Raises
    TailraceError."""
    with ExitStack() as stack:
        say(f"Starting MongoDB {OLD} with another shop, and an empty MongoDB {NEW}")
        old, new = (stack.enter_context(ReplicaSet(1, version=version)) for version in (OLD, NEW))
        shop = open_shop(old.uri, stack, seconds=seconds, rate=rate, seed=seed)
        sync = stack.enter_context(Sync(old.uri, new.uri, lease_s=10.0))
        thread = CheckedThread(sync.run, "tailrace-demo-sync")
        try:
            thread.start()
            open_doors(shop)
            say("The shop runs on the old one; tailrace sync copies it to the new one and follows")
            aside = stack.enter_context(Sync(old.uri, new.uri, lease_s=10.0))
            _wait_until_equal(aside, thread)
            verification = aside.verify()
            work = words(shop)
            say("The shop is closed; the new one takes the old one's place")
            began = time.monotonic()
            aside.cutover(block=False)
            cut_over_s = time.monotonic() - began
        finally:
            sync.stop()
            thread.join()
        thread.check()
        documents, differences = _compared(old.uri, new.uri)
    return UpgradeResult(
        sum(work["operations"].values()),
        verification.documents,
        documents,
        cut_over_s,
        differences + len(verification.differences) + verification.more,
    )


def _wait_until_equal(sync: Sync, thread: CheckedThread) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not sync.status().is_consistent:
        if time.monotonic() > deadline:
            raise TailraceError(f"the sync did not catch up in {_PATIENCE_S:.0f} seconds")
        if not thread.is_alive():
            thread.check()
        time.sleep(_LOOK_S)


def _compared(old: str, new: str) -> tuple[int, int]:
    """How many documents there are, and how many documents, indexes and options differ, asked with plain PyMongo."""
    with pymongo.MongoClient[Any](old) as left, pymongo.MongoClient[Any](new) as right:
        one, other = _held(left), _held(right)
    return sum(kind == "document" for kind, _, _ in one), len(one ^ other)


def _held(client: pymongo.MongoClient[Any]) -> set[tuple[str, str, bytes]]:
    found = set()
    for listed in client[DATABASE].list_collections():
        name = str(listed["name"])
        there: Any = client[DATABASE].get_collection(name, codec_options=_RAW)
        found.add(("options", name, bson.encode(listed["options"])))
        found |= {("document", name, raw_bson.bytes_of(one)) for one in there.find()}
        found |= {("index", name, bson.encode(one)) for one in client[DATABASE][name].list_indexes()}
    return found
