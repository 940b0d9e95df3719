"""The pages of which agent lost the game."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.viewed_runs import AGENTS, client_of, write_run

from kapelle.runs.blamed import BlamedEpisode, BlamedTurn, BlameFile, SampledInstead, tokens_hash
from kapelle.viewer.blame import kept
from kapelle.viewer.episode import read_episode

HOW: dict[str, Any] = {"step": 8, "split": "eval", "samples": 4, "seed": 0, "settings": []}


def blamed(seed: int = 0, success: float = 0.0, **over: Any) -> BlamedEpisode:
    """A conversation of three turns, of which the second one loses the most."""
    turns = (
        BlamedTurn("solver", 0, 1, 0, "first notes", 0.75, 1.0, 0.2, (SampledInstead("other notes", 4, 0.75),)),
        BlamedTurn("critic", 1, 1, 1, "a wrong doubt", 1.0, 0.25, 0.2, (SampledInstead("a right doubt", 3, 1.0), SampledInstead("?", 1, None))),
        BlamedTurn("solver", 2, 2, 2, "an answer", 0.25, success, 0.1),
    )  # fmt: skip
    values = (0.75, 1.0, 0.25, success)
    said = BlamedEpisode(f"t{seed}", 0, seed, "", f"{seed}+1", AGENTS, success, values, turns, 12, 0, 99)
    return replace(said, **over)


@pytest.fixture
def blamed_run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "pair", steps=2)
    write_run(tmp_path / "none", steps=2)
    BlameFile(run, HOW).append([blamed(1, success=1.0), blamed(2)])
    return run


@pytest.fixture
def there(blamed_run: Path) -> Iterator[httpx.Client]:
    with client_of(blamed_run.parent) as client:
        yield client


def test_a_measured_run_has_a_page_of_blame(there: httpx.Client, blamed_run: Path) -> None:
    (name,) = kept(blamed_run)
    assert "/run/pair/blame" in there.get("/run/pair").text
    assert "/run/none/blame" not in there.get("/run/none").text
    assert "kapelle blame" in there.get("/run/none/blame").text
    text = there.get("/run/pair/blame").text
    assert "1 failed and 1 solved episodes of the evaluation after step 8, each continued 4 times" in text
    assert text.count("<tr data-item>") == 2
    assert text.index(f"/blame/{name}/0") < text.index("✕ incorrect") + 200, "failed ones stand first"
    assert "+0.750" in text


def test_a_conversation_shows_drops_and_alternatives(there: httpx.Client, blamed_run: Path) -> None:
    (name,) = kept(blamed_run)
    text = there.get(f"/run/pair/blame/{name}/0").text
    for word in (
        "75.0 % → 100.0 %",
        "drop −0.250",
        "100.0 % → 25.0 %",
        "drop +0.750",
        "a right doubt",
        "error",
    ):
        assert word in text, word
    assert 'aria-current="true"><title>critic: a wrong doubt' in text, "the most costly turn is chosen"
    other = there.get(f"/run/pair/blame/{name}/0?turn=2").text
    assert 'aria-current="true"><title>solver: an answer' in other
    for missing in (f"/run/pair/blame/{name}/2", "/run/pair/blame/none/0", f"/run/none/blame/{name}/0"):
        assert there.get(missing).status_code == 404


def test_hostile_text_is_escaped_and_damaged_files_are_skipped(there: httpx.Client, blamed_run: Path) -> None:
    bad = "<script>alert(1)</script>\x1b[31m\u202e"
    file = BlameFile(blamed_run, HOW)
    turns = tuple(replace(turn, text=bad, instead=(SampledInstead(bad, 1, None),)) for turn in blamed().turns)
    file.append([blamed(3, question=bad, task=bad, turns=turns)])
    with file.path.open("ab") as opened:
        opened.write(b'{"task": "half')
    (file.path.parent / "odd.jsonl").write_text('{"format": 1, "settings": []}\n[]\n')
    pages = [
        there.get("/run/pair/blame"),
        *(there.get(f"/run/pair/blame/{file.path.name}/{k}") for k in range(3)),
    ]
    for page in pages:
        assert page.status_code == 200
        assert "<script>alert" not in page.text
        assert "\u202e" not in page.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;␛[31m⟨U+202E⟩" in pages[2].text
    assert pages[0].text.count("<tr data-item>") == 3


def test_a_failed_episode_leads_to_its_measurement_or_to_the_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "pair", steps=2)
    read = read_episode(run, "train", 2, 1)
    assert read is not None
    said = tokens_hash((turn.agent, turn.ids) for turn in read.turns)
    with client_of(tmp_path) as web:
        failed, solved = (f"/run/pair/episode/train/2/{line}" for line in (1, 0))
        assert "kapelle blame" not in web.get(failed).text, "there is no checkpoint to load"
        (run / "checkpoints" / "00000002").mkdir(parents=True)
        assert f"kapelle blame {run} --split train" in web.get(failed).text
        assert "kapelle blame" not in web.get(solved).text
        assert "/run/pair/blame" in web.get("/run/pair").text
        same = replace(blamed(2), task=read.task, seed=8 if read.seed == 8 else 7, tokens_hash=said)
        BlameFile(run, HOW).append([blamed(1), same])
        (name,) = kept(run)
        page = web.get(failed).text
        place = next(k for k, each in enumerate(kept(run)[name].episodes) if each == same)
        assert f"/run/pair/blame/{name}/{place}" in page
        assert "kapelle blame" not in page
