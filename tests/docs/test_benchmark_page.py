"""The page of benchmarks is what ``bench/page.py`` makes of what the programs print."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.snippets import ROOT


def module(path: str) -> ModuleType:
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(f"of_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


page, sides, figures = module("bench/page.py"), module("bench/sides.py"), module("docs/hooks/figures.py")
WATCH = """20,000 entries, 2 cores, medians of 1
                                                events/s  ratio  first   client CPU us   server CPU us  bar
                                        native      ours                native    ours  native    ours
raw                                     51,234   312,345   6.10   1.02    12.1     2.1     8.1     0.9  3 met
a $match of few                          1,234    12,345  10.00   1.02    12.1     2.1     8.1     0.9  3 met
"""
STREAMS = """600 writes at 300/s; without a stream they cost mongod 0.31 s of CPU

 streams side     mongod, s with writes readers, s  p50 ms  p99 ms  kB each
       1 native        0.11        0.42       0.10    1.22    3.33     10.1
      10 ours          0.05        0.36       0.20    1.52    4.33      9.1
p50 with one stream, more than native: 0.30 ms (met)
"""
LATENCY = (
    "side        p50 ms  p99 ms   of 300 writes at 100/s\nnative        1.20    3.40\ngateway       1.70    4.10\n"
)
TABLES = """copy                10,000 documents/s
tables              20,000 changes/s (20,000 in 1.0 s)
ratio                  5.1
"""


def question(name: str) -> object:
    (found,) = [one for one in page.QUESTIONS if one.program == name]
    return found


def test_rows_are_cut_out_of_what_the_benches_print() -> None:
    took = {"mongod": [7.9], "plain": [32.0], "kernel": [0.47]}
    printed = f"bytes\n\n{sides.HEADER}\n{sides.Row('plain writes', took)}\n{sides.Row('8.0', {'kernel': [0.5]})}\n"
    cut = {
        name: list(page.rows(question(name), text))
        for name, text in (
            ("transform", printed), ("watch", WATCH), ("streams", STREAMS), ("latency", LATENCY), ("tables", TABLES),
        )
    }  # fmt: skip
    assert cut == {
        "transform": [["plain writes", "7.90", "32.00", "0.47"], ["8.0", "", "", "0.50"]],
        "watch": [["raw", "51,234", "312,345", "6.10"], ["a $match of few", "1,234", "12,345", "10.00"]],
        "streams": [["1 native", "0.11", "1.22", "3.33"], ["10 ours", "0.05", "1.52", "4.33"]],
        "latency": [["native", "1.20", "3.40"], ["gateway", "1.70", "4.10"]],
        "tables": [["copy", "10,000"], ["tables", "20,000"]],
    }


def test_a_section_has_its_bars_drawn_and_says_what_was_missed() -> None:
    text = page.section(question("streams"), ("--streams", "1"), STREAMS.replace("(met)", "(MISSED)"))
    assert "`python bench/streams.py --streams 1`" in text
    assert "* p50 with one stream, more than native: 0.30 ms (MISSED)" in text
    assert figures.with_figures(text).count('class="bar"') == 2


def test_what_was_kept_is_not_measured_again_unless_it_was_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(page, "printed", lambda _, words: asked.append(words) or f"output {len(asked)}")
    latency, kept = question("latency"), tmp_path / "new" / "latency.json"
    first = page.kept_or_printed(latency, (), kept)
    assert page.kept_or_printed(latency, (), kept) == first == ("output 1", first[1])
    assert page.kept_or_printed(latency, ("--writes", "300"), kept)[0] == "output 2"
    assert page.kept_or_printed(latency, (), None)[0] == "output 3"
    assert asked == [(), ("--writes", "300"), ()]


def test_a_program_that_prints_no_table_makes_no_page() -> None:
    with pytest.raises(SystemExit, match=r"bench/latency.py has printed no table"):
        page.section(question("latency"), (), "mongod did not start\n")


def test_every_program_takes_the_options_that_the_page_gives_it() -> None:
    for one in page.QUESTIONS:
        source = (ROOT / "bench" / f"{one.program}.py").read_text()
        for quick in (False, True):
            options = [word for word in one.arguments(quick=quick) if word.startswith("--")]
            assert [option for option in options if f'"{option}"' not in source] == [], one.program


def test_make_bench_leaves_the_page_alone() -> None:
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed", "bench"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "bench/transform.py" in done.stdout
    assert "bench/page.py" not in done.stdout
