"""A lake of change events on disk, without Spark: layout, Delta log, commits, verification, compaction, retention."""
