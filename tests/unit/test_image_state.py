"""The state of exact images: batches that are complete or absent, repeated, undone; buckets; what can go wrong."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.decimal128 import Decimal128
from bson.int64 import Int64

from tailrace.base import durable
from tailrace.errors import UsageError
from tailrace.read.images.bucket import ImageBucket, ImageStateError
from tailrace.read.images.key import state_key
from tailrace.read.images.state import ImageState

UUID = bytes(range(16))


def opened(directory: Path, **options: Any) -> ImageState:
    return ImageState.open(directory, map_bytes=64 << 20, **options)


def keys(count: int) -> list[bytes]:
    return [state_key(UUID, bson.encode({"_id": number})) for number in range(count)]


def write(state: ImageState, number: int, changes: dict[bytes, bytes | None]) -> list[bytes | None]:
    with state.batch(number) as batch:
        before = batch.get(list(changes))
        batch.put(changes.items())
    return before


def test_a_batch_is_there_after_its_end_and_in_another_process(tmp_path: Path) -> None:
    one, two, three = keys(3)
    with opened(tmp_path, buckets=3) as state:
        assert write(state, 5, {one: b"1", two: b"2", three: b"3"}) == [None] * 3
        with state.batch(6) as batch:
            batch.delete([two])
            batch.put([(one, b"1b"), (one, b"1c")])
            assert batch.get([one, two, three]) == [b"1c", None, b"3"]
    with opened(tmp_path) as state:
        assert (state.position, state.buckets, len(state)) == (6, 3, 2)
        assert state.get([one, two, three]) == [b"1c", None, b"3"]


def test_a_batch_that_raises_has_changed_nothing(tmp_path: Path) -> None:
    one, two, *_ = keys(2)
    with opened(tmp_path) as state:
        write(state, 1, {one: b"1"})
        with pytest.raises(TypeError):
            write(state, 2, {one: b"x", two: 5})  # type: ignore[dict-item]
        assert state.get([one, two]) == [b"1", None]
        assert state.position == 1


@pytest.mark.long
@pytest.mark.parametrize("memory_bytes", [0, 6_000, 1 << 30])
def test_batches_given_again_give_the_same_answers(tmp_path: Path, memory_bytes: int) -> None:
    rng = random.Random(3)
    names = keys(40)
    batches = [{name: rng.choice((None, b"%d" % rng.random())) for name in rng.sample(names, 9)} for _ in range(12)]
    batches = [{k: None if v is None else v + b"%d" % i for k, v in batch.items()} for i, batch in enumerate(batches)]
    with opened(tmp_path, buckets=4, memory_bytes=memory_bytes) as state:
        answers = [write(state, 10 * number, batch) for number, batch in enumerate(batches)]
        end = 12
        for _ in range(20):
            first = rng.randrange(end)
            end = rng.randint(first + 1, 12)
            for number in range(first, end):
                assert write(state, 10 * number, batches[number]) == answers[number]
        state.undo_until(None)
        assert (len(state), state.position) == (0, None)


def test_batches_in_memory_are_as_those_on_disk(tmp_path: Path) -> None:
    one, two, three = keys(3)
    with opened(tmp_path, memory_bytes=1 << 30) as state:
        write(state, 1, {one: b"1", two: b"2"})
        state.flush()
        write(state, 2, {one: None, three: b"3"})
        write(state, 3, {one: b"1c", two: None, three: b"3c"})
        assert (state.position, state.get([one, two, three])) == (3, [b"1c", None, b"3c"])
        with state.batch(4) as batch:
            batch.put([(two, b"x")])
            assert batch.get([one, two]) == [b"1c", b"x"]
        with pytest.raises(ZeroDivisionError), state.batch(5) as batch:
            batch.put([(two, b"%d" % (1 // 0))])
        state.undo_until(2)
        assert (state.position, state.get([one, two, three])) == (2, [None, b"2", b"3"])
        write(state, 3, {one: b"again"})
    with opened(tmp_path) as state:  # closing has written them
        assert (state.position, state.get([one, two, three])) == (3, [b"again", b"2", b"3"])
        state.undo_until(1)
        assert (state.position, state.get([one, two, three])) == (1, [b"1", b"2", None])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_batches_that_cannot_be_written_together_are_all_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The disk is full when the third, the second or the first bucket is written: each leaves others written."""
    names = keys(60)
    with opened(tmp_path, buckets=3, memory_bytes=1 << 30) as state:
        write(state, 7, dict.fromkeys(names, b"old"))
        state.flush()
        write(state, 8, dict.fromkeys(names, b"new"))
        write(state, 9, dict.fromkeys(names[:30]))
        commit = ImageBucket.commit

        def full(bucket: ImageBucket, *meta: Any) -> None:
            if bucket.directory.name == f"{failing:04d}":
                raise ImageStateError("the disk is full")
            commit(bucket, *meta)

        monkeypatch.setattr(ImageBucket, "commit", full)
        with pytest.raises(ImageStateError, match="full"):
            state.flush()
        monkeypatch.undo()
        assert (state.position, set(state.get(names))) == (7, {b"old"})
        write(state, 8, dict.fromkeys(names, b"new"))
    with opened(tmp_path) as state:
        assert (state.position, set(state.get(names))) == (8, {b"new"})


def test_what_is_kept_to_undo_has_a_bound_that_says_so(tmp_path: Path) -> None:
    (one,) = keys(1)
    with opened(tmp_path, undo_bytes=5_000) as state:
        for number in range(1, 60):
            write(state, number, {one: bytes([number]) * 1000})
        assert write(state, 58, {one: b"x"}) == [bytes([57]) * 1000]
        with pytest.raises(ImageStateError, match="taken back to"):
            write(state, 3, {one: b"x"})
        assert state.position == 58
    with opened(tmp_path, undo_bytes=5_000) as state, pytest.raises(ImageStateError, match="taken back to"):
        write(state, 3, {one: b"x"})


def test_what_is_held_can_be_undone_however_large_it_is(tmp_path: Path) -> None:
    """A micro-batch of several batches is read again as a whole, but a state was sure to keep only two batches."""
    (one,) = keys(1)
    with opened(tmp_path, undo_bytes=1) as state:
        for number in range(1, 40):
            if number == 20:
                state.hold(19)
            write(state, number, {one: bytes([number]) * 1000})
        with pytest.raises(ImageStateError, match="taken back to"):
            state.undo_until(15)
        state.undo_until(19)
        assert state.get([one]) == [bytes([19]) * 1000]
        for number in range(20, 40):
            write(state, number, {one: bytes([number]) * 1000})
        state.hold(39)
        write(state, 40, {one: b"x"})
        with pytest.raises(ImageStateError, match="taken back to"):
            state.undo_until(19)  # it was let go


def test_another_number_of_buckets(tmp_path: Path) -> None:
    names = keys(500)
    state = opened(tmp_path, buckets=2)
    write(state, 7, {name: name * 2 for name in names})
    state.close()
    with pytest.raises(UsageError, match="rebucket"):
        opened(tmp_path, buckets=5)
    state = opened(tmp_path).rebucket(5)
    with state:
        assert (state.buckets, state.position, len(state)) == (5, 7, 500)
        assert state.get(names) == [name * 2 for name in names]
        write(state, 8, {names[0]: None})
        state.undo_until(7)
        assert len(state) == 500
    assert [path.name for path in tmp_path.glob("generation-*")] in (["generation-1", "generation-2"], ["generation-2"])
    opened(tmp_path).close()
    assert [path.name for path in tmp_path.glob("generation-*")] == ["generation-2"]


def test_a_dropped_collection_goes_when_it_can_no_longer_be_needed(tmp_path: Path) -> None:
    other = bytes(16)
    mine, theirs = keys(1)[0], state_key(other, bson.encode({"_id": 0}))
    with opened(tmp_path, undo_bytes=2_000) as state:
        write(state, 1, {mine: b"1", theirs: b"2"})
        state.drop(UUID)
        assert state.get([mine]) == [b"1"]
    with opened(tmp_path, undo_bytes=2_000) as state:
        for number in range(2, 30):
            write(state, number, {theirs: b"x" * 500})
        assert state.get([mine]) == [None]
        assert [key for key, _ in state.documents(other)] == [theirs]


def test_a_dropped_collection_that_is_written_again_stays(tmp_path: Path) -> None:
    """A shard may lose a collection and get it back. Its documents were deleted, since on a replica set a UUID never
    comes back."""
    other = bytes(16)
    mine, theirs = keys(1)[0], state_key(other, bson.encode({"_id": 0}))
    with opened(tmp_path, undo_bytes=2_000) as state:
        write(state, 1, {mine: b"1", theirs: b"2"})
        state.drop(UUID)
        write(state, 2, {mine: b"3"})
    with opened(tmp_path, undo_bytes=2_000) as state:
        for number in range(3, 30):
            write(state, number, {theirs: b"x" * 500})
        assert state.get([mine]) == [b"3"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, Int64(1)),
        (Int64(2**62), Decimal128(str(2**62))),
        (0.5, Decimal128("0.50")),
        (0, -0.0),
        (2.0**63, Decimal128(str(2**63))),
        ({"a": 1}, {"a": 1.0}),
        (float("nan"), Decimal128("NaN")),
    ],
)
def test_equal_numbers_are_one_document(one: Any, other: Any) -> None:
    assert state_key(UUID, bson.encode({"x": 1, "_id": one})) == state_key(UUID, bson.encode({"_id": other}))


def test_different_ids_are_different_documents() -> None:
    ids = [1, 2, "1", "", b"1", Binary(b"1", 5), None, True, False, {"a": 1}, {"b": 1}, 1.5, Int64(2**62), 2.0**70]
    ids += [bson.ObjectId(), bson.ObjectId(), "x" * 2000, "x" * 2001, b"x" * 2000, bson.MinKey(), bson.MaxKey()]
    found = {state_key(UUID, bson.encode({"_id": id_})) for id_ in ids}
    assert len(found) == len(ids)
    assert max(map(len, found)) <= 500


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(ImageStateError, match="another process"):
            opened(tmp_path)
        code = "import sys; from tailrace.read.images.state import ImageState; ImageState.open(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
        assert "another process writes the images" in done.stderr
    opened(tmp_path).close()


@pytest.mark.parametrize("damage", ["cut", "noise", "layout"])
def test_damaged_files_are_an_error_that_names_them(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path, buckets=1) as state:
        write(state, 1, dict.fromkeys(keys(50), b"x" * 3000))
    data = tmp_path / "generation-1" / "0000" / "data.mdb"
    if damage == "cut":
        os.truncate(data, data.stat().st_size // 2)
    elif damage == "noise":
        data.write_bytes(b"noise" * 5000)
    else:
        durable.write_sealed(tmp_path / "layout.json", {"format": 1})
    with pytest.raises(ImageStateError, match=str(tmp_path)):
        opened(tmp_path)


def test_a_map_that_is_too_small_is_an_error_and_grows_between_batches(tmp_path: Path) -> None:
    names = keys(3000)
    with ImageState.open(tmp_path, buckets=1, map_bytes=1 << 20) as state:
        with pytest.raises(ImageStateError, match="larger than"):
            write(state, 1, dict.fromkeys(names, b"x" * 1000))
        for number in range(30):
            write(state, number + 1, dict.fromkeys(names[100 * number : 100 * number + 100], b"x" * 1000))
        assert len(state) == 3000


_WRITER = """
import random, sys
from tailrace.read.images.state import ImageState
from tests.unit.test_image_state import keys
state = ImageState.open(sys.argv[1], buckets=3, map_bytes=64 << 20, memory_bytes=int(sys.argv[2]))
names = keys(30)
number = -1 if state.position is None else state.position
while True:
    number += 1
    with state.batch(number) as batch:
        batch.put((name, b"%d" % number * 50) for name in names)
    print(number, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("memory_bytes", [0, 100_000])
def test_a_process_that_is_killed_leaves_whole_batches(tmp_path: Path, memory_bytes: int) -> None:
    """Every document is of the position's batch, and no batch that was reported as on disk is gone."""
    rng = random.Random(5)
    for _ in range(8):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(memory_bytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None
            done = b""
            for _ in range(rng.randrange(1, 40)):
                done = process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            done = (process.stdout.read().splitlines() or [done])[-1] or done
        with opened(tmp_path) as state:
            if state.position is None and memory_bytes:
                continue
            assert state.position is not None
            assert state.position >= int(done) or memory_bytes
            assert set(state.get(keys(30))) == {b"%d" % state.position * 50}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    """The size of files is limited instead of the disk's: the same write fails."""
    code = (
        "import resource, signal, sys\n"
        "from tailrace.read.images.state import ImageState\n"
        "from tests.unit.test_image_state import keys\n"
        "state = ImageState.open(sys.argv[1], buckets=2, map_bytes=64 << 20)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "for number in range(1000):\n"
        "    with state.batch(number) as batch:\n"
        "        batch.put((name, b'%d' % number * 900) for name in keys(40 + number))\n"
        "    print(number, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert "ImageStateError" in done.stderr
    last = int(done.stdout.split()[-1])
    with opened(tmp_path) as state:
        assert state.position == last
        assert set(state.get(keys(40 + last))) == {b"%d" % last * 900}
        write(state, last + 1, dict.fromkeys(keys(2), b"goes on"))


# -- damage, copies, halves: none had been looked for beyond a file that is cut off ------------------------------------


def found_at(content: bytes, text: bytes) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(text), content)]


def damaged(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_no_flipped_bit_of_a_record_gives_another_document_or_none(tmp_path: Path) -> None:
    """Bits of documents, of their checksums and of keys: a document is the one that was written, or there is an error,
    also where a key is lost that a search then does not find."""
    names = keys(40)
    documents: dict[bytes, bytes | None] = {name: b"document " + name for name in names}
    with opened(tmp_path, buckets=1) as state:
        write(state, 1, documents)
    path = tmp_path / "generation-1" / "0000" / "data.mdb"
    whole = path.read_bytes()
    places = [at + offset for name in names[::7] for at in found_at(whole, name) for offset in (0, 16, len(name) - 1)]
    places += [at - 4 for at in found_at(whole, b"document ")[::5]]
    found = 0
    for place in places:
        damaged(path, place)
        try:
            with opened(tmp_path) as state, state.batch(2) as batch:
                read = batch.get(names)
                batch.confirm_missing([name for name, known in zip(names, read, strict=True) if known is None])
                assert read == list(documents.values())
        except ImageStateError as error:
            assert f"the file {path} is damaged: " in error.message  # noqa: PT017  what is found is counted
            found += 1
        path.write_bytes(whole)
    assert found > len(places) / 3  # LMDB leaves older pages in the file, which nobody reads


@pytest.mark.parametrize("left", [None, b""], ids=["deleted", "emptied"])
@pytest.mark.parametrize("bucket", [0, 1])
def test_a_bucket_whose_file_has_gone_is_no_new_one(tmp_path: Path, left: bytes | None, bucket: int) -> None:
    with opened(tmp_path, buckets=2) as state:
        write(state, 1, dict.fromkeys(keys(20), b"x"))
    path = tmp_path / "generation-1" / f"{bucket:04d}" / "data.mdb"
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    with pytest.raises(ImageStateError, match=r"is missing|is empty"):
        opened(tmp_path)


@pytest.mark.parametrize("bucket", [0, 1])
def test_a_bucket_of_another_state_or_of_an_older_copy_is_found(tmp_path: Path, bucket: int) -> None:
    one, other, copy = tmp_path / "one", tmp_path / "other", tmp_path / "copy"
    for folder in (one, other):
        with opened(folder, buckets=2) as state:
            for number in range(1, 4):
                write(state, number, dict.fromkeys(keys(20), bytes([number])))
    place = Path("generation-1") / f"{bucket:04d}" / "data.mdb"
    shutil.copytree(one, copy)
    shutil.copy(other / place, one / place)
    with pytest.raises(ImageStateError, match="no longer holds the same bucket of this state"):
        opened(one)
    shutil.copy(copy / place, one / place)
    with opened(one) as state:
        for number in range(4, 8):
            write(state, number, dict.fromkeys(keys(20), bytes([number])))
    shutil.copy(copy / place, one / place)
    with pytest.raises(ImageStateError, match="older than the other buckets"):
        opened(one)
    shutil.rmtree(one)
    shutil.copytree(copy, one)  # all of it is an older state, and whole
    with opened(one) as state:
        assert (state.position, set(state.get(keys(20)))) == (3, {b"\3"})


def test_an_older_first_bucket_is_undone_or_found(tmp_path: Path) -> None:
    """One write behind is what a crash leaves, and is undone, unless what that takes was deleted."""
    path = tmp_path / "generation-1" / "0000" / "data.mdb"
    with opened(tmp_path, buckets=2) as state:
        write(state, 1, dict.fromkeys(keys(20), b"1"))
        state.flush()
        kept = path.read_bytes()
        write(state, 2, dict.fromkeys(keys(20), b"2"))
    path.write_bytes(kept)
    with opened(tmp_path) as state:
        assert (state.position, set(state.get(keys(20)))) == (1, {b"1"})
        write(state, 2, dict.fromkeys(keys(20), b"2"))
        state.settle()
    path.write_bytes(kept)
    with pytest.raises(ImageStateError, match="older than the other buckets"):
        opened(tmp_path)
