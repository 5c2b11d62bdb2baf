"""``python -m tests.simulation --seeds 0-9999``: many runs in several processes; ``--seed n`` plays one again.

Each seed is six runs: listeners that take turns (in transactions or not, as the seed says), lanes, and lanes whose
handlers work in transactions; each of them without an operator and with one, who pauses, hands over, moves the position
and has changes left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.lanes_world import InvariantBrokenError, World
from tests.simulation.servers import BrokenPromiseError
from tests.simulation.simulation import simulate

_CHUNK = 50


def play(seed: int) -> None:
    """Raises what a seed has found."""
    simulate(seed)
    simulate(seed, operated=True)
    for in_transaction in (False, True):
        for operated in (False, True):
            _play_lanes(seed, in_transaction, operated)


def _play_lanes(seed: int, in_transaction: bool, operated: bool) -> None:
    try:
        World(seed, in_transaction=in_transaction, operated=operated).run()
    except InvariantBrokenError as error:
        where = "lanes in transactions" if in_transaction else "lanes"
        where += " with an operator" if operated else ""
        raise BrokenPromiseError(f"seed {seed}, {where}: {error}") from error


def failures(seeds: range) -> list[str]:
    """What the runs of ``seeds`` have found, a line each."""
    found = []
    for seed in seeds:
        try:
            play(seed)
        except BrokenPromiseError as error:
            found.append(str(error))
        except Exception as error:  # noqa: BLE001  an error of the listener's own is a finding too
            found.append(f"seed {seed}: {type(error).__name__}: {error}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="play one run again, with its traceback")
    parser.add_argument("--seeds", default="0-9999", help="first-last")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.seed is not None:
        play(args.seed)
        print(f"seed {args.seed}: every promise holds")
        return 0
    first, _, last = args.seeds.partition("-")
    end, begun, failed = int(last or first) + 1, time.monotonic(), 0
    chunks = [range(start, min(start + _CHUNK, end)) for start in range(int(first), end, _CHUNK)]
    with ProcessPoolExecutor(args.processes) as pool:
        for lines in pool.map(failures, chunks):
            failed += len(lines)
            for line in lines:
                print(line, flush=True)
    print(f"{end - int(first)} seeds, {failed} failed, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
