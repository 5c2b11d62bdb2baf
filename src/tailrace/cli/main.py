"""``tailrace``: the commands, and what all of them do with errors and signals."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from types import FrameType
from typing import Final, NoReturn

from tailrace.cli.usage import WrongUsageError
from tailrace.errors import InternalError, TailraceError
from tailrace.source.uri import URI_VARIABLE, is_uri_argument, redact_uri

#: The commands in the order of the help, and the modules that hold them: each has ``add_parser`` and ``run``.
COMMANDS: Final = (
    "demo",
    "watch",
    "run",
    "lake",
    "archive",
    "tables",
    "replay",
    "token",
    "listen",
    "leases",
    "view",
    "gateway",
    "streams",
    "doctor",
)

#: The extra that brings a package which a command may miss.
_EXTRAS: Final = {
    "pyspark": "spark",
    "pyarrow": "spark",
    "numba": "spark",
    "numpy": "spark",
    "yaml": "spark",
    "google": "spark",
    "deltalake": "tables",
    "lmdb": "tables",
    "fiftyone": "embedded",
    "prometheus_client": "metrics",
    "duckdb": "dev",
    "pandas": "dev",
    "redis": "redis",
    "nats": "nats",
    "confluent_kafka": "kafka",
}
_WRONG_USAGE: Final = 2
_INTERRUPTED: Final = 130
_DESCRIPTION = """\
MongoDB change streams outside the server: the server's own events, read from the oplog.
Every command takes --help. Errors are one sentence, with an exit status other than 0."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point. Returns the exit status: 0, 1 for an error, 2 for wrong usage, 130 when interrupted."""
    with _noted_interrupts() as interrupts:
        try:
            return _run(arguments)
        except KeyboardInterrupt:  # the commands' modules take a moment to load
            return _INTERRUPTED
        except Exception:
            # An interrupt while a package loads may leave it half there, and come to us as that package's error.
            if not interrupts:
                raise
            _discard_output()
            return _INTERRUPTED


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Interrupts raise ``KeyboardInterrupt`` as ever; each is also added to the list that is given."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(arguments: Sequence[str] | None) -> int:
    return carry_out(_parse(arguments))


def carry_out(args: argparse.Namespace) -> int:
    """Run the command that ``args`` were parsed for; the exit status. Errors are a sentence on standard error."""
    _log_in_sentences()
    if sys.stdout is None:
        return _fail("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal or a locale without some character gets its number instead of an error in the middle.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except WrongUsageError as error:
        _fail(str(error))
        return _WRONG_USAGE
    except TailraceError as error:
        return _fail(str(error), _bug_note(error))
    except KeyboardInterrupt:
        _discard_output()
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        _discard_output()
        return 0
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        return _fail(
            f"this command needs the package {package}. Install it: pip install 'tailrace[{_EXTRAS[package]}]'"
        )
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    return status


class _Parser(argparse.ArgumentParser):
    """argparse's, whose complaints quote the arguments: without their secrets."""

    def error(self, message: str) -> NoReturn:
        super().error(redact_uri(message))


def _log_in_sentences() -> None:
    """Warnings on standard error, a line each. PyMongo reports a failure in its background tasks with a traceback of
    twenty lines; what matters of it, that a member cannot be read, our own reader says."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Sentence("tailrace: %(message)s"))
    handler.addFilter(lambda record: record.levelno >= logging.CRITICAL or not record.name.startswith("pymongo."))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class _Sentence(logging.Formatter):
    """Without a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None}))


def build_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of the whole command line, or of the commands ``names`` alone."""
    parser = _Parser(prog="tailrace", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"tailrace {version('tailrace')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        import_module(f"tailrace.cli.{name}").add_parser(subparsers)
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. argparse takes an optional positional only right after the one before it; here it may come after
    flags too: a command names all it has in ``positionals``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # A command loads only its own modules: with those of all others, each start takes twice as long.
    parser = build_parser([arguments[0]] if arguments and arguments[0] in COMMANDS else COMMANDS)
    args, rest = parser.parse_known_args(arguments)
    names: tuple[str, ...] = getattr(args, "positionals", ())
    given = [getattr(args, name) for name in names if getattr(args, name) is not None]
    while rest and len(given) < len(names) and (rest[0] == "-" or not rest[0].startswith("-")):
        given.append(rest.pop(0))
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if len(given) < len(names) and names[0] == "uri" and given and not is_uri_argument(given[0]):
        # A single argument that is not a URI is the one that follows it: the URI is then in the environment.
        given.insert(0, None if os.environ.get(URI_VARIABLE, "").strip() else given.pop(0))
    for name, value in zip(names, [*given, *[None] * len(names)], strict=False):
        setattr(args, name, value)
    return args


def _fail(message: str, note: str = "") -> int:
    _discard_output()
    sentence = redact_uri(message).rstrip(".")
    print(f"tailrace: {sentence}{'' if sentence.endswith(('?', '!')) else '.'}{note}", file=sys.stderr)
    return 1


def _bug_note(error: TailraceError) -> str:
    return " This is a bug of tailrace: please report it." if isinstance(error, InternalError) else ""


def _discard_output() -> None:
    """Write what can still be written; what cannot (a closed pipe) must not fail again when Python ends."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
