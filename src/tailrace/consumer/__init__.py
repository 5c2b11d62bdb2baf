"""Acting on every change, in order, once at a time: leases, listeners, lanes, views and messages."""

from tailrace.consumer.async_change import AsyncChange, AsyncFence
from tailrace.consumer.async_listener import AsyncListener
from tailrace.consumer.change import Change
from tailrace.consumer.fence import Fence
from tailrace.consumer.lease import Lease, LeaseStore
from tailrace.consumer.lease_operations import LeaseOperations
from tailrace.consumer.listener import Listener
from tailrace.consumer.memory_lease_store import MemoryLeaseStore
from tailrace.consumer.mongo_lease_store import MongoLeaseStore
from tailrace.consumer.rules.errors import (
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
from tailrace.consumer.rules.retry_schedule import RetrySchedule
from tailrace.consumer.seen_changes import SeenChanges

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
