"""Fitting Q_tot: targets by hand, target networks, and the two-step game of the QMIX paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tiny import same_bits
from torch import nn

from kapelle.algorithms.value_decomposition.mixer_fit import (
    Fitted,
    Foresight,
    JointEpisode,
    MixerFit,
    MonotonicMixer,
    OwnUtilities,
    Replay,
    Rounds,
    SumMixer,
    Target,
    TeamValue,
    joined,
)
from kapelle.algorithms.value_decomposition.settings import FitConfig

F64 = torch.float64


def team_value(mixer: nn.Module, width: int = 2, seed: int = 0) -> TeamValue:
    torch.manual_seed(seed)
    return TeamValue(width, OwnUtilities(width, 2, (16,)), mixer).double()


def fit(net: TeamValue, gamma: float = 1.0, **settings: Any) -> MixerFit:
    return MixerFit(FitConfig.model_validate({"min_fill": 1, **settings}), gamma, net, seed=0)


def walk(rewards: list[float], cut: bool = False, seed: int = 0) -> JointEpisode:
    """An episode with these rewards and arbitrary embeddings."""
    generator = torch.Generator().manual_seed(seed)
    rounds = len(rewards)
    saw, said = torch.randn(2, rounds, 2, 2, generator=generator, dtype=F64)
    return JointEpisode(
        Rounds(saw, said, torch.ones(rounds, 2, dtype=F64), saw.mean(1)),
        torch.tensor(rewards, dtype=F64),
        cut,
    )


def remembered(*episodes: JointEpisode) -> Replay:
    replay = Replay(100)
    replay.add(episodes)
    return replay


class Prescribed(nn.Module):
    """A mixer that says 10, 20, 30 … for the rounds of a batch: what a target is by hand."""

    def forward(
        self, utility_BA: torch.Tensor, acted_BA: torch.Tensor, state_BD: torch.Tensor
    ) -> torch.Tensor:
        return 10.0 * torch.arange(1, len(state_BD) + 1, dtype=F64)


class TestTargets:
    EPISODES = (walk([1.0, 0.0, 2.0]), walk([4.0, 8.0], cut=True))

    def goal(self, **settings: Any) -> tuple[list[list[float]], list[list[float]]]:
        target = fit(team_value(Prescribed()), 0.5, **settings).goal(joined(self.EPISODES))
        return target.value_NK.tolist(), target.mask_NK.tolist()

    def test_monte_carlo(self) -> None:
        # 1 + 0 + ¼·2, ½·2, 2; a cut episode counts as it was paid: 4 + ½·8, 8.
        assert self.goal() == ([[1.5, 1.0, 2.0], [8.0, 8.0, 0.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])

    def test_td_looks_one_round_ahead(self) -> None:
        # Q̄ = 10, 20, 30 and 40, 50: 1 + ½·20, ½·30, 2. Cut: 4 + ½·50, and the last round has no target.
        assert self.goal(target="td") == (
            [[11.0, 15.0, 2.0], [29.0, 0.0, 0.0]],
            [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]],
        )

    def test_lambda_mixes(self) -> None:
        # G_3 = 2; G_2 = ½(½·30 + ½·2) = 8; G_1 = 1 + ½(½·20 + ½·8) = 8.
        values, _ = self.goal(target="td", lam=0.5)
        assert values == [[8.0, 8.0, 2.0], [29.0, 0.0, 0.0]]

    def test_lambda_1_is_monte_carlo_where_nothing_was_cut(self) -> None:
        values, _ = self.goal(target="td", lam=1.0)
        assert values[0] == self.goal()[0][0]

    def test_a_cut_episode_of_one_round_teaches_td_nothing(self) -> None:
        made = fit(team_value(SumMixer()), target="td", updates=3)
        before = {name: p.clone() for name, p in made.net.named_parameters()}
        assert made.learn(remembered(walk([5.0], cut=True))) == 0.0
        assert all(torch.equal(p, before[name]) for name, p in made.net.named_parameters())


class TestTargetNetwork:
    def test_at_the_start_it_is_a_copy_of_utilities_and_mixer(self) -> None:
        made = fit(team_value(MonotonicMixer(2, 2, 4, 8)))
        assert same_bits(dict(made.target), dict(made.net.state_dict()))
        assert any(name.startswith("mixer.") for name in made.target)
        assert any(name.startswith("utilities.") for name in made.target)
        own = made.net.state_dict()
        assert all(made.target[name].data_ptr() != own[name].data_ptr() for name in own)

    def test_it_lags_and_follows_softly(self) -> None:
        made = fit(team_value(MonotonicMixer(2, 2, 4, 8)), updates=1, follow={"name": "soft", "tau": 0.25})
        replay = remembered(walk([1.0, 2.0]))
        made.learn(replay)
        before, weight = {k: v.clone() for k, v in made.target.items()}, "utilities.agents.0.2.bias"
        made.learn(replay)
        online = made.net.state_dict()[weight]
        assert not torch.equal(made.target[weight], online)
        torch.testing.assert_close(made.target[weight], 0.75 * before[weight] + 0.25 * online)

    def test_a_periodic_target_is_constant_between_copies(self) -> None:
        made = fit(team_value(SumMixer()), updates=1, follow={"name": "periodic", "every": 3})
        replay, weight, same = remembered(walk([1.0, 2.0])), "utilities.agents.0.2.bias", []
        found = []
        for _ in range(6):
            made.learn(replay)
            found.append(made.target[weight].item())
            same.append(made.target[weight].item() == made.net.state_dict()[weight].item())
        assert same == [False, False, True, False, False, True]
        assert found[0] == found[1] == 0.0
        assert found[2] == found[3] == found[4] != found[5]

    def test_td_uses_the_target_network(self) -> None:
        made, batch = fit(team_value(MonotonicMixer(2, 2, 4, 8)), target="td"), joined([walk([1.0, 2.0])])
        before = made.goal(batch).value_NK
        with torch.no_grad():
            for parameter in made.net.parameters():
                parameter.add_(1.0)
        assert torch.equal(made.goal(batch).value_NK, before)
        for part in ("mixer.value.2.bias", "utilities.agents.1.2.bias"):
            made.target[part] = made.target[part] + 1.0
            changed = made.goal(batch).value_NK
            assert not torch.equal(changed, before)
            before = changed


class TestResume:
    def test_a_resumed_fit_is_bitwise_identical(self) -> None:
        replay = remembered(*(walk([1.0, float(k)], seed=k) for k in range(12)))
        settings: dict[str, Any] = {"updates": 5, "batch": 4, "target": "td", "lam": 0.5}
        through = fit(team_value(MonotonicMixer(2, 2, 4, 8)), **settings)
        through.learn(replay)
        kept = through.state()
        through.learn(replay)
        other = fit(team_value(MonotonicMixer(2, 2, 4, 8), seed=99), **settings)
        other.load_state(kept)
        other.learn(replay)
        assert same_bits(other.state(), through.state())

    def test_every_update_draws_another_batch(self) -> None:
        # Each episode is of one reward: its Monte Carlo target tells which one an update was shown.
        replay, shown = remembered(*(walk([float(k)], seed=k) for k in range(20))), []
        made = fit(team_value(SumMixer()), updates=20, batch=1)
        goal = made.goal

        def spy(batch: Fitted) -> Target:
            shown.append(float(batch.reward_NK))
            return goal(batch)

        made.goal = spy  # type: ignore[method-assign]
        made.learn(replay)
        assert len(set(shown)) > 8

    def test_what_is_kept_does_not_move_with_the_fit(self) -> None:
        replay = remembered(walk([1.0, 2.0]))
        made = fit(team_value(SumMixer()))
        made.learn(replay)
        kept = made.state()
        network = kept["network"]
        assert isinstance(network, dict)
        before = {name: tensor.clone() for name, tensor in network.items()}
        made.learn(replay)
        assert same_bits(network, before)


def test_what_is_explained_by_hand() -> None:
    """Two tasks: returns ∓1 and ∓2 from their task's mean, predictions ∓½ and ∓2. Then one of which nothing is foreseen."""
    foresight = Foresight()
    returns, predicted = torch.tensor([0.0, 2.0, 10.0, 14.0]), torch.tensor([0.0, 1.0, 3.0, 7.0])
    assert foresight.see(returns, predicted, torch.tensor([0, 0, 1, 1]), 2) == pytest.approx(1 - 0.5 / 10)
    assert foresight.see(returns[:2], torch.zeros(2), torch.tensor([0, 0]), 1) == pytest.approx(0.0)
    assert foresight.weight == pytest.approx(1 - (0.8 * 0.5 + 2) / (0.8 * 10 + 2))
