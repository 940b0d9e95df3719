"""The command line of the experiments.

    python -m experiments list
    python -m experiments run NAME …|all|quick [--repeat] [--jobs N]
    python -m experiments page

`run` continues where it was stopped, keeps the results in `experiments/results`, and draws the page again. With `--repeat` it chooses
rates and judges with seeds that the first run did not use, at least ten, and keeps the results in `experiments/results/repeated`.
`quick` runs a few seeds of the claims that are cheap, changes nothing, and fails if a prediction that was shown no longer holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

from experiments.claim import claims
from experiments.page import entries, write_page
from experiments.running import FIRST, REPETITION, keep, kept, run, turned, verdict_line
from kapelle.errors import did_you_mean


def main(arguments: list[str]) -> int:
    """Run a command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Every claim, shown or not.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name all claims, with their verdicts")
    commands.add_parser(
        "page", help="write docs/claims.md, a page and a picture for each claim, and the algorithms' verdicts"
    )
    running = commands.add_parser("run", help="run claims by name, all of them, or the quick check")
    running.add_argument("names", nargs="+", metavar="NAME|all|quick")
    running.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    running.add_argument("--repeat", action="store_true", help="again, with new seeds for rates and verdicts")
    given = parser.parse_args(arguments)
    known = claims()
    if given.command == "list":
        found = entries()
        for name in known:
            print(
                f"{name}: {found[name].words()}, {found[name].count()}"
                if name in found
                else f"{name}: not run"
            )
        return 0
    if given.command == "run" and given.names == ["quick"]:
        return _quick(given.jobs)
    if importlib.util.find_spec("matplotlib") is None:
        print("The page's pictures need matplotlib: pip install 'kapelle[plot]'", file=sys.stderr)
        return 2
    if given.command == "page":
        write_page()
        return 0
    names = list(known) if given.names == ["all"] else given.names
    for name in names:
        if name not in known:
            print(f"There is no claim '{name}'.{did_you_mean(name, known)}", file=sys.stderr)
            return 2
    for name in names:
        results = run(known[name], given.jobs, drawn=REPETITION if given.repeat else FIRST)
        keep(results, repeated=given.repeat)
        print(verdict_line(known[name], results), flush=True)
        for judged in results.judge(known[name]):
            print(
                f"    {judged.verdict}: {judged.says}: {judged.middle:.3g} [{judged.low:.3g}, {judged.high:.3g}], {judged.bound}"
            )
    write_page()
    return 0


def _quick(jobs: int) -> int:
    import tempfile
    from pathlib import Path

    lost: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, claim in claims().items():
            before = kept(name)
            if claim.quick and before is not None:
                now = run(claim, jobs, claim.quick, before.rates, Path(folder))
                lost += turned(claim, now, before)
    for line in lost:
        print(f"turned: {line}")
    print(f"{len(lost)} predictions turned")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
