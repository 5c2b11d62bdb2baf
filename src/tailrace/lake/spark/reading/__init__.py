"""A worker's work on a slice: oplog batches to events, and events to Arrow columns."""

from tailrace.core.kernel import zip_cache

zip_cache.keep_by_source()
