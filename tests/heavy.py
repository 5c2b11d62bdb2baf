"""Which tests are ``heavy``: ``make test`` leaves them to ``make test-landing``, which runs before a change lands.

    python -m tests.heavy COSTS.tsv     writes tests/heavy.txt anew from what tests/processor_time.py measured

A test function is heavy if its cases together took ``SECONDS`` of processor or more, and it is not one of ``KEPT``.
Those that ``make quick`` runs never are.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

LIST: Final = Path(__file__).with_name("heavy.txt")
SECONDS: Final = 1.5
_OFFLINE: Final = ("unit", "property", "golden", "tidy")
_NOT_QUICK: Final = frozenset({"long", "mongod", "spark"})

#: Expensive, and yet in ``make test``: the tests that find most of the faults in their part of the product. A name with
#: a case keeps that case.
KEPT: Final = {
    "tests/compare/test_mask.py::test_masked_entries_give_the_masked_events": "a recording that is masked",
    "tests/consumer/test_ordeal.py::test_four_processes_through_a_kill_and_a_stop": "listeners under kills",
    "tests/consumer/test_views.py::test_every_interleaving_ends_in_the_view": "views under every order of two steps",
    "tests/differential/test_archive_live.py::test_a_writer_that_is_killed_again_and_again_archives_each_entry_once": (
        "an archive under kills"
    ),
    "tests/differential/test_fuzz_slice.py::test_every_stream_of_a_random_workload_is_the_servers": "any event at all",
    "tests/differential/test_source_live.py::"
    "test_what_is_not_majority_committed_is_not_given_and_a_rollback_is_never_seen": "the only rollback",
    "tests/docs/test_pages.py::test_commands_in_the_running_text_exist": "an option that was renamed",
    "tests/docs/test_pages.py::test_what_the_page_prints_works[docs/how-to/quick-start.md]": "a newcomer's page",
    "tests/gateway/test_fail_points.py::test_a_failing_command_s_reply_is_the_server_s": "180 short cases",
    "tests/gateway/test_processes.py::test_a_process_that_is_killed_takes_no_event_with_it[6.0.27]": (
        "the gateway's processes"
    ),
    "tests/gateway/test_strangers.py::test_strangers_are_answered_as_by_the_server[6.0.27]": "users without rights",
    "tests/ported/test_habits.py::test_a_habit_has_the_same_outcome": "300 short cases",
    "tests/products/test_products.py::test_a_slice_is_equal_or_refused": "every product beside the server",
    "tests/sharded/test_fuzz_slice.py::"
    "test_a_random_workload_on_moving_chunks_is_given_whole_in_order_and_resumed_anywhere": "any event of a cluster",
    "tests/sharded/test_merged_stream.py::test_the_stream_is_the_union_of_the_shards_own_streams": "the merge",
    "tests/simulation/test_simulation.py::test_a_planted_fault_is_found_within_a_thousand_seeds": "the simulation",
    "tests/simulation/test_simulation.py::test_every_promise_holds_whatever_goes_wrong": "what consumers are promised",
    "tests/snapshot/test_snapshot.py::test_a_snapshot_and_the_stream_after_it_lose_nothing": "snapshots beside writers",
    "tests/spark/test_crash.py::test_after_kills_at_random_moments_the_sink_holds_the_servers_stream_once[1]": (
        "Spark under kills"
    ),
    "tests/spark/test_lake.py::test_every_reader_reads_the_same_events_by_the_call_that_the_page_recommends": "lakes",
    "tests/spark/test_stream.py::test_parallel_partitions_give_the_same_bytes_as_one_in_ascending_order": "slices",
    "tests/spec/test_unified.py::test_a_unified_case_holds": "the drivers' own cases",
    "tests/sync/test_cli_sync.py::test_a_sync_from_its_plan_to_its_way_back": "a sync from end to end",
    "tests/sync/test_definitions.py::test_definitions_are_carried_out_whenever_a_process_dies"
    "[6.0.27-names_go_around-before and after each]": "definitions under kills",
    "tests/sync/test_follower.py::test_after_writes_of_every_kind_it_is_equal_at_each_stop[6.0.27]": "each write",
    "tests/sync/test_follower.py::test_killed_at_random_moments_it_goes_on_and_is_equal": "a sync under kills",
    "tests/sync/test_fuzz_slice.py::test_a_seed_is_equal_at_each_pause": "any write of a sync",
    "tests/tables/test_equality.py::test_tables_equal_their_collections[9101]": "tables beside random writes",
    "tests/tables/test_object_store.py::test_tables_equal_their_collections": "the same in an object store",
    "tests/tables/test_strangers.py::test_tables_equal_their_collections_or_are_refused": "21 short cases",
}


def mark_heavy(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that ``LIST`` names."""
    listed = set(LIST.read_text().split("\n"))
    for item in items:
        if item.nodeid.partition("[")[0] in listed and item.nodeid not in KEPT:
            item.add_marker(pytest.mark.heavy)


def heavy_of(measured: Iterable[str]) -> list[str]:
    """The functions that are heavy by lines of processor time as ``tests.processor_time`` writes them."""
    costs: Counter[str] = Counter()
    for line in measured:
        seconds, _, marks, name = line.rstrip("\n").split("\t")
        function = name.partition("[")[0]
        if function.split("/")[1] in _OFFLINE and not _NOT_QUICK.intersection(marks.split(",")):
            continue
        costs[function] += float(seconds)
    return sorted(one for one, seconds in costs.items() if seconds >= SECONDS and one not in KEPT)


if __name__ == "__main__":
    LIST.write_text("".join(f"{one}\n" for one in heavy_of(Path(sys.argv[1]).read_text().splitlines())))
