"""What is kept of each token's credit."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.episodes import episode, turn
from tests.support.tiny import sections

from kapelle.algorithm import Credit
from kapelle.functional.distributions import KINDS, read_histogram
from kapelle.rows import TurnKey
from kapelle.runs.reader import read_groups
from kapelle.runs.step_rows import lines_of, stored_step
from kapelle.training.step_report import advantages_of, chosen, credit_metrics
from kapelle.training.trainer import Trainer
from kapelle.types import Group


def group(*rewards: float | None) -> Group:
    members = [
        episode(turn("a", 0), rewards={"a": r or 0.0}, error=None if r is not None else "x") for r in rewards
    ]
    return Group(members[0].task, tuple(members))


def test_best_and_worst_are_kept_of_the_groups_that_differ_most() -> None:
    groups = [group(1.0, 1.0), group(0.0, 0.5, 1.0), group(None, 0.2, 0.0), group(None)]
    assert chosen(groups, 2) == {(1, 2), (1, 0)}
    assert chosen(groups, 3) == {(1, 2), (1, 0), (2, 1)}
    assert chosen(groups, 99) == {(1, 2), (1, 0), (2, 1), (2, 2), (0, 0), (0, 1)}
    assert chosen(groups, 0) == set()


def test_turns_are_counted_and_advantages_summarised_by_agent() -> None:
    turns = [(TurnKey(0, 0, k), turn(agent, k)) for k, agent in enumerate("aab")]
    pairs = (([1.0, 2.0], 0.5), ([6.0, 3.0], 0.0), ([4.0], 2.0))
    credit = {
        key: Credit(torch.tensor(advantage), weight=weight)
        for (key, _), (advantage, weight) in zip(turns, pairs, strict=True)
    }
    row = credit_metrics(turns, credit, advantages_of(turns, credit))
    assert row == pytest.approx(
        {
            "samples/a": 1.0,
            "samples/b": 1.0,
            "advantage/a": 3.0,
            "advantage_std/a": math.sqrt((4 + 1 + 9 + 0) / 3),
            "advantage/b": 4.0,
            "advantage_std/b": 0.0,
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traced") / "run"
    with Trainer(**sections(), run_dir=path) as trainer:
        list(trainer.steps(2))
    return path


def rows(run: Path, step: int) -> list[dict[str, Any]]:
    stored = stored_step(run / "traces", step)
    return [] if stored is None else [json.loads(line) for line in lines_of(stored)]


def test_a_trace_belongs_to_its_episode_and_has_a_number_for_each_token(run: Path) -> None:
    episodes = [each for group in read_groups(run, 1) for each in group.episodes]
    kept = rows(run, 1)
    assert len(kept) == 2
    for row in kept:
        played = {turn.index: turn for turn in episodes[row["line"]].turns}
        assert {each["index"] for each in row["turns"]} == {k for k, each in played.items() if each.trained}
        for each in row["turns"]:
            own = played[each["index"]]
            assert (
                len(own.completion_ids) == len(each["advantage"]) == len(each["credit"]) == len(each["ratio"])
            )
            assert len(each["entropy"]) == len(each["pieces"])
            assert own.text in "".join(each["pieces"])
            assert {str(token) for token in own.prompt_ids} <= row["vocabulary"].keys()
            assert all(0 <= value <= math.log(len(row["vocabulary"]) + 10_000) for value in each["entropy"])


def test_the_first_trace_has_the_text_of_every_token_of_the_step(run: Path) -> None:
    ids = {
        token
        for group in read_groups(run, 2)
        for each in group.episodes
        for turn in each.turns
        for token in turn.completion_ids
    }
    assert {str(token) for token in ids} <= rows(run, 2)[0]["vocabulary"].keys()


def test_best_and_worst_are_credited_with_opposite_signs(run: Path) -> None:
    for row in rows(run, 1) + rows(run, 2):
        for each in row["turns"]:
            assert all(a * c >= 0 for a, c in zip(each["advantage"], each["credit"], strict=True))
            assert sum(map(abs, each["credit"])) <= 1.0
    assert any(any(each["credit"]) for row in rows(run, 1) for each in row["turns"])


def test_every_step_says_how_its_numbers_are_distributed(run: Path) -> None:
    """Counts are those of the episodes, turns and tokens that were recorded."""
    found = [json.loads(line) for line in (run / "distributions.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [1, 2]
    episodes = [each for group in read_groups(run, 1) for each in group.episodes]
    agents = episodes[0].agents
    for agent in agents:
        reward = read_histogram(found[0][f"reward/{agent}"])
        length = read_histogram(found[0][f"length/{agent}"])
        assert reward is not None
        assert length is not None
        turns = [turn for each in episodes for turn in each.by(agent)]
        assert sum(reward.counts) == len(episodes)
        assert length.at(0) == Counter(len(turn.completion_ids) for turn in turns)
        tokens = read_histogram(found[0][f"advantage/{agent}"])
        assert tokens is not None
        assert sum(tokens.counts) == sum(len(turn.completion_ids) for turn in turns if turn.trained)
    played = [each for e in episodes for each in e.turns]
    for policy in {each.policy for each in played}:
        learned = sum(len(t.completion_ids) for t in played if t.policy == policy and t.trained)
        for kind in ("update_entropy", "update_log_ratio"):
            spread = read_histogram(found[0][f"{kind}/{policy}"])
            assert spread is not None
            assert sum(spread.counts) == learned, "all turns, in one pass of the update"
    kinds = {name.partition("/")[0] for name in found[0]} - {"step"}
    assert kinds == set(KINDS)
