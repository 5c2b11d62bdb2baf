"""Exact images: the documents before and after every change, computed from oplog entries without the server's help."""

from tailrace.read.images.delta import apply_entry
from tailrace.read.images.key import state_key
from tailrace.read.images.state import ImageState

__all__ = ["ImageState", "apply_entry", "state_key"]
