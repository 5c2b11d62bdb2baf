"""Checks that users can run on stores and handlers of their own."""

from tailrace.act.testing.lease_store import LeaseStoreError, check_lease_store

__all__ = [
    "LeaseStoreError",
    "check_lease_store",
]
