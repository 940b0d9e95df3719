"""A recipe's `reward_server`: paid as by the verifier in this process, and an episode that is not graded has failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.services.policy.test_safety import TOKEN
from tests.support.tiny import sections
from tests.support.tls import certificate_here
from tests.workflows.stage import lines, play

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.environments.reward_server import RewardServer
from kapelle.errors import ConfigError
from kapelle.runtime.http import _trusted
from kapelle.services.binding import Binding
from kapelle.services.reward.scores import Answered, Scorer
from kapelle.services.reward.service import RewardLimits, serve_reward
from kapelle.services.reward.service import RunningRewardServer as Serving
from kapelle.training.trainer import Trainer
from kapelle.types import Episode, Message, Task
from kapelle.workflows.solo import Solo

TASK = Task("train-0", "47+85", {"answer": 132})


def rewarded_counts(url: str, **settings: Any) -> RewardServer:
    return RewardServer.model_validate({"questions": {"name": "arithmetic"}, "address": url, **settings})


def worth(scorer: Scorer, question: str, text: str) -> float:
    [score] = scorer.score([Answered((Message("user", question),), text)])
    assert score.value is not None
    return score.value


async def one(environment: RewardServer, text: str) -> Episode:
    [episode] = await play(environment, Solo(), ["a"], {"a": lines(text)}, TASK)
    return episode


@pytest.mark.parametrize(("text", "success"), [("132", 1.0), ("It is 131", 0.0)])
async def test_the_reward_is_the_score_and_success_the_truth(
    server: Serving, scorer: Scorer, text: str, success: float
) -> None:
    episode = await one(rewarded_counts(server.url), text)
    assert episode.error is None
    assert episode.rewards == pytest.approx({"a": worth(scorer, TASK.question, text)}, abs=1e-6)
    assert episode.success == success
    assert episode.info["graded"] == {"a": success}


async def test_an_answer_that_the_verifier_cannot_read_fails_its_episode(server: Serving) -> None:
    episode = await one(rewarded_counts(server.url), "132 " * 200)
    assert "The answer is ungraded. The reward server gave this reason" in (episode.error or "")
    assert episode.rewards == {}


async def test_another_machine_is_asked_over_tls_with_the_token(
    scorer: Scorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certificate_here(tmp_path)
    binding = Binding("localhost", token=TOKEN, certificate=certificate, key=key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("KAPELLE_TOKEN", TOKEN)
    _trusted.cache_clear()
    try:
        with serve_reward(scorer, binding, RewardLimits()) as served:
            assert (await one(rewarded_counts(served.url), "132")).error is None
            monkeypatch.setenv("KAPELLE_TOKEN", f"{TOKEN}x")
            refused = await one(rewarded_counts(served.url), "132")
            assert "HTTP 401: The token is missing or incorrect" in (refused.error or "")
            assert TOKEN not in (refused.error or "")
    finally:
        _trusted.cache_clear()


@pytest.mark.slow
def test_a_run_learns_from_what_a_server_pays(server: Serving, scorer: Scorer) -> None:
    environment = {"name": "reward_server", "address": server.url, "questions": {"name": "arithmetic"}}
    with Trainer(**sections(environment=environment)) as trainer:
        step = next(trainer.steps(1))
    episodes = [episode for group in step.groups for episode in group.episodes]
    for episode in episodes:
        last = {turn.agent: turn.text for turn in episode.turns}
        found = {agent: worth(scorer, episode.task.question, last[agent]) for agent in episode.rewards}
        assert episode.rewards == pytest.approx(found, abs=1e-6)
    assert sum(len(episode.rewards) for episode in episodes) > 0


def test_what_makes_no_sense_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    games = RewardServer(questions=Matrix(), address="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="`matrix` is a game"):
        games.check(["a", "b"])
    monkeypatch.setenv("KAPELLE_TOKEN", "secret")
    rewarded_counts("http://127.0.0.1:1").check(["a"])
    rewarded_counts("https://reward.example").check(["a"])
    with pytest.raises(
        ConfigError, match=r"KAPELLE_TOKEN would be sent to http://reward\.example in the clear"
    ):
        rewarded_counts("http://reward.example").check(["a"])
    assert rewarded_counts("http://127.0.0.1:1").sources == Arithmetic().sources
    assert rewarded_counts("http://127.0.0.1:1").alive == ("`address` (http://127.0.0.1:1)",)
