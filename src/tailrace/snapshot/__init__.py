"""The documents that were there before the first change."""
