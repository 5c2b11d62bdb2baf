"""Masks: fields that are dropped, hashed or tokenised before anything is written.

``Masks.load`` reads a declaration, which lakes, tables and messages take; ``Masks.revealed`` gives the value that a
token stands for.
"""

from tailrace.core.masking.documents import MaskRefusedError
from tailrace.read.source.mask_file import Masks

__all__ = ["MaskRefusedError", "Masks"]
