"""The archive: raw oplog entries, kept for longer than the oplog keeps them.

``tailrace.read.archive.recorder`` writes it, ``tailrace.read.archive.source`` reads it as a source like any other, and
``tailrace.read.archive.hybrid`` goes from it over to the live oplog. docs/design/archive.md says how it is laid out.
"""
