"""Every thread, process and task of the product has an end that is known and reported.

Whoever starts one does it by ``CheckedThread`` or hands its future to ``told``; every other place is on this list, with
the reason why nothing ends there unnoticed. A thread that died unseen had taken the tables of ``tailrace run`` with it,
with exit status 0.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tailrace
from tests.tidy.parsing import parse

SOURCE = Path(tailrace.__file__).parent

#: What starts a thread, a process or a task.
STARTS = {
    "Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "Threads", "submit", "run_in_executor", "to_thread",
    "create_task", "ensure_future", "run_coroutine_threadsafe", "TaskGroup", "Popen", "Process", "fork",
    "posix_spawn", "system", "create_subprocess_exec", "create_subprocess_shell", "start_new_thread",
    "call_soon_threadsafe", "call_later", "call_soon", "start_http_server",
}  # fmt: skip
#: Classes whose objects are threads.
BASES = {"Thread", "ThreadPoolExecutor", "Process"}
_NAMED = re.compile(rf"\b({'|'.join(sorted(STARTS | BASES))})\b")

#: Module and function: why what is started there cannot end unseen.
KNOWN = {
    "read.archive.writer": "_write keeps what ends it, empties the queue, and run() raises it",
    "read.source.next_reply": "result() raises it, or nobody waits for the reply any more",
    "cli.gateway": "awaited",
    "cli.signal_calls": "it sets what the command waits for; Python prints what it raises",
    "cli.tables": "it only tells; carry_out says what has ended a thread, and fails",
    "cli.web.feed": "what it calls puts a message into queues; what that raises is logged by the event loop",
    "cli.web.guard": "awaited",
    "cli.processes": "the exit status of each process is looked at; the thread 'parent' only waits and sends a signal",
    "watch.client.asynchronous.change_stream": "each future is awaited, or its outcome looked at by the next call",
    "watch.client.asynchronous.client": "awaited",
    "watch.client.kernel_loader": "a failure leaves the plain stages at work, and is logged",
    "watch.client.sharded_stream": "a Worker's outcome() is raised in the stream",
    "act.consumer.async_change": "awaited, or result() is asked for",
    "act.consumer.async_listener": "the task is awaited in join(), each lane's outcome is asked for",
    "act.consumer.lane_reader": "what ends it goes to every queue, where the lanes raise it",
    "act.consumer.lanes": "what ends a lane is kept and raised by the group",
    "act.consumer.listener": "join() raises what ended it",
    "act.consumer.listening": "a lease that is not kept is lost, and says why",
    "act.consumer.messages.nats_jetstream": "a loop that runs what is asked for; each result is waited for",
    "act.consumer.mongo_lease_store": "awaited",
    "act.sync.copying": "result() of each is asked for",
    "act.sync.verification": "result() of each is asked for",
    "demo.pipeline_process": "check() raises the exit status and the last words",
    "embedded.guard": "the guard is the parent of the server, and ends with it",
    "embedded.mongod": "the exit status is looked at while it starts and whenever it does not answer",
    "embedded.replica_set": "each result is asked for",
    "embedded.sharded_cluster": "each result is asked for",
    "watch.gateway.attendant": "_begin and _give_back tell the thread that waits for them",
    "watch.gateway.connection": "both tasks are gathered, and _tell says how they ended",
    "watch.gateway.deadlines": "whoever is told that its time is up sees to what that raises",
    "watch.gateway.engine": "what goes wrong while streams are looked after is logged, and it is tried again",
    "watch.gateway.line": "what ends the reading is logged and closes the line; who asked is told of a failed answer",
    "watch.gateway.loop_turns": "what it calls sets an event; what that raises is logged by the event loop",
    "watch.gateway.opening": "run awaits it",
    "watch.gateway.processes": "a process that ends is logged and started again; _keep logs what it raises itself",
    "watch.gateway.reading": "the keeper logs what ends a read and begins again; a read ahead is taken or closed",
    "watch.gateway.quick": "whatever ends a step or its task closes the connection, and _tell says how",
    "watch.gateway.server": "_serve logs whatever ends a connection",
    "watch.gateway.stage_workers": "the exchange is awaited; the next request finds that a process has ended",
    "watch.gateway.upstream": "what _take_over raises is logged by the event loop",
    "watch.gateway.worker_process": "a client that cannot be taken over is let go; what else is raised asyncio logs",
    "base.metrics_server": "the client library of Prometheus answers each request for itself",
    "read.snapshot.reader": "what ends a range is put into the queue, and raised by who takes it",
    "read.source.merged_outline": "map() raises",
    "read.source.outline": "map() raises",
    "read.source.shard_reader": "_fail keeps what ended it, and the stream raises it",
    "read.source.sharded": "a Worker; the reader of the shard meets the same trouble",
    "read.source.worker": "outcome() gives what a job has raised",
    "lake.spark.planning.cluster": "map() raises",
    "lake.spark.planning.replica_set": "the future is given what it raised, and asked for by slices()",
    "lake.spark.runtime.fork_server": "the launcher is told the exit status of the process that it has asked for",
    "lake.tables.delta_table": "map() raises",
    "lake.spark.runtime.preloaded": "where the server has gone, Spark starts its workers itself",
    "read.window.read_ahead": "result() raises what the read has raised",
    "read.tail.feed": "the receiver is told in any case, and each stream then reads for itself",
    "read.tail.reader": "the receiver is told in any case, and each stream then reads for itself",
    "act.testing.lease_store": "each result is asked for",
}


def starts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every place of a module that starts a thread, a process or a task in a way of its own."""
    text = path.read_text()
    if not _NAMED.search(text):  # parsing all modules takes seven seconds of processor
        return
    tree = parse(text)
    told = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "told"
        for argument in node.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in told:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in STARTS:
                yield node.lineno, name
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                if name in BASES and path.name != "threads.py":
                    yield node.lineno, f"class of {name}"


def found() -> dict[str, list[tuple[int, str]]]:
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        places = list(starts(path))
        if places:
            modules[".".join(path.relative_to(SOURCE).with_suffix("").parts)] = places
    return modules


def test_every_thread_process_and_task_has_an_end_that_is_told() -> None:
    modules = found()
    assert {name: places for name, places in modules.items() if name not in KNOWN} == {}
    assert sorted(set(KNOWN) - set(modules)) == [], "these start nothing any more"


def test_a_new_thread_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "new.py"
    module.write_text(
        "import threading\n"
        "threading.Thread(target=print).start()\n"
        "told(pool.submit(print), 'it failed')\n"
        "pool.submit(print)\n"
        "CheckedThread(print, 'checked').start()\n"
        "class Mine(threading.Thread): ...\n"
    )
    assert sorted(starts(module)) == [(2, "Thread"), (4, "submit"), (6, "class of Thread")]
