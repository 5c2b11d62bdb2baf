"""The query language of ``$match``: parsed form, path traversal, compiled tests."""
