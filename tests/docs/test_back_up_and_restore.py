"""Each row of *Back up and restore* has a test that stands for it.

The page promises outcomes for combinations that nobody meets in daily use. Without this list a row could be written and
never tried; with it, a row without a test fails, and so does a test that was renamed. Where one test tries several rows
one after the other by its parameter, a row names the parameter. Several tests are divided by a space.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "back-up-and-restore.md"

SET_BACK = "unit/test_lake_set_back.py::"
COMMITS = "unit/test_lake_commits.py::"
RESTORED = "tables/test_restored.py::"
ANEW = RESTORED + "test_a_table_that_is_not_as_the_state_knows_it_is_written_anew"
DAMAGE = "unit/test_archive_damage.py::"
EACH_SEGMENT = DAMAGE + "test_what_is_lost_or_in_another_place_is_said_of_each_segment"
HISTORY = "differential/test_archive_history_live.py::"
IMAGES = "unit/test_image_state.py::"
CLUSTER_RESTORED = (
    "sharded/test_restored_cluster.py::"
    "test_nothing_goes_on_over_the_history_of_a_cluster_that_was_restored_from_an_older_backup"
)
SPARK_RESTORED = (
    "spark/test_restored_deployment.py::"
    "test_a_stream_and_a_lake_are_not_continued_on_a_set_that_was_restored_from_an_older_backup"
)

TESTS: dict[str, dict[str, str]] = {
    "A lake": {
        "lake and checkpoint, of one moment": SET_BACK + "test_lake_and_checkpoint_that_were_set_back_together_go_on",
        "an older lake, under the newer checkpoint": (
            SET_BACK + "test_an_old_copy_of_the_lake_is_refused_at_the_start_and_found_by_verify"
        ),
        "an older lake that was compacted since, under the newer checkpoint": (
            SET_BACK + "test_an_old_copy_that_was_changed_since_is_another_lake"
        ),
        "an older lake, while its stream runs": (
            SET_BACK + "test_an_old_copy_that_is_put_in_place_while_the_stream_runs_is_refused_by_the_next_commit"
        ),
        "an older lake, with a fresh checkpoint directory": (
            "spark/test_lake.py::"
            "test_a_lake_put_back_from_a_backup_under_its_newer_checkpoint_is_refused_and_a_fresh_one_loses_nothing"
        ),
        "an older checkpoint, under the newer lake": (
            SET_BACK + "test_a_checkpoint_that_was_set_back_under_its_newer_lake_is_refused"
        ),
        "a second copy of the lake, under the same checkpoint": (
            SET_BACK + "test_of_two_copies_under_one_checkpoint_the_one_that_fell_behind_is_refused"
        ),
        "the checkpoint of another lake": COMMITS + "test_a_checkpoint_of_another_lake_is_refused",
        "a checkpoint whose lake has gone": COMMITS + "test_a_checkpoint_whose_lake_has_gone_is_refused",
        "`tailrace-lake.json` of the checkpoint is lost": (
            SET_BACK + "test_a_checkpoint_without_its_file_and_one_of_a_lake_that_has_gone_are_refused"
        ),
        "`head.json` is lost": SET_BACK + "test_without_its_head_a_lake_goes_on_if_the_checkpoint_has_seen_no_more",
        "commits of its log are lost": (
            "unit/test_lake_damage.py::test_a_commit_that_was_deleted_by_hand_is_named_by_the_next_run_and_by_verify"
        ),
        "a bit of any of its files": "unit/test_lake_bits.py::test_a_flipped_bit_is_refused_or_found",
        "a copy that can only be read": SET_BACK + "test_a_read_only_copy_is_verified_without_writing",
        "the deployment, from an older backup": SPARK_RESTORED,
        "another deployment, of the same name": (
            SET_BACK + "test_the_lake_of_another_deployment_with_the_same_name_is_refused"
        ),
    },
    "Tables": {
        "a table, older": f"{ANEW}[from a backup]",
        "the newest file of a table's log is lost": f"{ANEW}[its newest log file lost]",
        "a table's folder, or one of its data files, is lost": f"{ANEW}[deleted] {ANEW}[a data file missing]",
        "a bit of a data file": RESTORED + "test_a_flipped_bit_is_found_where_the_file_is_read",
        "a table's log that nobody can read": (
            RESTORED + "test_a_log_that_nobody_can_read_is_refused_with_the_way_out"
        ),
        "the table of another collection, or of other tables": (
            RESTORED + "test_a_table_of_another_collection_or_directory_is_refused"
        ),
        "the state, older": RESTORED + "test_a_state_that_is_older_than_its_tables_goes_on",
        "the state of other tables": RESTORED + "test_the_state_of_other_tables_is_refused",
        "the state is lost": "tables/test_writer.py::test_a_state_that_was_removed_is_made_anew_with_the_tables",
        "a first copy that was not finished, at another deployment": (
            RESTORED + "test_a_first_copy_of_another_deployment_is_refused"
        ),
        "a first copy that was not finished: the deployment, from a backup from its middle": (
            RESTORED + "test_a_first_copy_is_not_ended_on_a_set_that_was_restored_from_a_backup_from_its_middle"
        ),
        "the deployment, from an older backup": (
            RESTORED + "test_a_deployment_that_was_restored_from_an_older_backup_is_refused"
        ),
        "another deployment, of the same name": (
            RESTORED + "test_another_deployment_is_refused_before_anything_is_written"
        ),
        "`as of`, with an archive of another history": (
            RESTORED + "test_as_of_refuses_a_table_that_was_set_back_and_an_archive_of_another_history"
        ),
    },
    "An archive": {
        "the archive, older": HISTORY + "test_an_older_copy_of_an_archive_goes_on_and_so_do_two",
        "two copies that both went on": DAMAGE + "test_two_copies_of_an_archive_that_both_went_on_are_read_together",
        "`head.json`, older": DAMAGE + "test_an_older_copy_of_the_head_hides_nothing",
        "`head.json` is lost": DAMAGE + "test_a_writer_deletes_nothing_where_the_head_is_lost",
        "a segment is lost": f"{DAMAGE}test_a_file_that_is_lost_is_told {EACH_SEGMENT}",
        "two segments have changed places": f"{DAMAGE}test_two_files_that_changed_places_are_told {EACH_SEGMENT}",
        "a segment of another archive": (
            f"{DAMAGE}test_a_file_of_another_archive_in_the_place_of_one_is_told {EACH_SEGMENT}"
        ),
        "a folder of another archive": DAMAGE + "test_a_folder_of_another_archive_is_told",
        "another shard's folder": DAMAGE + "test_a_shards_folder_in_the_place_of_another_is_told",
        "a bit of any of its files, or a file that was cut short": (
            f"{DAMAGE}test_an_archive_with_any_bit_flipped_gives_the_same_or_says_so "
            f"{DAMAGE}test_a_file_cut_short_at_any_byte_is_told"
        ),
        "a copy that can only be read": DAMAGE + "test_verify_and_status_write_nothing",
        "the deployment, from an older backup": (
            HISTORY + "test_a_set_that_was_restored_from_an_older_backup_is_refused"
        ),
        "another deployment, of the same name": HISTORY + "test_another_deployment_of_the_same_name_is_refused",
        "another cluster": "sharded/test_archive.py::test_what_an_archive_cannot_tell_is_refused",
        "a shard was removed while nothing archived": (
            "sharded/test_archive.py::test_what_a_shard_held_that_was_removed_while_nobody_archived_is_in_the_archive"
        ),
    },
    "Exact images, and snapshots": {
        "images: the directory of one bucket, older": (
            IMAGES + "test_a_bucket_of_another_state_or_of_an_older_copy_is_found"
        ),
        "images: the first bucket, older": IMAGES + "test_an_older_first_bucket_is_undone_or_found",
        "images: a bucket of another state": IMAGES + "test_a_bucket_of_another_state_or_of_an_older_copy_is_found",
        "images: a bucket's file lost or emptied": IMAGES + "test_a_bucket_whose_file_has_gone_is_no_new_one",
        "images: a bit of a document, a key or a checksum": (
            IMAGES + "test_no_flipped_bit_of_a_record_gives_another_document_or_none"
        ),
        "images or the copy they begin with: another deployment": (
            "differential/test_copies_live.py::test_a_half_copy_is_not_continued_on_another_deployment"
        ),
        "images or the copy they begin with: the deployment, from an older backup": CLUSTER_RESTORED,
        "a snapshot token, from the middle of a copy of another deployment": (
            "differential/test_copies_live.py::test_a_half_copy_is_not_continued_on_another_deployment"
        ),
        "a snapshot token: the deployment, from an older backup": CLUSTER_RESTORED,
    },
    "A listener's position": {
        "leases that are kept elsewhere, with another deployment of the same name": (
            "consumer/test_listener.py::test_a_position_is_not_continued_on_another_deployment_of_the_same_name"
        ),
        "leases that are kept elsewhere: the deployment, from an older backup": (
            "consumer/test_restored.py::test_a_listener_at_a_high_water_mark_does_not_go_on_over_another_history"
        ),
        "a lease, older than the targets that carry its fencing token": (
            "consumer/test_bad_input.py::"
            "test_a_target_with_a_newer_token_than_the_lease_in_force_is_an_error_that_says_so"
        ),
        "a position that was edited": (
            "consumer/test_bad_input.py::test_a_position_that_was_edited_into_something_else_is_an_error"
        ),
    },
    "A Spark stream without a lake": {
        "a checkpoint: the deployment, from an older backup": SPARK_RESTORED,
        "a checkpoint of another stream or deployment": (
            "unit/test_spark_offset.py::test_a_checkpoint_of_another_stream_is_refused_by_name"
        ),
    },
}


def rows() -> dict[str, list[str]]:
    """The first cells of the page's tables of outcomes, by heading."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        cells = re.findall(r"^\| (.+?) \| .+ \|$", body, re.MULTILINE)
        if cells and cells[0] == "what is put back, lost or changed":
            found[heading] = cells[1:]
    return found


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_each_row_of_the_page_has_a_test() -> None:
    assert rows() == {heading: list(tests) for heading, tests in TESTS.items()}


@pytest.mark.parametrize("heading", TESTS)
def test_the_tests_that_stand_for_rows_exist(heading: str) -> None:
    for row, tests in TESTS[heading].items():
        found = re.findall(r"(\S+)::(\w+)(?:\[(.+?)\])?", tests)
        assert found, row
        for path, name, parameter in found:
            assert name in functions(ROOT / "tests" / path), row
            assert f'"{parameter}": ' in (ROOT / "tests" / path).read_text() or not parameter, row
