"""Runs the snippets of one page as they are printed; only the addresses in connection strings are replaced."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from configparser import RawConfigParser
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pymongo
import yaml
from pymongo.errors import OperationFailure

from tailrace.cli.main import build_parser
from tailrace.lake.spark.store.pipeline_file import load
from tests.docs.snippets import ROOT, Command, Snippet, commands, snippets

_URI = re.compile(r"mongodb://[^\s\"'`)]+")
_MENTIONED_EXTRAS = re.compile(r"(?:tailrace|\.|\.whl)\[([\w,]+)\]")
_COMMENT = re.compile(r"(?m)//(?!/).*$")
_ADMIN_COMMAND = re.compile(r"db\.adminCommand\((.*?)\)\s*(?:;|$)", re.DOTALL | re.MULTILINE)
_INSTRUCTIONS: Final = frozenset(
    {"FROM", "RUN", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD", "WORKDIR", "ARG", "STOPSIGNAL"}
)
#: What builds or installs is not carried out: make runs with --dry-run, and environments are made without pip, which
#: would take five seconds of processor. tests/docs/test_install.py installs, and tests/tables/test_dbt.py runs dbt.
_NOT_BUILT: Final = """\
make() {{ command make --dry-run -C {root} "$@" >/dev/null; }}
pip() {{ :; }}
dbt() {{ :; }}
python3() {{
    if [ "$1" = -m ] && [ "$2" = venv ]; then set -- -m venv --without-pip "${{@:3}}"; fi
    command python3 "$@"
}}
"""
_ENDLESS_S: Final = 1.0
#: Commands that go on until they are interrupted, and the options with which they end by themselves.
_ENDLESS: Final = re.compile(
    r"tailrace (watch|run|listen|gateway|console|top|view run|archive (?!status|verify)"
    r"|sync (?!plan|status|verify|pause|resume|cutover))|python "
)
_ENDS: Final = re.compile(r"--(until|available-now|once|compact|verify|help)")
#: What a command says before it begins.
_BEFORE: Final = b"tailrace: starting Spark"
_LIMIT_S: Final = 400.0
#: Spark in the pages' examples uses Java's compiler C1 alone: it runs too briefly for the other one to pay off.
_QUICK_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_EXTRAS: Final = frozenset(
    {
        "spark",
        "archive",
        "tables",
        "iceberg",
        "icu",
        "console",
        "gateway",
        "embedded",
        "redis",
        "nats",
        "kafka",
        "masks",
        "schema-registry",
        "docs",
        "dev",
    }
)


class Interpreter:
    """The process of ``tests/docs/interpreter.py``. ``session`` is the socket at which it is asked to carry out
    ``tailrace run``."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w")
        self.session = log.with_name("session")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.docs.interpreter", str(self.session)],
            cwd=ROOT,
            env={**os.environ, "JDK_JAVA_OPTIONS": _QUICK_JAVA},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def run(self, **request: Any) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the interpreter died in {request['where']}: {Path(self._log.name).read_text()[-2000:]}"
        answer = json.loads(line)
        assert not answer["error"], f"{request['where']}:\n{request['code']}\n{answer['error']}"
        return str(answer["output"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(300)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()


class PageRunner:
    """The snippets of one page, in one directory, in their order.

    ``programs`` is searched first for what its commands name
    ``uri_for``  gives the address that stands in for a connection string of the page
    """

    def __init__(
        self,
        directory: Path,
        interpreter: Interpreter,
        programs: Path,
        environment: Mapping[str, str],
        uri_for: Callable[[str], str],
    ) -> None:
        self._directory = directory
        self._interpreter = interpreter
        self._path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = dict(environment)
        self._uri_for = uri_for
        self._exported = ""

    def prepare(self, snippets: list[Snippet]) -> None:
        """Write the page's files, which its commands may name before the page shows them."""
        for snippet in snippets:
            if snippet.language == "yaml" and "lake:" in snippet.text:
                (self._directory / "pipeline.yaml").write_text(self._mapped(snippet.text))

    def run(self, snippet: Snippet) -> None:
        getattr(self, f"_run_{snippet.language}")(snippet)

    def _mapped(self, text: str) -> str:
        return _URI.sub(lambda match: self._uri_for(match[0]), text)

    # -- languages --------------------------------------------------------------------------------------------------

    def _run_text(self, snippet: Snippet) -> None:
        """Nothing that runs: a listing, a form."""

    def _run_python(self, snippet: Snippet) -> None:
        self._interpreter.run(
            language=snippet.language,
            code=self._mapped(snippet.text),
            page=snippet.page,
            where=str(snippet),
            directory=str(self._directory),
            environment=self._environment,
        )

    _run_sql = _run_python

    def _run_sh(self, snippet: Snippet) -> None:
        self._shell(snippet.text, snippet)

    def _run_console(self, snippet: Snippet) -> None:
        found = list(commands(snippet))
        assert found, f"{snippet}: no line begins with $"
        for command in found:
            if command.text.startswith("export "):
                self._exported += f"{self._mapped(command.text)}\n"  # each command has a shell of its own
                continue
            self._check_output(snippet, command, self._shell(command.text, snippet))

    def _run_yaml(self, snippet: Snippet) -> None:
        for document in yaml.safe_load_all(snippet.text):
            if "apiVersion" in document:
                assert document["kind"], str(snippet)
                assert document["metadata"]["name"], str(snippet)
                continue
            file = self._directory / "checked.yaml"
            file.write_text(self._mapped(snippet.text))
            load(file, {**os.environ, **self._environment})

    def _run_js(self, snippet: Snippet) -> None:
        """What mongosh would be told: only ``db.adminCommand({...})``, whose argument reads as YAML too."""
        for command in admin_commands(snippet):
            with pymongo.MongoClient[dict[str, Any]](self._uri_for("mongodb://root")) as client:
                for made, drop in (("createUser", "dropUser"), ("createRole", "dropRole")):
                    if made in command:  # by another page
                        with suppress(OperationFailure):
                            client.admin.command(drop, command[made])
                client.admin.command(command)

    def _run_dockerfile(self, snippet: Snippet) -> None:
        lines = re.sub(r"\\\n", " ", snippet.text).splitlines()
        words = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
        assert words[0] in {"FROM", "ARG"}, str(snippet)
        assert set(words) <= _INSTRUCTIONS, str(snippet)
        check_extras(snippet.text)

    def _run_ini(self, snippet: Snippet) -> None:
        """A systemd unit: its parts, and the command that it starts."""
        unit = RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(re.sub(r"\\\n\s*", " ", snippet.text))
        assert {"Unit", "Service"} <= set(unit.sections()), str(snippet)
        program, *arguments = shlex.split(unit["Service"]["ExecStart"])
        assert program.startswith("/"), "systemd wants an absolute path"
        assert Path(program).name == "tailrace"
        build_parser().parse_args(arguments)
        file = self._directory / "tailrace.service"
        file.write_text(snippet.text)
        verify_unit(file, program)

    # -- commands ---------------------------------------------------------------------------------------------------

    def _shell(self, script: str, snippet: Snippet) -> str:
        """What ``script`` prints, errors too. One that does not end is interrupted when it has begun to print."""
        check_extras(script)
        functions = _NOT_BUILT.format(root=shlex.quote(str(ROOT)))
        output = self._directory / ".output"
        # Not its own terminal but its own process group, so that an interrupt reaches all of a pipe.
        with output.open("w") as sink:
            process = subprocess.Popen(
                ["bash", "-eu", "-o", "pipefail", "-c", f"{functions}\n{self._exported}{self._mapped(script)}"],
                cwd=self._directory,
                env={**os.environ, **self._environment, "PATH": self._path},
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            interrupted = self._wait(process, output)
        said = output.read_text(errors="replace")
        allowed = (0, 130, -signal.SIGINT) if interrupted else (0,)
        assert process.returncode in allowed, (
            f"{snippet}: exit status {process.returncode} of\n{script}\n{said[-3000:]}"
        )
        return said

    def _wait(self, process: subprocess.Popen[bytes], output: Path) -> bool:
        began, seen = time.monotonic(), None
        while process.poll() is None:
            time.sleep(0.05)
            now = time.monotonic()
            if seen is None and _has_begun(output):
                seen = now
            stuck = now - began > _LIMIT_S
            if stuck or (seen is not None and now - seen > self._patience(process)):
                os.killpg(process.pid, signal.SIGKILL if stuck else signal.SIGINT)
                process.wait(300)
                return not stuck
        return False

    def _patience(self, process: subprocess.Popen[bytes]) -> float:
        """How long a command that has begun to print may go on. On a busy machine ``archive verify`` once took a second
        and was interrupted, because it was missing from a list of the commands that end. Now there is a list of those
        that do not."""
        script = str(process.args)
        return _ENDLESS_S if _ENDLESS.search(script) and not _ENDS.search(script) else _LIMIT_S

    def _check_output(self, snippet: Snippet, command: Command, said: str) -> None:
        """What the page shows below a command is what it prints; ``...`` stands for whatever differs."""
        if not command.output:
            return
        checker = doctest.OutputChecker()
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert checker.check_output(command.output + "\n", said, flags), (
            f"{snippet}: {command.text}\nthe page shows:\n{command.output}\nit prints:\n{said}"
        )


def admin_commands(snippet: Snippet) -> list[dict[str, Any]]:
    """The commands of ``db.adminCommand({...})`` in a ``js`` block."""
    text = _COMMENT.sub("", snippet.text)
    found = [yaml.safe_load(argument) for argument in _ADMIN_COMMAND.findall(text)]
    left = _ADMIN_COMMAND.sub("", text).strip()
    assert found, f"{snippet}: no db.adminCommand"
    assert not left, f"{snippet}: not understood: {left}"
    return found


def printed_roles() -> dict[str, dict[str, Any]]:
    """The ``createRole`` commands of the page on security, by the role's name."""
    page = ROOT / "docs" / "how-to" / "security.md"
    found = [one for block in snippets(page) if block.language == "js" for one in admin_commands(block)]
    return {one["createRole"]: one for one in found if "createRole" in one}


def _has_begun(output: Path) -> bool:
    """Whether a command has printed what it was asked for. A ``run`` was once interrupted while Spark started, because
    it had already said that it starts Spark."""
    return any(line and not line.startswith(_BEFORE) for line in output.read_bytes().splitlines())


def check_extras(text: str) -> None:
    for named in _MENTIONED_EXTRAS.findall(text):
        assert set(named.split(",")) <= _EXTRAS, f"no such extra: {named}"


def verify_unit(file: Path, program: str) -> None:
    """Checked by systemd, where it is installed. It is no fault of the unit that its program is missing here."""
    try:
        done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return
    complaints = [line for line in done.stderr.splitlines() if file.name in line and program not in line]
    assert complaints == [], complaints
