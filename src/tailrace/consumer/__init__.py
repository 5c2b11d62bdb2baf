"""Acting on every change, in order, once at a time: leases, listeners, lanes, views and messages."""

from tailrace.act.consumer.async_change import AsyncChange, AsyncFence
from tailrace.act.consumer.async_listener import AsyncListener
from tailrace.act.consumer.change import Change
from tailrace.act.consumer.fence import Fence
from tailrace.act.consumer.lease import Lease, LeaseStore
from tailrace.act.consumer.lease_operations import LeaseOperations
from tailrace.act.consumer.listener import Listener
from tailrace.act.consumer.memory_lease_store import MemoryLeaseStore
from tailrace.act.consumer.mongo_lease_store import MongoLeaseStore
from tailrace.act.consumer.rules.errors import (
    Fenced,
    HandlerCancelled,
    HandlerFailed,
    HandlerForked,
    HandlerNotRun,
    LeaseDocumentError,
    LeaseLost,
    LeaseStoreUnavailable,
    OwnerNotUnique,
)
from tailrace.act.consumer.rules.retry_schedule import RetrySchedule
from tailrace.act.consumer.seen_changes import SeenChanges

__all__ = [
    "AsyncChange",
    "AsyncFence",
    "AsyncListener",
    "Change",
    "Fence",
    "Fenced",
    "HandlerCancelled",
    "HandlerFailed",
    "HandlerForked",
    "HandlerNotRun",
    "Lease",
    "LeaseDocumentError",
    "LeaseLost",
    "LeaseOperations",
    "LeaseStore",
    "LeaseStoreUnavailable",
    "Listener",
    "MemoryLeaseStore",
    "MongoLeaseStore",
    "OwnerNotUnique",
    "RetrySchedule",
    "SeenChanges",
]
