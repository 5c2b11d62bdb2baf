"""A whole stream: over one oplog, or over the merged oplogs of a cluster, with the kernel or without it."""
