"""Evaluations as papers report them: sampling of their own, lengths, costs, and the forms in which others read results."""

from __future__ import annotations

from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import yaml
from tests.rollout.evaluation.test_several import settings
from tests.support.episodes import episode, group, turn

from kapelle import Trainer
from kapelle.rollout.evaluation.evaluate import cost_of, decoded, lengths_of, summarise
from kapelle.rollout.evaluation.tables import hub_index, lm_eval_table
from kapelle.settings.schema import EvaluationConfig
from kapelle.setup.recipe import resolve
from kapelle.types import Task

GROUPS = [
    group(
        episode(turn("a", 0, 2), turn("b", 1, 10, finish_reason="length"), success=1.0),
        episode(turn("a", 0, 4), success=0.0),
        episode(turn("a", 0, 100), error="gone"),
    ),
    group(episode(turn("a", 0, 9, usage=(1000, 500)), task=Task("t1", "2+2"), success=0.0)),
]
"""Prompts have three tokens. An endpoint's server counted otherwise in the last episode; one episode failed."""


def test_lengths_are_of_whole_episodes_and_as_servers_count_them() -> None:
    found = lengths_of(GROUPS)
    a = found["a"]
    assert (a.answers, a.mean, a.median, a.p95, a.longest, a.cut) == (3, 506 / 3, 4, 500, 500, 0.0)
    assert a.read == pytest.approx(1006 / 3)
    assert (found["b"].mean, found["b"].cut, found["b"].p95) == (10, 1.0, 10)


def test_costs_count_failed_episodes_too_and_each_agent_at_its_price() -> None:
    prices = {"default": (1.0, 2.0), "b": (10.0, 0.0)}
    a = (3 + 2 * 2) + (3 + 2 * 4) + (3 + 2 * 100) + (1000 + 2 * 500)
    assert cost_of(GROUPS, prices) == pytest.approx((a + 10 * 3) / 1e6 / 4)
    assert cost_of(GROUPS, {"b": (10.0, 1.0)}) == pytest.approx((10 * 3 + 10) / 1e6 / 4), "others are free"


def test_standard_errors_are_over_problems() -> None:
    assert summarise(GROUPS).stderr == pytest.approx(stdev([0.5, 0.0]) / 2**0.5)
    assert summarise(GROUPS[:1]).stderr is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.0, 1.0, 0)),
        ({"greedy": False}, (0.9, 1.0, 0)),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20)),
        ({"temperature": 0.0, "top_p": 0.95, "greedy": False}, (0.0, 1.0, 0)),
        ({"temperature": 0.6, "samples": 4}, (0.6, 1.0, 0)),
    ],
)
def test_sampling_is_the_evaluations_own(
    tmp_path: Path, given: dict[str, Any], expected: tuple[float, float, int]
) -> None:
    config = settings(tmp_path)
    config["team"] = {**config["team"], "sampling": {"max_tokens": 7, "temperature": 0.9}}
    with Trainer(resolve(config)) as trainer:
        own = trainer.setup.sampling_of(trainer.setup.team.agents[0])
        assert (own.temperature, own.max_tokens) == (0.9, 7)
        setup = decoded(trainer.setup, EvaluationConfig(**given))
        found = setup.sampling_of(setup.team.agents[0])
        assert (found.temperature, found.top_p, found.top_k) == expected
        assert found.max_tokens == 7
        assert (
            decoded(setup, EvaluationConfig(max_tokens=3)).sampling_of(setup.team.agents[0]).max_tokens == 3
        )


def test_a_set_is_played_by_its_own_settings(tmp_path: Path) -> None:
    given = settings(tmp_path, samples=2, temperature=0.8, for_set={"hard": {"samples": 5, "max_tokens": 1}})
    with Trainer(resolve(given)) as trainer:
        found = trainer.evaluate()
    sizes = {
        part: {len(g.episodes) for g in found.groups if g.task.part == part} for part in ("", "easy", "hard")
    }
    assert sizes == {"": {2}, "easy": {2}, "hard": {5}}
    assert {"hard avg@5", "hard pass@4", "easy avg@2"} <= found.parts.keys()
    assert "easy avg@5" not in found.parts
    written = {
        len(t.completion_ids)
        for g in found.groups
        if g.task.part == "hard"
        for e in g.episodes
        for t in e.turns
    }
    assert written == {1}
    assert sum(lengths.answers for lengths in found.lengths.values()) == sum(
        len(e.turns) for g in found.groups for e in g.valid
    )


def row(**more: Any) -> dict[str, Any]:
    part = {"success": 0.25, "interval": [0.0, 1.0], "stderr": 0.125, "scored": 8, "problems": 8}
    team = {
        "success": 0.5,
        "stderr": 0.0625,
        "reward": {"a": 0.5},
        "parts": {"pass@2": part, "aime": part, "aime pass@2": {**part, "success": None}},
    }
    return {"player": "runs/demo/", "environment": "math", "sets": ["aime"], "team": team, **more}


def test_the_table_is_lm_evals() -> None:
    assert lm_eval_table([row()]).splitlines() == [
        "|Tasks|Version|Filter|n-shot|Metric | | Value| |Stderr|",
        "|-----|------:|------|-----:|-------|-|-----:|-|-----:|",
        "|math |      1|none  |     0|success|↑|0.5000|±|0.0625|",
        "|     |      1|none  |     0|pass@2 |↑|0.2500|±|0.1250|",
        "|aime |      1|none  |     0|success|↑|0.2500|±|0.1250|",
    ]
    games = row(team={**row()["team"], "success": None, "parts": {}})
    assert "return/a" in lm_eval_table([games]).splitlines()[2]


def test_the_hub_reads_the_front_matter() -> None:
    from huggingface_hub.repocard_data import model_index_to_eval_results

    card = yaml.safe_load(hub_index([row()]).strip("-"))
    name, results = model_index_to_eval_results(card["model-index"])
    assert name == "demo"
    assert [(r.dataset_name, r.metric_type, r.metric_value) for r in results] == [
        ("math", "success", 0.5),
        ("math", "pass@2", 0.25),
        ("aime", "success", 0.25),
    ]
