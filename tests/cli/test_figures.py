"""What is printed and kept of runs whose figures could mislead: nothing scored, a deaf endpoint, zero-sum games, SFT."""

from __future__ import annotations

import json
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
    measured = kapelle("eval", "run", "--no-baselines")
    assert measured.code == 2, "nothing was measured"
    assert rates_in(measured) == []
    assert "scored 0 of 4, 4 failed" in measured.out
    assert "did not answer: HTTP 501" in measured.out


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """40 answers to train on, of which 8 test questions have one, too."""
    folder = tmp_path / "records"
    folder.mkdir()
    for split, count in (("train", 40), ("test", 8)):
        rows = [
            {"question": f"{split} {k}", "solution": str(k % 3), "is_correct": True} for k in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def on_records(folder: Path) -> str:
    return recipe(
        "records",
        team={"sharing": "shared", "sampling": {"max_tokens": 4}, "agents": [{"name": "solver"}]},
        environment={"name": "labelled", "path": str(folder)},
        workflow={"name": "solo"},
        algorithm={"name": "sft"},
        optimizer={"lr": 1e-2},
        training={"steps": 40, "tasks_per_step": 8},
        evaluation={"problems": 8},
    )


@pytest.mark.long
@pytest.mark.slow
def test_sft_on_records_shows_its_loss_and_the_scored_answers(kapelle: Kapelle, records: Path) -> None:
    said = kapelle("train", on_records(records), "--run-dir", "run")
    assert said.code == 0, said.err
    steps = [line for line in said.out.splitlines() if "] step " in line]
    assert all(re.search(r"step \d+/40  [\d.]+ nats a token", line) for line in steps)
    assert not any("reward" in line or line.endswith("right") for line in steps)
    assert all(line.endswith("→ to be learned") for line in steps)
    row = read_metrics(Path("run"))[-1]
    assert row["demonstrated_success"] == 1.0
    assert not {"success", "reward/solver", "return/solver"} & set(row), (
        "the teacher's worth is not the team's"
    )
    last = read_evaluations(Path("run"))[-1]
    assert last["problems"] == 8
    assert 0 < last["scored"] < 8, "a trained model says some of what is on record, and other things"
    tail = said.out[said.out.index("accuracy ") :]
    assert f"scored {last['scored']} of 8" in tail
    assert "not scored: the answers are not recorded" in tail
    counted = kapelle("eval", "run", "--no-baselines").out
    assert counted.count(f"scored {last['scored']} of 8") == 2, "beside the team's rate and the agent's"
