"""A worker's work on a slice: oplog batches to events, and events to Arrow columns."""
