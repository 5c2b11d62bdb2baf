"""The kernel's compiled code for a package in a zip file, as ``spark-submit --py-files`` delivers it.

The system loads no library from inside a zip file. So it is copied into memory that has no name in any file system:
nothing is written, and nobody else can put another library in its place.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Final

from tailrace.core.kernel import native

_PACKAGE: Final = "tailrace.core.kernel"


def use_kernel_of_zip_file() -> None:
    """Have ``native`` use the library in the zip file that this package comes from. Does nothing where the package is
    in no zip file, where that holds no library, and where the system has no memory of that kind (only Linux has it). To
    be called before any module of the kernel is imported."""
    library = files(_PACKAGE) / native.FILE
    if isinstance(library, Path) or not library.is_file() or not hasattr(os, "memfd_create"):
        return
    file = os.memfd_create(native.FILE)  # open as long as the process lives: forked children use it too
    with os.fdopen(file, "wb", closefd=False) as copy:
        copy.write(library.read_bytes())
    native.use(f"/proc/self/fd/{file}")
