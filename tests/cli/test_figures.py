"""What is printed and kept of runs whose figures could mislead: nothing scored, a deaf endpoint, zero-sum games, SFT."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.cli.conftest import Kapelle, Said
from tests.support.plain_server import answering

from kapelle.runs.reader import read_evaluations, read_metrics

TINY = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32, "context": 96}
BASE = {
    "seed": 0,
    "model": {"path": "embedded", "embedded": TINY},
    "training": {"steps": 2, "tasks_per_step": 2},
    "evaluation": {"problems": 4},
}


def recipe(name: str, **sections: object) -> str:
    Path(f"{name}.yaml").write_text(yaml.safe_dump({**BASE, "name": name, **sections}))
    return f"{name}.yaml"


@pytest.fixture
def deaf() -> Iterator[str]:
    """Return the URL of a server that is there, and answers every question with HTTP 501."""
    with answering(200) as server:
        yield f"{server.url}/v1"


def behind_a_deaf_endpoint(url: str, **training: object) -> str:
    agents = [
        {"name": "reasoner", "prompt": "{question}", "weights": {"endpoint": url, "model": "m"}},
        {"name": "actor", "prompt": "{question} {reasoner}"},
    ]
    return recipe(
        "deaf",
        team={"sharing": "lora", "lora": {"rank": 2}, "sampling": {"max_tokens": 4}, "agents": agents},
        environment={"name": "arithmetic", "digits": 1},
        workflow={"name": "chain"},
        algorithm={"name": "grpo", "group_size": 2},
        training={"steps": 1, "tasks_per_step": 2, **training},
    )


def rates_in(said: Said) -> list[str]:
    return re.findall(r"[\d.]+ %", said.out.replace("95 % intervals", ""))


def test_a_deaf_endpoint_gives_no_rate_but_its_reason(kapelle: Kapelle, deaf: str) -> None:
    said = kapelle("train", behind_a_deaf_endpoint(deaf, max_failed_share=1.0), "--run-dir", "run")
    assert said.code == 0, said.err
    assert rates_in(said) == [], "nothing was measured, so there is no figure"
    assert "accuracy  no score  →  no score  scored 0 of 4 unseen problems, 4 failed" in said.out
    assert "not scored: EpisodeError: The endpoint of policy 'reasoner'" in said.out
    assert "step 1/1  nothing to learn from: every episode failed  4 of 4 episodes failed" in said.out
    [step] = read_metrics(Path("run"))
    assert {"success", "return/actor", "reward/actor"} & set(step) == set()
    for row in read_evaluations(Path("run")):
        assert (row["success"], row["reward"], row["scored"], row["failed"]) == (None, {}, 0, 4)
    shown = kapelle("runs", "show", "run")
    assert "warning: 4 episodes failed, the first in step 1" in shown.out
    assert shown.out.count("The endpoint of policy 'reasoner'") == 2, "after the evaluation and in training"
    measured = kapelle("eval", "run", "--no-baselines")
    assert measured.code == 2, "nothing was measured"
    assert rates_in(measured) == []
    assert "scored 0 of 4, 4 failed" in measured.out
    assert "did not answer: HTTP 501" in measured.out
