"""Exact images: the documents before and after every change, computed from deltas, without the server's help."""
