"""What runs in a process of its own: one product, brought forward and compared, so that it can be killed and may crash.

The processes are forked from one that has imported what products need (``tests/commands.py``).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tailrace.errors import TailraceError
from tests.commands import Command, CommandServer
from tests.products.planted import plant
from tests.products.product import Job, Product
from tests.products.products import PRODUCTS
from tests.products.tables import REFUSALS
from tests.products.truth import Truth

_SERVER: Final = CommandServer("tests.products.children")
_CODE: Final = "import sys; from tests.products.children import main; main(sys.argv[1])"
_SAID_MAX: Final = 12_000
#: How much of a crash's message is told.
_BEGINNING: Final = 300
_END: Final = 900
#: For one step of a loaded machine.
PATIENCE_S: Final = 120.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``equal``, ``refused`` with a sentence, ``wrong`` in ``text``, or ``killed`` by the harness."""

    kind: str
    text: str = ""

    @property
    def is_equal(self) -> bool:
        return self.kind == "equal"


def carried_out(product: Product, job: Job) -> Outcome:
    """Bring the product forward and compare it, in this process. Errors other than TailraceError are raised."""
    try:
        product.advance(job)
        if job.options.get("only") == "advance":
            return Outcome("equal")
        told = product.differences(job, Truth(Path(job.truth)))
    except TailraceError as error:
        return _refused(error)
    except REFUSALS as error:  # from programs that read what we wrote
        return Outcome("refused", f"{type(error).__name__}: {error}")
    return Outcome("wrong", "; ".join(told)) if told else Outcome("equal")


def _refused(error: TailraceError) -> Outcome:
    text = str(error)
    # A sentence: it is not empty, and has nothing of Python in it.
    if len(text) < 10 or "Traceback" in text or "object at 0x" in text:
        return Outcome("wrong", f"a refusal that is no sentence: {text!r}")
    return Outcome("refused", f"{type(error).__name__}: {text}")


def main(request: str) -> None:
    """The program of a child: prints the outcome as JSON."""
    faulthandler.enable()  # shows where a process hangs
    job = Job.from_json(Path(request).read_text())
    if job.planted:
        plant(job.planted)
    try:
        outcome = carried_out(PRODUCTS[job.product], job)
    except BaseException as error:  # noqa: BLE001  what a product does not raise on purpose is told as wrong
        outcome = Outcome("wrong", crash(error))
    print(json.dumps([outcome.kind, outcome.text[:_SAID_MAX]]), flush=True)
    # Arrow's threads do not survive a fork, and its shutdown in a forked process does not expect that.
    os._exit(0)


def crash(error: BaseException) -> str:
    """An uncaught error, and where it comes from, the innermost place first."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f"{Path(one.filename).name}:{one.lineno} {one.name}"
        for one in reversed(frames)
        if "site-packages" not in one.filename
    ]
    text = str(error)
    if len(text) > _BEGINNING + _END:  # of Spark's with a worker's stack in it: the error is at its end
        text = f"{text[:_BEGINNING]} … {text[-_END:]}"
    return f"{type(error).__name__}: {text} at {', '.join(places[:6])}"


class Child:
    """A running one."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        self._err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.NamedTemporaryFile("w", prefix="tailrace-job-", delete=False) as file:
            file.write(job.to_json())
        self._request = Path(file.name)
        self._command = Command(file.name, code=_CODE, stdout=self._out, stderr=self._err, server=_SERVER)

    def kill(self) -> bool:
        """Send SIGKILL. Returns whether it was still running."""
        running = self._command.poll() is None
        self._command.kill()
        self._command.wait()
        self._close()
        return running

    def outcome(self) -> Outcome:
        """Wait for the process. If it ends by a signal or with a traceback, or does not end, the outcome is wrong."""
        deadline = time.monotonic() + PATIENCE_S
        while self._command.poll() is None:
            if time.monotonic() > deadline:
                os.kill(self._command.pid, signal.SIGABRT)
                self._command.wait()
                said = self._said(self._err).partition("Extension modules:")[0]
                self._close()
                return Outcome("wrong", f"does not end in {PATIENCE_S:.0f} s: {said}")
            time.sleep(0.01)
        self._out.seek(0)
        status, out, err = self._command.returncode, self._out.read(), self._said(self._err)
        self._close()
        assert status is not None
        if status < 0:
            return Outcome("wrong", f"ended by {signal.Signals(-status).name}: {err}")
        if status != 0 or not out.strip():
            return Outcome("wrong", f"exit status {status}: {err}")
        kind, text = json.loads(out.strip().splitlines()[-1])
        return Outcome(kind, text)

    def _said(self, file: IO[bytes]) -> str:
        file.seek(0)
        return file.read().decode(errors="replace")[-_SAID_MAX:]

    def _close(self) -> None:
        self._out.close()
        self._err.close()
        self._request.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1])
