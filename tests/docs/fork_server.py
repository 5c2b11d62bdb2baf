"""``tailrace`` for the commands of pages, forked from one process that has loaded it. ``tailrace run``, which starts
Java, is carried out by the pages' interpreter, in its Spark session.

    python -m tests.docs.fork_server SOCKET
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.lake.spark.runtime import fork_server, launcher
from tests.command_server import import_everything
from tests.docs.snippets import ROOT

_SCRIPT = """#!/bin/sh
[ "$1" = run ] && exec {python} -I -S {in_session} {session} "$@"
exec {python} -I -S {forked} {launchers} {socket} "$@"
"""


@contextmanager
def commands(directory: Path, session: Path) -> Iterator[Path]:
    """A directory for the beginning of ``PATH`` with a ``tailrace`` that is forked; ``session`` is the interpreter's
    socket."""
    path, programs = directory / "s" / "fork", directory / "bin"
    path.parent.mkdir()
    programs.mkdir()
    server = subprocess.Popen([sys.executable, "-m", __name__, str(path)], cwd=ROOT, stdin=subprocess.PIPE)
    while not path.is_socket():
        assert server.poll() is None, "the fork server has ended"
        time.sleep(0.02)
    python = Path(sys.executable)
    words = {
        "python": python,
        "in_session": Path(__file__).with_name("run_in_session.py"),
        "session": session,
        "forked": Path(__file__).with_name("forked_tailrace.py"),
        "launchers": Path(launcher.__file__).parent,
        "socket": path,
    }
    script = programs / "tailrace"
    script.write_text(_SCRIPT.format_map({name: shlex.quote(str(word)) for name, word in words.items()}))
    script.chmod(0o755)
    yield programs
    server.communicate(timeout=300)


if __name__ == "__main__":
    fork_server._LOADED = ()
    import_everything()
    fork_server.serve(Path(sys.argv[1]))
