"""A program that the tests fork from a process that has imported everything ends like one that Python itself runs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import commands

PROGRAMS = {
    "an object of the program itself": "class A:\n    def __del__(self): 1 / 0\na = A()",
    "an object of another module": "import sys\nclass A:\n    def __del__(self): 1 / 0\nsys.modules['elsewhere'] = A()",
    "a cycle": "class A:\n    def __del__(self): 1 / 0\na = A(); a.itself = a\ndel a",
    "a function at the exit": "import atexit\natexit.register(lambda: 1 / 0)",
    "a thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), 1 / 0)).start()",
    "a thread that nobody waits for": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()"
    ),
    "an event loop": "import asyncio, gc\nasync def f(): gc.collect(); await asyncio.sleep(0.01)\nasyncio.run(f())",
    "a status": "import sys\nprint(sys.argv[1:], sys.stdin.read())\nraise SystemExit(3)",
    "a sentence": "raise SystemExit('wrong')",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_ends_as_under_python_itself(program: str) -> None:
    """An object of the program itself was released without its output: tests of what forgotten streams print would have
    passed whatever they print."""
    code = PROGRAMS[program]
    own = subprocess.run([sys.executable, "-c", code, "a", "b"], input=b"text", capture_output=True, check=False)
    forked = commands.run("a", "b", code=code, input=b"text")
    assert forked.returncode == own.returncode
    assert _without_places(forked.stdout) == _without_places(own.stdout)
    assert _without_places(forked.stderr) == _without_places(own.stderr)


def _without_places(said: bytes) -> bytes:
    return re.sub(rb"0x[0-9a-f]+", b"0x", said)


def test_a_signal_ends_a_command_and_is_its_status() -> None:
    running = commands.Command(code="import time; time.sleep(300)")
    assert running.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.01)
    running.terminate()
    assert running.wait(300) == -15
    assert commands.run("token", "decode", "zz").returncode == 1
