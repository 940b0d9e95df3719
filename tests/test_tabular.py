"""Exact values of games that the literature knows, and of language policies against sampled play."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pyspiel")

from tests.tiny import stir, tiny_model, train_engine

from kapelle import checkpoint
from kapelle.engines.local import LocalEngine
from kapelle.engines.torch_train import TorchTrainEngine
from kapelle.environments.matrix import Matrix
from kapelle.environments.openspiel import OpenSpiel
from kapelle.environments.openspiel_opponents import equilibrium
from kapelle.errors import ConfigError
from kapelle.models.plan import plan_sequences
from kapelle.rollout import Play
from kapelle.tabular import Table, average, checkpoint_tables, evaluate_table, language_table, uniform_table
from kapelle.team import Agent, Lora, Policy, Team
from kapelle.trainer import Trainer
from kapelle.types import Message, Sampling
from kapelle.workflows.parallel import Parallel
from kapelle.workflows.play import Play as PlayWorkflow

KUHN = OpenSpiel(game="kuhn_poker", wording="short")


def kuhn_equilibrium(alpha: float) -> Table:
    """Kuhn 1950: the first player's family of equilibria by how often it bets a jack, 0 to 1/3."""
    passes = {
        # first player: jack, queen, king; then after pass and bet
        "0": 1 - alpha,
        "1": 1.0,
        "2": 1 - 3 * alpha,
        "0pb": 1.0,
        "1pb": 1 - (alpha + 1 / 3),
        "2pb": 0.0,
        # second player: after a bet, after a pass
        "0b": 1.0,
        "1b": 2 / 3,
        "2b": 0.0,
        "0p": 2 / 3,
        "1p": 1.0,
        "2p": 0.0,
    }
    return Table({key: {0: p, 1: 1 - p} for key, p in passes.items()}, dict.fromkeys(passes, 1.0))


def test_the_uniform_policy_of_kuhn_poker_has_the_published_nash_conv() -> None:
    exact = evaluate_table(KUHN, uniform_table(KUHN))
    assert exact.nash_conv == pytest.approx(11 / 12)
    assert exact.exploitability == pytest.approx(11 / 24)
    assert exact.returns == pytest.approx((1 / 8, -1 / 8))


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_kuhns_equilibria_cannot_be_exploited_and_are_worth_a_loss_of_one_in_eighteen(alpha: float) -> None:
    exact = evaluate_table(KUHN, kuhn_equilibrium(alpha))
    assert exact.nash_conv == pytest.approx(0.0, abs=1e-12)
    assert exact.returns == pytest.approx((-1 / 18, 1 / 18))


def test_always_betting_is_exploited() -> None:
    bets = {key: {0: 0.0, 1: 1.0} for key in uniform_table(KUHN).chances}
    exact = evaluate_table(KUHN, Table(bets, dict.fromkeys(bets, 1.0)))
    # Against somebody who always bets one folds the jack (-1), and calls with the queen (0) and the king (2):
    # 1/3 from either seat.
    assert exact.returns == pytest.approx((0.0, 0.0))
    assert exact.nash_conv == pytest.approx(2 / 3)


def test_uniform_play_of_tiny_hanabi_is_worth_the_mean_of_its_table() -> None:
    tiny = OpenSpiel(game="tiny_hanabi")
    exact = evaluate_table(tiny, uniform_table(tiny))
    assert exact.returns == pytest.approx((134 / 36, 134 / 36))


def test_the_average_of_two_policies_weighs_them_by_how_they_get_there() -> None:
    """A table that never passes first does not count in what its player does after its own pass."""
    even = uniform_table(KUHN)
    bets = {key: dict(chances) for key, chances in even.chances.items()}
    for card in "012":
        bets[card] = {0: 0.0, 1: 1.0}
        bets[f"{card}pb"] = {0: 0.0, 1: 1.0}
    mixed = average(KUHN, [even, Table(bets, even.legal)])
    assert mixed.chances["0"] == pytest.approx({0: 0.25, 1: 0.75})
    assert mixed.chances["0pb"] == pytest.approx({0: 0.5, 1: 0.5})
    assert mixed.chances["0b"] == pytest.approx({0: 0.5, 1: 0.5})
    assert average(KUHN, [even, even]).chances == even.chances


def language_play(
    environment: OpenSpiel, *agents: str, max_tokens: int = 12, **sampling: Any
) -> tuple[Play, TorchTrainEngine]:
    """Return a team of tiny models with adapters of their own that plays."""
    policies = [Policy(name, lora=Lora(2, 4.0)) for name in agents]
    model = tiny_model(size=0.1)
    trainer = train_engine(policies, models={"base": model})
    how = Sampling(max_tokens=max_tokens, **sampling)
    team = Team(
        tuple(Agent(name, prompt="{question}", sampling=how) for name in agents),
        {policy.name: policy for policy in policies},
        {name: name for name in agents},
    )
    return Play(team, environment, PlayWorkflow(), LocalEngine({"base": model}, policies)), trainer


def test_a_language_policys_table_holds_its_own_token_probabilities() -> None:
    play, trainer = language_play(KUHN, "a", "b")
    table = language_table(play, trainer.score)
    assert set(table.chances) == set(uniform_table(KUHN).chances)
    assert all(math.isclose(sum(chances.values()), 1.0) for chances in table.chances.values())
    assert all(0.0 < legal < 1e-3 for legal in table.legal.values()), "an untrained model hardly says a move"
    # By hand, one state: the second player with a queen after a bet.
    model, renderer = trainer._homes["b"].model, play.engine.renderer("b")
    prompt = renderer.start([Message("user", "2/2 1b <Pass | Bet>")])
    likely = []
    for move in ("Pass", "Bet"):
        said = model.renderer.said(move)
        ids = torch.tensor([[*prompt, *said]])
        with torch.no_grad(), model.computing([("b", 0, ids.shape[1])]):
            flat = ids[0]
            hidden = model.hidden(flat, torch.arange(len(flat)), plan_sequences([len(flat)], model.device))
            logp = torch.log_softmax(model.logits(hidden), -1)
        steps = range(len(prompt) - 1, len(flat) - 1)
        likely.append(math.exp(sum(float(logp[k, flat[k + 1]]) for k in steps)))
    assert table.legal["1b"] == pytest.approx(sum(likely), rel=1e-4)
    assert table.chances["1b"][0] == pytest.approx(likely[0] / sum(likely), rel=1e-4)


def test_agents_with_other_weights_have_other_tables_and_one_agent_plays_every_seat() -> None:
    play, trainer = language_play(KUHN, "a", "b")
    both = language_table(play, trainer.score).chances
    alone, one = language_play(KUHN, "a")
    single = language_table(alone, one.score).chances
    assert single["0"] == pytest.approx(both["0"], rel=1e-4)
    assert single["0b"] != pytest.approx(both["0b"], rel=1e-3)


def test_tables_are_refused_where_a_move_depends_on_more_than_the_state() -> None:
    play, trainer = language_play(KUHN, "a", "b")
    talk = Play(play.team, KUHN, PlayWorkflow(memory="conversation"), play.engine)
    with pytest.raises(ConfigError, match="memory: observation"):
        language_table(talk, trainer.score)
    with pytest.raises(ConfigError, match="memory: observation"):
        language_table(Play(play.team, KUHN, Parallel(), play.engine), trainer.score)
    three = OpenSpiel(game="kuhn_poker", parameters={"players": 3})
    with pytest.raises(ConfigError, match="which policy plays"):
        language_table(Play(play.team, three, PlayWorkflow(), play.engine), trainer.score)
    cut, cutting = language_play(KUHN, "a", "b", top_k=3)
    with pytest.raises(ConfigError, match="top_k: 0"):
        language_table(cut, cutting.score)


def test_only_games_of_openspiel_have_tables() -> None:
    with pytest.raises(ConfigError, match="not for 'matrix'"):
        uniform_table(Matrix())


def test_a_nash_opponent_keeps_its_promise() -> None:
    policy = equilibrium("kuhn_poker()", 0.001)
    exact = evaluate_table(KUHN, Table(policy, dict.fromkeys(policy, 1.0)))
    assert exact.nash_conv <= 0.001
    assert exact.returns[0] == pytest.approx(-1 / 18, abs=0.001)


@pytest.mark.slow
def test_the_recipe_kuhn_becomes_less_exploitable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up that reads its cards and plays them at random, then a few steps against each other."""
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path))
    with Trainer.from_recipe("kuhn") as trainer:
        before = language_table(trainer.play, trainer.engine.score)
        for _ in trainer.steps(12):
            pass
        after = language_table(trainer.play, trainer.engine.score)
    assert before.chances["0"][1] - before.chances["2"][1] > 0.3, "the start depends on the card"
    assert evaluate_table(KUHN, before).nash_conv > 1.0
    assert evaluate_table(KUHN, after).nash_conv < 0.85
    assert evaluate_table(KUHN, after).legal > 0.95


def test_every_checkpoint_becomes_a_table(tmp_path: Path) -> None:
    play, trainer = language_play(KUHN, "a", "b")
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, 1, {"train": trainer.state()})
    first = language_table(play, trainer.score)
    stir(trainer.weights("a"), seed=9)
    checkpoint.save(folder, 2, {"train": trainer.state()})
    second = language_table(play, trainer.score)
    stir(trainer.weights("a"), seed=10)
    found = dict(checkpoint_tables(play, trainer, folder))
    assert list(found) == ["00000001", "00000002"]
    assert found["00000001"].chances == first.chances
    assert found["00000002"].chances == second.chances
    assert first.chances != second.chances


def test_a_damaged_checkpoint_is_no_table_and_is_named(tmp_path: Path) -> None:
    play, trainer = language_play(KUHN, "a", "b")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"train": trainer.state()})
    weights = tmp_path / "00000002" / "train.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    said: list[str] = []
    assert list(dict(checkpoint_tables(play, trainer, tmp_path, said.append))) == ["00000001", "00000003"]
    (line,) = said
    assert line.startswith("left out: Checkpoint ")
    assert "00000002 is damaged: the content of train.safetensors has changed" in line
