"""Each row of *Back up and restore* has a test that stands for it.

The page promises outcomes for combinations that nobody meets in daily use. Without this list a row could be written and
never tried; with it, a row without a test fails, and so does a test that was renamed. Where the parameters of one test
stand for several rows, each row names its parameter. Several tests are separated by a space.

What the page quotes is checked on both sides: the product says it, and the tests of the row ask for it.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "back-up-and-restore.md"

SET_BACK = "unit/test_lake_set_back.py::"
COMMITS = "unit/test_lake_commits.py::"
RESTORED = "tables/test_restored.py::"
ANEW = RESTORED + "test_a_table_that_is_not_as_the_state_knows_it_is_written_anew"
LOG = "tables/test_log_damage.py::"
DAMAGE = "unit/test_archive_damage.py::"
EACH_SEGMENT = DAMAGE + "test_what_is_lost_or_in_another_place_is_said_of_each_segment"
HISTORY = "differential/test_archive_history_live.py::"
STORE = "differential/test_archive_in_store.py::"
IMAGES = "unit/test_image_state.py::"
SET_BACK_IMAGES = "differential/test_images_set_back_live.py::"
PART_LOST = SET_BACK_IMAGES + "test_a_directory_of_which_a_part_is_lost_is_refused"
SET_RESTORED = (
    SET_BACK_IMAGES + "test_images_and_a_half_copy_are_refused_by_a_set_that_was_restored_from_an_older_backup"
)
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
        "a lake in an object store, set back": "tables/test_lake_in_store.py::test_a_store_that_was_set_back",
        "the state directory of a lake in an object store is lost, with the checkpoint in it": (
            "tables/test_lake_in_store.py::test_the_stream_on_another_machine_takes_over"
        ),
        "a copy of that directory, while the stream goes on with the other one": (
            "tables/test_lake_in_store.py::test_a_copy_of_the_state_and_the_checkpoint"
        ),
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
        "a bit of a table's log, in an older commit too": (
            f"{LOG}test_a_bit_of_the_log_lets_the_table_be_written_anew "
            f"{LOG}test_no_flipped_bit_of_the_log_gives_readers_other_rows_unseen"
        ),
        "a bit of a checkpoint in a table's log": LOG + "test_a_bit_of_a_checkpoint_lets_the_table_be_written_anew",
        "a table's log that nobody can read": (
            RESTORED + "test_a_log_that_nobody_can_read_is_refused_with_the_way_out"
        ),
        "the table of another collection, or of other tables": (
            RESTORED + "test_a_table_of_another_collection_or_directory_is_refused"
        ),
        "tables and state, from one backup": (
            f"{RESTORED}test_tables_with_their_state_from_a_backup_go_on "
            f"{RESTORED}test_tables_with_their_state_that_are_older_than_the_oplog_are_refused"
        ),
        "the state, older": RESTORED + "test_a_state_that_is_older_than_its_tables_goes_on",
        "a bit of the state": (
            f"{RESTORED}test_a_bit_of_the_state_is_without_effect_or_refused "
            "unit/test_tables_state_damage.py::test_no_flipped_bit_of_a_record_gives_another_answer"
        ),
        "a bit of the state, in a document": (
            RESTORED + "test_a_collection_with_a_damaged_document_is_copied_again_when_it_is_asked_for"
        ),
        "the state of other tables": RESTORED + "test_the_state_of_other_tables_is_refused",
        "the state is lost": "tables/test_writer.py::test_a_state_that_was_removed_is_made_anew_with_the_tables",
        "tables in an object store, set back": (
            "tables/test_object_store.py::test_a_store_that_was_set_back "
            "tables/test_object_store.py::test_a_store_that_is_set_back_while_a_writer_runs"
        ),
        "the state of tables in an object store, older or lost": (
            "tables/test_object_store.py::test_a_copy_of_the_state tables/test_object_store.py::test_a_lost_state"
        ),
        "a first copy that was not finished, at another deployment": (
            RESTORED + "test_a_first_copy_of_another_deployment_is_refused"
        ),
        "a first copy that was not finished: the deployment, from a backup made while the copy ran": (
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
        "`as of`, from a version whose log was changed": LOG + "test_a_bit_of_the_log_lets_the_table_be_written_anew",
    },
    "An archive": {
        "the archive, older": HISTORY + "test_an_older_copy_of_an_archive_goes_on_and_so_do_two",
        "two copies of which each went on": DAMAGE
        + "test_two_copies_of_an_archive_that_both_went_on_are_read_together",
        "`head.json`, older": DAMAGE + "test_an_older_copy_of_the_head_hides_nothing",
        "`head.json` is lost": DAMAGE + "test_a_writer_deletes_nothing_where_the_head_is_lost",
        "a segment is lost": f"{DAMAGE}test_a_file_that_is_lost_is_told {EACH_SEGMENT}",
        "two segments have swapped places": f"{DAMAGE}test_two_files_that_changed_places_are_told {EACH_SEGMENT}",
        "a segment of another archive": (
            f"{DAMAGE}test_a_file_of_another_archive_in_the_place_of_one_is_told {EACH_SEGMENT}"
        ),
        "a folder of another archive": DAMAGE + "test_a_folder_of_another_archive_is_told",
        "another shard's folder": DAMAGE + "test_a_shards_folder_in_the_place_of_another_is_told",
        "a bit of any of its files, or a file that was cut short": (
            f"{DAMAGE}test_an_archive_with_any_bit_flipped_gives_the_same_or_says_so "
            f"{DAMAGE}test_a_file_cut_short_at_any_byte_is_told"
        ),
        "an archive in an object store, set back": STORE + "test_a_store_that_was_set_back",
        "the state of an archive in an object store, older, copied or lost": STORE + "test_the_state",
        "a copy of an archive in an object store, under another prefix": STORE + "test_the_state",
        "a copy that can only be read": DAMAGE + "test_verify_and_status_write_nothing",
        "the deployment, from an older backup": (
            HISTORY + "test_a_set_that_was_restored_from_an_older_backup_is_refused"
        ),
        "another deployment, of the same name": HISTORY + "test_another_deployment_of_the_same_name_is_refused",
        "another cluster": "sharded/test_archive.py::test_what_an_archive_cannot_tell_is_refused",
        "a shard was removed while no archive was being written": (
            "sharded/test_archive.py::test_what_a_shard_held_that_was_removed_while_nobody_archived_is_in_the_archive"
        ),
    },
    "Exact images, and snapshots": {
        "images: the whole directory, older, under a newer token or checkpoint": (
            SET_BACK_IMAGES + "test_an_older_directory_goes_on_under_a_newer_token"
        ),
        "images: an older token or checkpoint, under the newer directory": (
            SET_BACK_IMAGES + "test_an_older_token_goes_on_as_far_back_as_the_directory_reaches"
        ),
        "images: the whole directory is lost": (
            SET_BACK_IMAGES + "test_where_the_whole_directory_is_lost_nothing_is_known_and_the_log_says_so"
        ),
        "images: the whole directory is lost, in Spark": (
            "spark/test_exact_images.py::test_a_directory_that_is_not_the_checkpoint_s_is_refused "
            "spark/test_exact_images.py::test_a_lost_directory_is_made_again_of_the_archive"
        ),
        "images: a part of the directory is lost": " ".join(
            f"{PART_LOST}[{part}]"
            for part in (
                "the buckets",
                "one bucket",
                "the layout",
                "the buckets and the layout",
                "whose it is",
                "all but the note that it has begun",
            )
        ),
        "images: the folder of a shard is lost": (
            "sharded/test_exact_image_faults.py::test_a_directory_without_the_folder_of_a_shard_is_refused"
        ),
        "images: a bit of a small file": (
            f"{SET_BACK_IMAGES}test_a_flipped_bit_in_a_small_file_is_refused "
            f"{SET_BACK_IMAGES}test_a_flipped_bit_in_the_file_that_says_whose_images_they_are_is_refused"
        ),
        "images: the directory of one bucket, older": (
            IMAGES + "test_a_bucket_of_another_state_or_of_an_older_copy_is_found"
        ),
        "images: the first bucket, older": IMAGES + "test_an_older_first_bucket_is_undone_or_found",
        "images: a bucket of another state": IMAGES + "test_a_bucket_of_another_state_or_of_an_older_copy_is_found",
        "images: the state of another stream": (
            SET_BACK_IMAGES + "test_a_state_of_another_stream_in_the_place_of_one_is_refused"
        ),
        "images: a bucket's file lost or emptied": IMAGES + "test_a_bucket_whose_file_has_gone_is_no_new_one",
        "images: a bit of a document, a key or a checksum": (
            IMAGES + "test_no_flipped_bit_of_a_record_gives_another_document_or_none"
        ),
        "images or the copy they begin with: another deployment": (
            "differential/test_copies_live.py::test_a_half_copy_is_not_continued_on_another_deployment"
        ),
        "images or the copy they begin with: the deployment, from an older backup": (
            f"{SET_RESTORED} {CLUSTER_RESTORED}"
        ),
        "a snapshot token, from the middle of a copy of another deployment": (
            "differential/test_copies_live.py::test_a_half_copy_is_not_continued_on_another_deployment"
        ),
        "a snapshot token: the deployment, from an older backup": f"{SET_RESTORED} {CLUSTER_RESTORED}",
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


def rows() -> dict[str, dict[str, str]]:
    """The page's tables of outcomes: for each heading the outcomes by what was put back, lost or changed."""
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        cells = re.findall(r"^\| (.+?) \| (.+) \|$", body, re.MULTILINE)
        if cells and cells[0][0] == "what is put back, lost or changed":
            found[heading] = dict(cells[1:])
    return found


OUTCOMES = rows()
QUOTES = [
    (heading, row, quote)
    for heading, outcomes in OUTCOMES.items()
    for row, outcome in outcomes.items()
    for quote in re.findall(r'"([^"]+)"', outcome)
]


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def standing_for(heading: str, row: str) -> list[tuple[Path, str, str]]:
    found = re.findall(r"(\S+)::(\w+)(?:\[(.+?)\])?", TESTS[heading][row])
    return [(ROOT / "tests" / path, name, parameter) for path, name, parameter in found]


def text_of(node: ast.AST) -> str:
    """A text of the source, with a line break for each part that is not constant."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "\n"


@lru_cache
def said() -> str:
    """Every text of the product."""
    texts: set[str] = set()
    for path in (ROOT / "src" / "tailrace").rglob("*.py"):
        texts.update(map(text_of, ast.walk(ast.parse(path.read_text()))))
    return "\n".join(texts)


def pieces(quote: str) -> list[str]:
    """The words of a quotation between what differs from case to case: ellipses and numbers."""
    return [words for one in re.split(r"…|\d+", quote) if (words := one.strip(" :.,"))]


def is_said(words: str) -> bool:
    """Whether the product says these words in one text, or in two: one of them is often the cause or the subject."""
    cuts = [place for place, letter in enumerate(words) if letter == " "]
    for one, other in ((words[:cut].rstrip(" :,"), words[cut:].lstrip(" :,")) for cut in cuts):
        fewer, more = sorted((one.count(" "), other.count(" ")))
        if fewer >= 1 and more >= 3 and one in said() and other in said():
            return True
    return words in said()


def is_asked_for(words: str, text: str) -> bool:
    """Whether a test has some of these words, three of them in a row, or all where they are fewer."""
    words_ = words.split()
    runs = [" ".join(words_[first : first + 3]) for first in range(max(1, len(words_) - 2))]
    return any(run in text for run in runs)


def test_each_row_of_the_page_has_a_test() -> None:
    assert {heading: list(outcomes) for heading, outcomes in OUTCOMES.items()} == {
        heading: list(tests) for heading, tests in TESTS.items()
    }


@pytest.mark.parametrize("heading", TESTS)
def test_the_tests_that_stand_for_rows_exist(heading: str) -> None:
    for row in TESTS[heading]:
        found = standing_for(heading, row)
        assert found, row
        for path, name, parameter in found:
            assert name in functions(path), row
            assert f'"{parameter}": ' in path.read_text() or not parameter, row


@pytest.mark.parametrize(("heading", "row", "quote"), QUOTES)
def test_what_the_page_quotes_is_said_by_the_product(heading: str, row: str, quote: str) -> None:
    for words in pieces(quote):
        assert is_said(words), (heading, row, words)


@pytest.mark.parametrize("heading", TESTS)
def test_what_the_page_quotes_is_asked_for_by_the_tests_of_its_row(heading: str) -> None:
    for row, outcome in OUTCOMES[heading].items():
        quotes = re.findall(r'"([^"]+)"', outcome)
        paths = {path for path, _, _ in standing_for(heading, row)}
        text = "\n".join(path.read_text().replace("\\", "") for path in paths)
        asked = [words for quote in quotes for words in pieces(quote) if is_asked_for(words, text)]
        assert asked or not quotes, row


@pytest.mark.parametrize("heading", TESTS)
def test_each_outcome_is_one_of_the_three(heading: str) -> None:
    """Each outcome begins with its name; where it depends, the other one follows. A row that is refused has a test of
    the error."""
    for row, outcome in OUTCOMES[heading].items():
        assert re.match(r"(goes on|begins again|refused|`tailrace|reading|its rest is read)", outcome), row
        if outcome.startswith("refused"):
            texts = [path.read_text() for path, _, _ in standing_for(heading, row)]
            assert any(re.search(r"raises\(|except \w*Error|== 1\b|refused", text) for text in texts), row


def test_a_quotation_that_the_product_does_not_say_is_noticed() -> None:
    assert is_said("is missing: the lake's log has lost its end")
    assert is_said(["the tables in", "were read from another history"][1])
    assert not is_said("its commit was replaced by a stranger")
    assert not is_said("the lake has forgotten where it began")
