"""The table of mutants is true of the sources: `python -m tests.mutations` finds every place that it breaks."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from tests.mutations import ROOT, Mutant, main, misplaced, read_mutants, survivors

MUTANTS = read_mutants()


def test_every_snippet_stands_exactly_once() -> None:
    assert list(misplaced(MUTANTS, ROOT / "src")) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_must_go_red_exists(mutant: Mutant) -> None:
    for test in mutant.tests:
        file, *parts = test.split("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert [part for part in parts if f"def {part}(" not in text and f"class {part}:" not in text] == []


def test_a_snippet_that_has_moved_is_found(tmp_path: Path) -> None:
    mutant = MUTANTS[0]
    file = tmp_path / mutant.file
    file.parent.mkdir(parents=True)
    file.write_text("nothing of the kind\n", encoding="utf-8")
    same = dataclasses.replace(mutant, broken=mutant.original)
    assert list(misplaced([mutant, same], tmp_path)) == [
        f"{mutant.name}: the snippet stands 0 times in {mutant.path}",
        f"{mutant.name}: the snippet stands 0 times in {mutant.path}",
        f"{mutant.name}: nothing is broken",
        f"{mutant.name}: a name used twice",
    ]


@pytest.mark.slow
def test_a_survivor_is_named_and_the_source_put_right(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    test = "metrics/test_statistics.py::test_quartiles_by_hand"
    seen = "metrics/test_statistics.py::test_area_under_curve_by_hand"
    ties = "won += tied * (below + level / 2)"
    mutant = Mutant("ties", "metrics/statistics.py", ties, "won += tied * below", (test, seen))
    assert survivors(mutant, tmp_path) == [f"tests/{test}"]
    assert (tmp_path / mutant.file).read_bytes() == (ROOT / "src" / mutant.file).read_bytes()
    lost = dataclasses.replace(mutant, tests=("metrics/test_statistics.py::test_of_nothing",))
    with pytest.raises(RuntimeError, match="pytest ended with"):
        survivors(lost, tmp_path)


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "gspo-ratio-summed"]) == 0
    assert capsys.readouterr().out == "gspo-ratio-summed\n"
    with pytest.raises(SystemExit):
        main(["--only", "no-such-mutant"])
