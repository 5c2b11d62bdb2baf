"""The nouns that come in: oplog entries, namespaces and scopes, cluster times, the update delta. Bytes, no I/O."""
