"""Where a lake and its checkpoint lie: on a file system that this machine has mounted, never in an object store.

Python takes ``s3a://bucket/lake`` for the name of a local folder, and its user would believe that the data are safe.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from tailrace.errors import UsageError

#: ``pathlib`` makes one slash of two, so one is enough; and one letter is no scheme that anybody has.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_FILE: Final = re.compile(r"file:(?://(?:localhost)?)?(/(?!/).*)", re.IGNORECASE | re.DOTALL)


def local_path(where: Path | str, name: str, base: Path | None = None) -> Path:
    """``where`` as an absolute path; a relative one begins at ``base``, by default the working directory.

    ``file:///data/lake`` is ``/data/lake``. Raises UsageError, which calls the value ``name`` and repeats nothing of it
    but its scheme, for the URI of anything else.
    """
    text = str(where)
    file = _FILE.fullmatch(text)
    if file is not None:
        return Path(unquote(file[1]))
    scheme = _SCHEME.match(text)
    if scheme is not None:
        raise UsageError(
            f"{name} is a URI that begins with '{scheme[1]}:', and must be a directory of a local or shared POSIX "
            "file system",
            hint="Give a path such as /data/lake; an object store must be mounted as a file system that can rename",
        )
    return ((base or Path()) / text).absolute()
