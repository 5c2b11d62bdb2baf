"""``python -m tests.mutants``: plants one fault after the other, and says which of them no test has noticed.

    python -m tests.mutants                             all mutants of core/stage, core/plan, core/event, consumer/rules
    python -m tests.mutants --places core/plan          of one place
    python -m tests.mutants --modules resume_token      of the modules whose name contains this
    python -m tests.mutants --sample 100 --seed 1       so many of each place, drawn at random
    python -m tests.mutants --again                     those that survived, where tests have changed since
    python -m tests.mutants --tests tests/unit/test_a.py those that survived, with the tests of these files alone
    python -m tests.mutants --list                      runs nothing: what is known from earlier runs

A run that was interrupted continues where it stopped: results are kept in ``.mutants``. The exit status is 1 if more
than five in a hundred mutants of a place survive without being listed in ``equivalent.toml``.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TypeAlias

from tests.mutants.mutations import Mutant, MutatedModule, mutated_module
from tests.mutants.places import PLACES, choose, modules, place_of
from tests.mutants.records import STATE, Results
from tests.mutants.reviewed import Reviewed
from tests.mutants.session import Options, run_cold, run_warm

_SHARE_MAX = 0.05
Planted: TypeAlias = tuple[MutatedModule, Mutant]


def main() -> int:
    args = _arguments()
    os.environ["TAILRACE_TESTS"] = "quick"  # without the kernel
    drawn = draw(tuple(args.places.split(",")), args.modules, args.sample, args.seed)
    results, options = Results(args.state), Options(args.processes, args.seconds, args.state)
    if args.tests:
        _try_tests(args.tests, drawn, results, options)
    elif not args.list:
        left = [one for one in drawn if results.get(one[1], again=args.again) is None]
        random.Random(args.seed).shuffle(left)  # so that a run that is interrupted has tried some of everything
        left.sort(key=lambda one: results.get(one[1]) is None)  # those that survived first
        options.all = len(left)
        options.say(f"{len(drawn)} mutants, {len(left)} of them to be run")
        _in_a_process_of_its_own(lambda: run_warm(left, results, options))
        results = Results(args.state)
        left = [one for one in left if results.get(one[1], again=args.again) is None]
        options.done = options.all - len(left)
        run_cold(left, results, options)
    return _report([mutant for _, mutant in drawn], Results(args.state), options)


def _try_tests(files: list[Path], drawn: list[Planted], results: Results, options: Options) -> None:
    """Try the survivors with these tests alone."""
    reviewed = Reviewed.load()
    survived = []
    for module, mutant in drawn:
        known = results.get(mutant)
        if known is not None and known.verdict == "survived" and reviewed.reason(mutant) is None:
            survived.append((module, mutant))
    with tempfile.TemporaryDirectory() as folder:
        choose(files)
        options.state, options.only_kills, options.all = Path(folder), True, len(survived)
        options.say(f"{len(survived)} mutants that survived")
        _in_a_process_of_its_own(lambda: run_warm(survived, results, options))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--modules", default="")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30, help="of tests for one mutant, at the most")
    parser.add_argument("--state", type=Path, default=STATE, help="where is kept what is known")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--tests", type=Path, nargs="+", help="what survived, with the tests of these files alone")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def draw(places: tuple[str, ...], name: str, sample: int | None, seed: int) -> list[Planted]:
    """The mutants of the places, all of them or so many of each."""
    drawn = []
    for place in places:
        found = [mutated_module(module, path) for module, path in modules((place,)).items() if name in module]
        every = [(module, mutant) for module in found for mutant in module.mutants]
        if sample is not None and sample < len(every):
            places_in = sorted(random.Random(f"{seed} {place}").sample(range(len(every)), sample))
            every = [every[index] for index in places_in]
        drawn += every
    return drawn


def _in_a_process_of_its_own(work: object) -> None:
    """It imports Tailrace, which the processes of the mutants at the top of a module must do anew."""
    assert callable(work)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001  the process ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit(f"the process that plants mutants has ended with status {status}")


def _report(mutants: list[Mutant], results: Results, options: Options) -> int:
    reviewed = Reviewed.load()
    status = 0
    options.say(f"{'':22}{'mutants':>8}{'killed':>8}{'ended':>8}{'equivalent':>12}{'survived':>10}{'not run':>9}")
    for place in PLACES:
        of_place = [mutant for mutant in mutants if place_of(mutant.module) == place]
        if not of_place:
            continue
        known = {mutant.name: results.get(mutant) for mutant in of_place}
        verdicts = [known[mutant.name].verdict if known[mutant.name] else "" for mutant in of_place]
        survivors = [m for m, verdict in zip(of_place, verdicts, strict=True) if verdict == "survived"]
        equivalent = [mutant for mutant in survivors if reviewed.reason(mutant)]
        left = len(survivors) - len(equivalent)
        run = len(of_place) - verdicts.count("") - len(equivalent)
        share = left / run if run else 0.0
        status |= share > _SHARE_MAX
        options.say(
            f"{place:22}{len(of_place):8}{verdicts.count('killed'):8}{verdicts.count('timeout'):8}"
            f"{len(equivalent):12}{left:5} {share:4.1%}{verdicts.count(''):9}"
        )
        for mutant in survivors:
            if not reviewed.reason(mutant):
                options.say(f"  {mutant.module}:{mutant.line} {mutant.name}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
