"""What ``tailrace console`` and ``tailrace top`` show: one panel each for shards, streams, leases, lakes and the rest.

A panel is read by one small reader, which gives JSON. One that fails, or lacks a right, shows its error, and no other
panel notices.
"""
