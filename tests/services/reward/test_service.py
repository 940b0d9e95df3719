"""Scores over HTTP: those of the trainer's own verifier, and what is said where there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.tiny import sections

from kapelle.algorithms.signals.samples import conversation_sample
from kapelle.errors import ConfigError
from kapelle.runs.reader import read_evaluations
from kapelle.services.reward.service import RunningRewardServer
from kapelle.setup.recipe import resolve, to_yaml
from kapelle.team import VERIFIER
from kapelle.training.observer import Silent
from kapelle.training.served import open_verifier
from kapelle.training.trainer import Trainer
from kapelle.types import Message

ASKED = [("abc", "abc"), ("abc", "acb"), ("bca", "bca"), ("x", ""), ("a b", "longer words than the question")]


def score(web: httpx.Client, server: RunningRewardServer, *items: dict[str, Any]) -> list[Any]:
    said = web.post(f"{server.url}/v1/score", json={"items": items})
    assert said.status_code == 200, said.text
    return list(said.json()["results"])


@pytest.fixture(scope="module")
def in_process(judge: Path) -> list[float]:
    """What the run's own train engine says."""
    with Trainer.from_run(judge) as trainer:
        reader = trainer.engine.renderer(VERIFIER)
        samples = [
            conversation_sample(VERIFIER, reader, [Message("user", question)], answer, {})
            for question, answer in ASKED
        ]
        return [float(each.sigmoid()) for each in trainer.engine.score(samples)]


def test_scores_are_those_of_the_trainer(
    web: httpx.Client, server: RunningRewardServer, in_process: list[float]
) -> None:
    found = score(web, server, *({"question": question, "answer": answer} for question, answer in ASKED))
    assert {each["status"] for each in found} == {"scored"}
    assert [each["score"] for each in found] == pytest.approx(in_process, abs=1e-6)
    assert len(set(in_process)) == len(ASKED), "they can be told apart"


def test_a_conversation_counts_as_a_whole(web: httpx.Client, server: RunningRewardServer) -> None:
    question, longer = (
        [{"role": "user", "content": "abc"}],
        [{"role": "system", "content": "Copy."}, {"role": "user", "content": "abc"}],
    )
    one, same, other = score(
        web,
        server,
        {"question": "abc", "answer": "abc"},
        {"messages": question, "answer": "abc"},
        {"messages": longer, "answer": "abc"},
    )
    assert same["score"] == pytest.approx(one["score"], abs=1e-6)
    assert abs(other["score"] - one["score"]) > 1e-5


@pytest.mark.parametrize("length", [400, 1_000_000])
def test_an_answer_that_the_model_cannot_read_is_ungraded_and_spoils_no_other(
    web: httpx.Client, server: RunningRewardServer, length: int
) -> None:
    good, bad = score(
        web, server, {"question": "a", "answer": "a"}, {"question": "a", "answer": "a " * length}
    )
    assert good["status"] == "scored"
    assert set(bad) == {"status", "reason"}
    assert bad["status"] == "ungraded"
    assert re.search("context of", bad["reason"])


def test_it_says_what_it_is_and_how_well_it_judges(
    web: httpx.Client, server: RunningRewardServer, judge: Path
) -> None:
    about = web.get(f"{server.url}/v1/model").json()
    assert (about["name"], about["kind"], about["step"]) == ("run", "verifier", 2)
    assert about["held_out"] == read_evaluations(judge)[-1]["verifier"]
    assert set(about["sources"]) == {"train", "test"}
    assert web.get(f"{server.url}/health").json() == {"status": "ok", "under_way": 0, "room": 8192}


@pytest.mark.parametrize(
    ("body", "at"),
    [
        ({}, "items"),
        ({"items": []}, "items"),
        ({"items": [{"question": "a"}]}, "items.0.answer"),
        ({"items": [{"answer": "a"}]}, "items.0"),
        ({"items": [{"question": "a", "messages": [{"role": "user", "content": "a"}], "answer": "a"}]}, "items.0"),
        ({"items": [{"question": 1, "answer": "a"}]}, "items.0.question"),
        ({"items": [{"question": "a", "answer": "a", "weight": 1}]}, "items.0.weight"),
        ({"items": [{"messages": [{"role": "robot", "content": "a"}], "answer": "a"}]}, "items.0.messages.0.role"),
    ],
)  # fmt: skip
def test_a_call_that_makes_no_sense_is_refused_by_name(
    web: httpx.Client, server: RunningRewardServer, body: dict[str, Any], at: str
) -> None:
    said = web.post(f"{server.url}/v1/score", json=body)
    assert (said.status_code, said.json()["error"]["param"]) == (400, at)


def test_a_run_without_a_verifier_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(resolve(sections())))
    with pytest.raises(ConfigError, match=r"does not train a verifier .*algorithm.name: verifier"):
        open_verifier(tmp_path, Silent())
