"""Break the library on purpose and see that its tests notice: `python -m tests.mutations [--only NAME] [--list]`.

`mutants.toml` lists the mistakes. Each is made in a temporary copy of `src`, the tests that it names run against
that copy, and every one of them must have a failure. Nothing in the working tree is written. It ends with 1 when a
mutant survives, when a snippet is not found exactly once, or when a named test fails without any mutant.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to break one file."""

    name: str
    path: str
    original: str
    broken: str
    tests: tuple[str, ...]

    @property
    def file(self) -> Path:
        """The file under `src`."""
        return Path("kapelle", self.path)

    @property
    def selected(self) -> tuple[str, ...]:
        """The tests as pytest names them from the root."""
        return tuple(f"tests/{test}" for test in self.tests)


def read_mutants(table: Path = TABLE) -> list[Mutant]:
    """Return the table's mutants in their order."""
    rows = tomllib.loads(table.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def misplaced(mutants: Sequence[Mutant], source: Path) -> Iterator[str]:
    """Yield what is wrong with the table: snippets that are not there exactly once, names used twice."""
    seen: set[str] = set()
    for mutant in mutants:
        found = (source / mutant.file).read_text(encoding="utf-8").count(mutant.original)
        if found != 1:
            yield f"{mutant.name}: the snippet stands {found} times in {mutant.path}"
        if mutant.original == mutant.broken:
            yield f"{mutant.name}: nothing is broken"
        if mutant.name in seen:
            yield f"{mutant.name}: a name used twice"
        seen.add(mutant.name)


def survivors(mutant: Mutant, source: Path) -> list[str]:
    """Return the named tests that stay green with the mutant in `source`, which is put right again."""
    file = source / mutant.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(mutant.original, mutant.broken), encoding="utf-8")
    try:
        red = failures(mutant.selected, source)
    finally:
        file.write_text(whole, encoding="utf-8")
    return [test for test in mutant.selected if not any(_within(each, test) for each in red)]


def failures(tests: Sequence[str], source: Path) -> list[str]:
    """Return the tests that fail against the library in `source`; RuntimeError when pytest could not run them."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return FAILED.findall(done.stdout)


def _within(failed: str, test: str) -> bool:
    return failed == test or failed.startswith((f"{test}::", f"{test}["))


def main(words: Sequence[str] | None = None) -> int:
    """Try the mutants and print one line for each; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    chosen = parser.parse_args(words)
    mutants = [m for m in read_mutants() if not chosen.only or m.name in chosen.only]
    if unknown := set(chosen.only or ()) - {m.name for m in mutants}:
        parser.error(f"no mutant {sorted(unknown)}; --list shows all")
    if chosen.list:
        print(*(mutant.name for mutant in mutants), sep="\n")  # noqa: T201
        return 0
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        return _try(mutants, source)


def _try(mutants: Sequence[Mutant], source: Path) -> int:
    complaints = list(misplaced(mutants, source))
    if complaints:
        print(*complaints, sep="\n")  # noqa: T201
        return 1
    whole = failures(sorted({test for mutant in mutants for test in mutant.selected}), source)
    if whole:
        print("red without any mutant:", *whole, sep="\n  ")  # noqa: T201
        return 1
    alive = 0
    for mutant in mutants:
        green = survivors(mutant, source)
        alive += bool(green)
        verdict = f"SURVIVES {' '.join(green)}" if green else "red"
        print(f"{mutant.name:48} {verdict}", flush=True)  # noqa: T201
    print(f"{len(mutants)} mutants, {alive} survive")  # noqa: T201
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
