"""Which tests are ``heavy``: ``make test`` leaves them to ``make test-landing``, which runs before a change lands.

    python -m tests.heavy COSTS.tsv     writes tests/heavy.txt anew from what tests/processor_time.py measured

A test function is heavy if its cases together took as many seconds of processor as ``SECONDS`` says, and it is not one
of ``KEPT``. Of the functions in ``A_THIRD``, whose cases are many and short, every third case stays.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

LIST: Final = Path(__file__).with_name("heavy.txt")
#: Of the folders that ``make quick`` runs too, and of the others.
SECONDS: Final = {"offline": 1.5, "with servers": 0.8}
_OFFLINE: Final = ("unit", "property", "golden", "tidy")
#: The first test of a file starts what the file's tests share: so much of its time is not its own.
_START: Final = 1.0

#: Expensive, and yet in ``make test``: the tests that find most of the faults in their part of the product. A name with
#: a case keeps that case.
KEPT: Final = {
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
    "tests/golden/test_cursor_replies.py::test_every_recorded_reply_is_given_byte_for_byte": "replies to getMore",
    "tests/golden/test_operators.py::test_every_operator_gives_what_that_server_gives[4.4.2]": "the oldest operators",
    "tests/golden/test_operators.py::test_every_operator_gives_what_that_server_gives[6.0.27]": "the usual operators",
    "tests/golden/test_recordings.py::test_a_recorded_stream_is_given_byte_for_byte": "any event at all",
    "tests/golden/test_sharded_recordings.py::test_a_shard_s_own_stream_is_given_byte_for_byte": "any event of a shard",
    "tests/gateway/test_processes.py::test_a_process_that_is_killed_takes_no_event_with_it[6.0.27]": (
        "the gateway's processes"
    ),
    "tests/gateway/test_strangers.py::test_strangers_are_answered_as_by_the_server[6.0.27]": "users without rights",
    "tests/products/test_products.py::test_a_slice_is_equal_or_refused": "every product beside the server",
    "tests/property/test_kernel_events.py::test_random_entries_give_the_events_of_the_plain_stages": "compiled events",
    "tests/property/test_kernel_projections.py::"
    "test_random_stages_on_random_events_give_the_bytes_of_the_plain_stages_or_leave_them_to_them": "compiled stages",
    "tests/property/test_kernel_transactions.py::test_random_commands_give_the_events_of_the_plain_stages": (
        "compiled transactions"
    ),
    "tests/property/test_merge.py::test_any_reading_gives_the_sorted_union_and_no_event_too_early": "the merge's order",
    "tests/property/test_resume.py::test_a_resume_at_any_token_gives_exactly_the_rest": "where a stream goes on",
    "tests/sharded/test_fuzz_slice.py::"
    "test_a_random_workload_on_moving_chunks_is_given_whole_in_order_and_resumed_anywhere": "any event of a cluster",
    "tests/sharded/test_merged_stream.py::test_the_stream_is_the_union_of_the_shards_own_streams": "the merge",
    "tests/simulation/test_simulation.py::test_every_promise_holds_whatever_goes_wrong": "what consumers are promised",
    "tests/snapshot/test_snapshot.py::test_a_snapshot_and_the_stream_after_it_lose_nothing[3-3]": "snapshots",
    "tests/spark/test_crash.py::test_after_kills_at_random_moments_the_sink_holds_the_servers_stream_once[1]": (
        "Spark under kills"
    ),
    "tests/spark/test_lake.py::test_every_reader_reads_the_same_events_by_the_call_that_the_page_recommends": "lakes",
    "tests/spark/test_stream.py::test_parallel_partitions_give_the_same_bytes_as_one_in_ascending_order": "slices",
    "tests/sync/test_cli_sync.py::test_a_sync_from_its_plan_to_its_way_back": "a sync from end to end",
    "tests/sync/test_definitions.py::test_definitions_are_carried_out_whenever_a_process_dies"
    "[6.0.27-names_go_around-before and after each]": "definitions under kills",
    "tests/sync/test_follower.py::test_after_writes_of_every_kind_it_is_equal_at_each_stop[6.0.27]": "each write",
    "tests/sync/test_follower.py::test_killed_at_random_moments_it_goes_on_and_is_equal": "a sync under kills",
    "tests/sync/test_fuzz_slice.py::test_a_seed_is_equal_at_each_pause": "any write of a sync",
    "tests/tables/test_equality.py::test_tables_equal_their_collections[9101]": "tables beside random writes",
    "tests/tables/test_iceberg_in_store.py::test_every_reader_reads_the_same": "Iceberg tables in an object store",
    "tests/tables/test_object_store.py::test_tables_equal_their_collections": "the same in an object store",
    "tests/unit/test_power_cuts.py::test_what_was_acknowledged_outlives_a_power_cut_at_any_moment": "syncs and renames",
}

#: Of these every third case is in ``make test``: together they are expensive, and each is short.
A_THIRD: Final = frozenset(
    {
        "tests/compare/test_mask.py::test_masked_entries_give_the_masked_events",
        "tests/gateway/test_fail_points.py::test_a_failing_command_s_reply_is_the_server_s",
        "tests/golden/test_captures.py::test_a_public_capture_comes_out_byte_for_byte",
        "tests/golden/test_sharded_recordings.py::test_it_is_the_same_when_the_shard_is_met_on_the_way",
        "tests/golden/test_sharded_recordings.py::test_the_merged_stream_is_the_router_s",
        "tests/golden/test_tokens.py::test_every_recorded_token_is_made_again_from_its_parts",
        "tests/golden/test_tokens.py::test_the_order_of_recorded_events_is_the_order_of_their_tokens",
        "tests/ported/test_habits.py::test_a_habit_has_the_same_outcome",
        "tests/property/test_kernel_definitions.py::test_definitions_give_the_events_of_the_plain_stages",
        "tests/property/test_kernel_plain_match.py::test_the_answer_is_that_of_the_reference",
        "tests/property/test_merge_simulation.py::test_the_merge_of_a_cluster_in_miniature",
        "tests/property/test_pushdown.py::test_no_entry_of_an_event_that_passes_is_left_out",
        "tests/simulation/test_simulation.py::test_a_planted_fault_is_found_within_a_thousand_seeds",
        "tests/spec/test_unified.py::test_a_unified_case_holds",
        "tests/tables/test_strangers.py::test_tables_equal_their_collections_or_are_refused",
        "tests/unit/test_bad_arguments.py::test_a_file_that_cannot_be_used_is_told_in_one_sentence",
        "tests/unit/test_cli_uri.py::test_a_uri_in_another_place_is_answered_with_its_own",
        "tests/unit/test_collation.py::test_every_locale_of_the_server_gives_an_order",
        "tests/unit/test_dump_version.py::test_no_entry_that_a_server_wrote_is_taken_for_one_of_another_version",
        "tests/unit/test_lake_damage.py::test_a_damaged_file_of_the_lake_is_named_in_one_sentence",
        "tests/unit/test_lake_equal_tokens.py::test_both_events_are_there_wherever_batches_row_groups_and_files_end",
        "tests/unit/test_lease_store.py::test_a_broken_store_is_found",
        "tests/unit/test_skipped_operations.py::test_known_kinds_without_an_event_are_not_counted",
        "tests/unit/test_snapshot_block.py::test_compiled_and_plain_events_are_the_same",
        "tests/unit/test_source_uri.py::test_no_error_of_an_unusable_uri_holds_its_password",
        "tests/unit/test_source_uri.py::test_no_form_of_a_uri_shows_its_secret",
    }
)


def mark_heavy(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that ``LIST`` names, and of those in ``A_THIRD`` all cases but every third that ``make
    test-landing`` runs."""
    listed = set(LIST.read_text().split("\n"))
    seen: Counter[str] = Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function in A_THIRD and item.get_closest_marker("slow") is None:
            is_heavy = seen[function] % 3 != 0
            seen[function] += 1
        else:
            is_heavy = function in listed and item.nodeid not in KEPT
        if is_heavy:
            item.add_marker(pytest.mark.heavy)


def heavy_of(measured: Iterable[str]) -> list[str]:
    """The functions that are heavy by lines of processor time as ``tests.processor_time`` writes them."""
    costs: Counter[str] = Counter()
    begun = set()
    for line in measured:
        seconds, _, _, name = line.rstrip("\n").split("\t")
        function = name.partition("[")[0]
        file = function.partition("::")[0]
        costs[function] += float(seconds) if file in begun or is_offline(function) else float(seconds) - _START
        begun.add(file)
    return sorted(
        one for one, seconds in costs.items() if seconds >= most(one) and one not in KEPT and one not in A_THIRD
    )


def most(function: str) -> float:
    """The seconds of processor from which it is heavy. The rules of ``tidy`` never are: they are what changes break."""
    if function.startswith("tests/tidy/"):
        return float("inf")
    return SECONDS["offline" if is_offline(function) else "with servers"]


def is_offline(function: str) -> bool:
    return function.split("/")[1] in _OFFLINE


if __name__ == "__main__":
    LIST.write_text("".join(f"{one}\n" for one in heavy_of(Path(sys.argv[1]).read_text().splitlines())))
