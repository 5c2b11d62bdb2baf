"""The programs of this folder that tests kill, stop and start again: each is forked from a process that has loaded what
they need, which takes a tenth of a second of processor where a start of Python takes one."""

from __future__ import annotations

from typing import Final

from tests.commands import CommandServer, Piped

_SERVER: Final = CommandServer("tests.sync.archived_process", "tests.sync.copy_process", "tests.sync.follow")
_CODE: Final = "import sys\nfrom tests.sync.{0} import main\nsys.exit(main(sys.argv[1:]))"


def program(name: str, *arguments: object) -> Piped:
    """``python -m tests.sync.NAME ARGUMENTS...``"""
    return Piped(*map(str, arguments), code=_CODE.format(name), server=_SERVER)
