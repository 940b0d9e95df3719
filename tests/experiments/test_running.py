"""Running claims: nothing twice, rates for all alike, and a page that says what was measured."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from experiments.claim import Claim, Result, better, claims, overall
from experiments.running import EXTENSIONS, FIRST, REPETITION, run, source_of, turned

from experiments import page

ASKED: list[tuple[float, int]] = []


def measure(lift: float, seed: int, rate: float) -> Result:
    ASKED.append((rate, seed))
    area = lift - abs(rate - 2.0) + random.Random(seed).random() / 100
    return Result({"area": area}, [(0, 0.0), (10, area)])


CLAIM = Claim(
    name="group_baseline",
    algorithms=("grpo",),
    claim="Up is better than down",
    source="nobody",
    setting="Numbers.",
    arms={"up": 1.0, "down": 0.0},
    measure=measure,
    predictions=(better("up", "down", 0.9),),
    rates=(1.0, 2.0, 4.0),
    quick=2,
)


@pytest.fixture
def of_numbers(monkeypatch: pytest.MonkeyPatch) -> Claim:
    """The claim above, found by its name."""
    monkeypatch.setattr("experiments.running.claims", lambda: {CLAIM.name: CLAIM})
    ASKED.clear()
    return CLAIM


def test_rates_are_chosen_by_seeds_of_their_own(of_numbers: Claim, tmp_path: Path) -> None:
    found = run(of_numbers, folder=tmp_path)
    assert found.rates == {"up": 2.0, "down": 2.0}
    assert set(found.tried["up"]) == {"1", "2", "4"}
    tuned = [(rate, seed) for rate, seed in ASKED if seed in FIRST.sweep]
    assert len(tuned) == 2 * 3 * 5
    assert sorted(seed for rate, seed in ASKED if seed not in FIRST.sweep) == sorted([*range(10)] * 2)
    assert overall(found.judge(of_numbers)) == "shown"
    assert found.curves["up"][0][-1] == 10


def test_a_grid_grows_until_the_best_rate_lies_inside_it(of_numbers: Claim, tmp_path: Path) -> None:
    narrow = replace(of_numbers, rates=(4.0, 8.0))
    found = run(narrow, seeds=1, folder=tmp_path)
    assert found.rates["up"] == 2.0
    assert list(found.tried["up"]) == ["1", "2", "4", "8"]
    far = run(replace(of_numbers, rates=(64.0, 128.0)), seeds=1, folder=tmp_path)
    assert len(far.tried["up"]) == 2 + EXTENSIONS
    assert far.rates["up"] == 8.0


def test_a_repetition_shares_no_seed_with_the_first_run(of_numbers: Claim, tmp_path: Path) -> None:
    few = replace(of_numbers, seeds=3)
    first = run(few, folder=tmp_path)
    before = {seed for _, seed in ASKED}
    ASKED.clear()
    repeated = run(few, folder=tmp_path, drawn=REPETITION)
    assert before.isdisjoint(seed for _, seed in ASKED)
    assert (first.seeds, repeated.seeds) == (3, 10)


def test_what_is_done_is_not_done_again(of_numbers: Claim, tmp_path: Path) -> None:
    first = run(of_numbers, folder=tmp_path)
    asked = len(ASKED)
    file = tmp_path / "group_baseline.jsonl"
    lines = file.read_text("utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[:-2]) + lines[-2][:20], "utf-8")  # stopped in the middle of a line
    assert run(of_numbers, folder=tmp_path).runs == first.runs
    assert len(ASKED) == asked + 2


def test_what_a_claim_takes_from_another_is_of_its_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of `league_cycles` also defines the game of `league_exploiter`."""
    shutil.copytree(Path(page.__file__).with_name("claims"), tmp_path / "claims")
    monkeypatch.setattr("experiments.running.HERE", tmp_path)
    claim, file = claims()["league_exploiter"], tmp_path / "claims" / "league_cycles.py"
    first, text = source_of(claim), file.read_text("utf-8")
    file.write_text(text.replace('"RS": 2', '"RS": 3'), "utf-8")
    assert source_of(claim) != first
    file.write_text(text.replace("    remark=(", "    remark=('Ä' "), "utf-8")
    assert source_of(claim) == first


def test_a_verdict_that_turns_is_named(of_numbers: Claim, tmp_path: Path) -> None:
    before = run(of_numbers, folder=tmp_path)
    now = run(of_numbers, seeds=2, fixed=before.rates, folder=tmp_path)
    assert turned(of_numbers, now, before) == []
    now.runs["up"] = [{"area": 0.5}] * 2
    [line] = turned(of_numbers, now, before)
    assert line.startswith("group_baseline: `up` exceeds `down`")


def test_a_verdict_needs_a_repetition_that_agrees(of_numbers: Claim, tmp_path: Path) -> None:
    first = run(of_numbers, folder=tmp_path)
    again = run(of_numbers, folder=tmp_path, drawn=REPETITION)
    assert page.Entry(of_numbers, first).words() == "shown once"
    entry = page.Entry(of_numbers, first, again)
    assert (entry.words(), entry.repetition()) == ("**shown**", "shown again")
    other = replace(again, runs={arm: [{"area": 0.5}] * 10 for arm in again.runs})
    lost = page.Entry(of_numbers, first, other)
    assert (lost.words(), lost.repetition()) == ("**not shown**", "not shown")
    assert [each.brief() for each in (page.Entry(of_numbers, first), entry, lost)] == [
        "shown once",
        "shown",
        "not shown",
    ]
    few = replace(first, seeds=3)
    assert page.Entry(of_numbers, few).words() == "shown once in 3 seeds"
    assert page.Entry(of_numbers, few, again).words() == "**shown** in 3 and 10 seeds"


def test_the_page_says_what_the_results_say() -> None:
    known = page.entries()
    assert page.PAGE.read_text("utf-8") == page.page_of(known), "run: python -m experiments page"
    assert {path.stem for path in page.FOLDER.glob("*.md")} == set(known)
    for name, entry in known.items():
        assert (page.FOLDER / f"{name}.md").read_text("utf-8") == page.claim_page(entry)
        for results in filter(None, (entry.first, entry.repeated)):
            assert results.source == source_of(entry.claim), f"run: python -m experiments run {name}"
        assert (page.PICTURES / f"{name}.svg").exists()
    for algorithm in sorted({each for entry in known.values() for each in entry.claim.algorithms}):
        text = (page.DOCS / "algorithms" / f"{algorithm}.md").read_text("utf-8")
        assert text == page.with_verdicts(text, algorithm, known), "run: python -m experiments page"
    advice = page.ADVICE.read_text("utf-8")
    assert advice == page.with_brief(advice, known), "run: python -m experiments page"
