"""Credit by VDN and QMIX: identities, ranks of contributions, errors, and exact resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from tests.support.episodes import episode, group, turn
from tests.support.tiny import same_bits, team_of

from kapelle.algorithm import Credit, CreditMemory
from kapelle.algorithms.grpo import GRPO
from kapelle.algorithms.qmix import QMIX
from kapelle.algorithms.value_decomposition.credit_mixer import MixedCredit
from kapelle.algorithms.value_decomposition.mixer_fit import Rounds
from kapelle.algorithms.vdn import VDN
from kapelle.errors import ConfigError
from kapelle.rows import Embedding, Signals, TurnKey, turns_of
from kapelle.runs import checkpoint
from kapelle.team import Team
from kapelle.types import Group, Task

WIDTH, WORDS = 16, 6
BOTH = pytest.mark.parametrize("settings", [VDN, QMIX])


def memory(settings: type[VDN | QMIX], agents: str = "ab", **over: Any) -> CreditMemory:
    fit = {"min_fill": 1, **over.pop("fit", {})}
    make = settings.model_validate({"credit_warmup_steps": 0, "fit": fit, **over}).build().memory
    assert make is not None
    return make(team_of(*agents), 0)


class Step(NamedTuple):
    groups: list[Group]
    signals: Signals
    word: Mapping[TurnKey, int]
    """Which of the six words each turn is."""


def play(
    number: int,
    reward: Callable[[Sequence[int]], float],
    agents: str = "abc",
    tasks: int = 6,
    size: int = 8,
    noise: float = 0.0,
) -> Step:
    """One round, all at once: agents say words drawn evenly; a word has a vector, seen with a little noise."""
    generator = torch.Generator().manual_seed(number)
    vector = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(99))
    groups, embedding, word = [], {}, {}
    for g in range(tasks):
        prompt = torch.randn(WIDTH, generator=generator)
        episodes = []
        for e in range(size):
            words = torch.randint(0, WORDS, (len(agents),), generator=generator).tolist()
            for i, w in enumerate(words):
                key = TurnKey(g, e, i)
                word[key] = w
                said = vector[w] + 0.05 * torch.randn(WIDTH, generator=generator)
                embedding[key] = Embedding(prompt, said)
            paid = reward(words) + noise * float(torch.randn((), generator=generator))
            turns = [turn(agent, i, 2, completed_before=0) for i, agent in enumerate(agents)]
            episodes.append(episode(*turns, task=Task(f"t{g}", "q"), rewards=dict.fromkeys(agents, paid)))
        groups.append(group(*episodes))
    return Step(groups, Signals(embedding=embedding, step=number), word)


def advantage(credit: Mapping[TurnKey, Credit], key: TurnKey) -> float:
    found = credit[key].advantage_T
    assert (found == found[0]).all()
    return float(found[0])


GIVES = ((1.0, 0.6, 0.2, -0.2, -0.6, -1.0), (0.3, -0.3, 0.18, -0.18, 0.06, -0.06), (0.0,) * WORDS)
"""What each agent's words add to the team's return; those of the third add nothing."""


def additive(words: Sequence[int]) -> float:
    return sum(GIVES[i][w] for i, w in enumerate(words))


def size(step: Step, credit: Mapping[TurnKey, Credit], agent: int) -> float:
    """Root mean square of an agent's credit."""
    found = torch.tensor([advantage(credit, key) for key in step.word if key.turn == agent])
    return float(found.square().mean().sqrt())


class TestOneAgent:
    """Where VDN with one agent is what other algorithms are."""

    def test_during_the_warm_up_it_is_bitwise_grpo_without_the_std(self) -> None:
        step = play(1, lambda words: float(words[0]), agents="a")
        given = memory(VDN, "a", credit_warmup_steps=1)(step.groups, step.signals)
        expected = GRPO.model_validate({"scale": "none"}).build().credit
        assert expected is not None
        other = expected(step.groups, step.signals)
        assert all(torch.equal(given[key].advantage_T, other[key].advantage_T) for key in other)

    def test_its_modelled_credit_is_its_own_utility_above_the_mean_of_its_group(self) -> None:
        # Q_tot = Q_1, so nothing but its own advantage is left: whatever the utility is, also before it is right.
        step = play(2, lambda words: float(words[0]), agents="a", tasks=3, size=4)
        made = memory(VDN, "a", credit="modelled", fit={"updates": 1})
        assert isinstance(made, MixedCredit)
        before = play(1, lambda words: float(words[0]), agents="a", tasks=3, size=4)
        made(before.groups, before.signals)
        assert made.fit is not None
        saw = torch.stack([step.signals.embedding[key].observation_D for key in step.word])
        said = torch.stack([step.signals.embedding[key].action_D for key in step.word])
        rounds = Rounds(saw[:, None], said[:, None], torch.ones(12, 1), saw)
        utility = made.fit.net(rounds).utility_BA.detach().view(3, 4)
        credit = made(step.groups, step.signals)
        expected = (utility - utility.mean(1, keepdim=True)).flatten().tolist()
        found = [advantage(credit, key) for key in step.word]
        assert found == pytest.approx(expected, abs=1e-6)
        assert max(map(abs, found)) > 0

    @pytest.mark.slow
    def test_whatever_it_has_learned_it_is_grpo_without_the_std(self) -> None:
        # No one else is there to explain the return: B is the same for all episodes of a task.
        made = memory(VDN, "a")
        steps = [play(number, lambda words: float(words[0]), agents="a") for number in (1, 2, 3)]
        step, given = steps[-1], [made(each.groups, each.signals) for each in steps][-1]
        assert made.metrics()["credit_weight"] > 0.5
        expected = GRPO.model_validate({"scale": "none"}).build().credit
        assert expected is not None
        other = expected(step.groups, step.signals)
        for key in other:
            torch.testing.assert_close(given[key].advantage_T, other[key].advantage_T, atol=1e-5, rtol=0)


class TestPay:
    def test_penalties_are_the_turn_s_own(self) -> None:
        # Two episodes with the same return; in the first `a` is cut at its limit, which costs 1.
        cut = episode(turn("a", 0, finish_reason="length"), turn("b", 1), rewards={"a": 1.0, "b": 1.0})
        other = episode(turn("a", 0), turn("b", 1), rewards={"a": 1.0, "b": 1.0})
        groups = [group(cut, other)]
        zeros = Embedding(torch.zeros(3), torch.zeros(3))
        signals = Signals(embedding={key: zeros for key, _ in turns_of(groups)})
        for warmup in (0, 1):
            made = memory(VDN, credit_warmup_steps=warmup, penalties={"no_stop": 1.0}, fit={"updates": 2})
            credit = made(groups, signals)
            found = [advantage(credit, TurnKey(0, e, i)) for e in (0, 1) for i in (0, 1)]
            assert found == pytest.approx([-0.5, 0.0, 0.5, 0.0])

    def test_influence_is_the_turn_s_own_too_and_confidence_a_gain(self) -> None:
        def debate(after: float, logprob: float) -> Any:
            turns = [
                turn("a", 0, 1, completed_before=0, score=0.0, logprobs=(logprob,)),
                turn("b", 1, 1, completed_before=0, score=0.0),
            ]
            return episode(*turns, turn("a", 2, 1, score=0.0), turn("b", 3, 1, score=after))

        groups = [group(debate(1.0, -1.0), debate(0.0, -3.0))]
        zeros = Embedding(torch.zeros(3), torch.zeros(3))
        signals = Signals(embedding={key: zeros for key, _ in turns_of(groups)})
        made = memory(VDN, credit_warmup_steps=1, umad={"influence": 0.5, "relative": 1.0})
        credit = made(groups, signals)
        # η = ½ in one of two episodes: ∓¼; NLL 1 and 3 against b's 1 nat: gains 1 and e^−2.
        assert advantage(credit, TurnKey(0, 0, 0)) == pytest.approx(0.25)
        assert advantage(credit, TurnKey(0, 1, 0)) == pytest.approx(-0.25 * 0.1353353)
        assert advantage(credit, TurnKey(0, 0, 1)) == advantage(credit, TurnKey(0, 1, 3)) == 0.0

    def test_the_warm_up_uses_the_return_from_each_round_on(self) -> None:
        # Rounds pay 2 and 4 in one episode and nothing in the other; γ = ½: 2 + ½·4 = 4 and 4, halves of each.
        paid = episode(turn("a", 0, reward=2.0), turn("a", 1), rewards={"a": 4.0})
        unpaid = episode(turn("a", 0), turn("a", 1), rewards={"a": 0.0})
        groups = [group(paid, unpaid)]
        zeros = Embedding(torch.zeros(3), torch.zeros(3))
        signals = Signals(embedding={key: zeros for key, _ in turns_of(groups)})
        credit = memory(VDN, "a", credit_warmup_steps=1, gamma_turn=0.5)(groups, signals)
        found = [advantage(credit, TurnKey(0, e, k)) for e in (0, 1) for k in (0, 1)]
        assert found == [2.0, 2.0, -2.0, -2.0]

    def test_before_the_first_fit_the_return_is_used(self) -> None:
        step = play(1, additive)
        made = memory(VDN, "abc", fit={"min_fill": 49})
        credit = made(step.groups, step.signals)
        assert "mixer_loss" not in made.metrics()
        assert all(advantage(credit, key._replace(turn=0)) == advantage(credit, key) for key in step.word)
        assert [made.metrics()[f"credit_share/{agent}"] for agent in "abc"] == pytest.approx([1 / 3] * 3)
        again = play(2, additive)
        made(again.groups, again.signals)
        assert "mixer_loss" in made.metrics()


def checked(settings: VDN | QMIX, team: Team) -> None:
    for check in settings.build().checks:
        check(team)


class TestRefused:
    @BOTH
    def test_what_leaves_nothing_to_decompose(self, settings: type[VDN | QMIX]) -> None:
        with pytest.raises(ValidationError, match="team_reward: individual"):
            settings.model_validate({"team_reward": "individual"})
        with pytest.raises(ValidationError, match="greater than or equal to 2"):
            settings.model_validate({"group_size": 1})
        with pytest.raises(ValidationError, match=r"fit\.capacity"):
            settings.model_validate({"fit": {"capacity": 10, "min_fill": 11}})

    @BOTH
    def test_a_device_that_is_not_there(self, settings: type[VDN | QMIX]) -> None:
        for name in ("cuda:99", "abacus"):
            with pytest.raises(ConfigError, match=f"fit.device: {name}"):
                checked(settings.model_validate({"fit": {"device": name}}), team_of("a", "b"))


class TestResume:
    @pytest.mark.sample(2)
    @BOTH
    def test_a_memory_from_a_checkpoint_is_bitwise_identical(
        self, settings: type[VDN | QMIX], tmp_path: Path
    ) -> None:
        chosen: dict[str, Any] = {"fit": {"target": "td", "lam": 0.5, "updates": 4, "capacity": 100}}
        through, other = memory(settings, "abc", **chosen), memory(settings, "abc", **chosen)
        for number in (1, 2):
            step = play(number, additive)
            through(step.groups, step.signals)
        folder = checkpoint.save(tmp_path, 2, {"memory": through.state()})
        other.load_state(checkpoint.load(folder)["memory"])
        assert same_bits(other.state(), through.state())
        torch.manual_seed(123)
        for number in (3, 4):
            step = play(number, additive)
            one, two = through(step.groups, step.signals), other(step.groups, step.signals)
            assert all(torch.equal(one[key].advantage_T, two[key].advantage_T) for key in one)
        assert same_bits(other.state(), through.state())
        assert other.metrics() == through.metrics()

    def test_the_global_generator_is_left_alone(self) -> None:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        step = play(1, additive)
        memory(QMIX, "abc")(step.groups, step.signals)
        assert torch.equal(torch.rand(3), expected)
