"""The expected gradient of VDN's and QMIX's credit, enumerated, and the members of each baseline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.episodes import episode, group, turn
from tests.support.tiny import frozen_copy, lora_policies, same_bits, team_of, train_engine
from torch import Tensor

from kapelle.algorithm import Credit
from kapelle.algorithms.qmix import QMIX
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.algorithms.value_decomposition.credit_mixer import MixedCredit
from kapelle.algorithms.value_decomposition.mixer_fit import OwnUtilities
from kapelle.algorithms.vdn import VDN
from kapelle.engines.train.protocol import Objective
from kapelle.rows import Embedding, Signals, TurnKey, turns_of
from kapelle.training.collate import policy_samples
from kapelle.types import Group, Task

BOTH = pytest.mark.parametrize("settings", [VDN, QMIX])
WIDTH, WORDS = 4, 3
F64 = torch.float64
PAYS = torch.tensor([[1.0, -0.5, 0.2], [0.0, 0.7, -1.0], [0.4, 0.1, 2.0]], dtype=F64)
"""The team's reward by the words of `a` and `b`: no sum."""


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


WORD = normal(2, WORDS, WIDTH, seed=7).float()
HEARD = normal(WORDS, WIDTH, seed=8).float()
"""What an agent sees that has heard a word of `a`."""


def fixed(settings: type[VDN | QMIX], credit: str = "difference", width: int = WIDTH) -> MixedCredit:
    """Credit by networks that are drawn at random and never fitted."""
    fit = {"min_fill": 10**6, "capacity": 10**6}
    row = settings.model_validate({"credit_warmup_steps": 0, "credit": credit, "fit": fit}).build()
    assert row.memory is not None
    made = row.memory(team_of("a", "b"), 0)
    assert isinstance(made, MixedCredit)
    made.fit = made.new_fit(width)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.fit.net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def played(task: int, words: Sequence[tuple[int, int]], chain: bool, seed: int = 0) -> Any:
    """One task's episodes in which `a` and `b` say these words, `b` after `a` or at the same moment."""
    prompt = normal(WIDTH, seed=20 + seed).float()
    episodes, embedding = [], {}
    for e, (one, other) in enumerate(words):
        turns = turn("a", 0, 2, completed_before=0), turn("b", 1, 2, completed_before=int(chain))
        paid = float(PAYS[one, other])
        episodes.append(episode(*turns, task=Task(f"t{task}", "q"), rewards={"a": paid, "b": paid}))
        embedding[TurnKey(task, e, 0)] = Embedding(prompt, WORD[0, one])
        embedding[TurnKey(task, e, 1)] = Embedding(HEARD[one] if chain else prompt, WORD[1, other])
    return group(*episodes), embedding


def advantages(made: MixedCredit, *tasks: Any) -> dict[TurnKey, Credit]:
    """What is credited with w = 0.7, whatever was seen before."""
    made.foresight.load_state({"error": 0.3, "spread": 1.0})
    groups = [each for each, _ in tasks]
    embedding = {key: seen for _, found in tasks for key, seen in found.items()}
    given = made(groups, Signals(embedding=embedding, step=9))
    assert made.metrics()["credit_weight"] == pytest.approx(0.7)
    return dict(given)


def expected_gradient(made: MixedCredit, logits: Sequence[Tensor], chain: bool, size: int) -> list[Tensor]:
    """Σ over all that a group of this size may say: chance · mean over its episodes of Σ_i A_i·∇log π_i."""
    outcomes = list(itertools.product(range(WORDS), range(WORDS)))
    logp_a, logp_b = (x.log_softmax(-1) for x in logits)
    total = torch.zeros((), dtype=F64)
    for words in itertools.product(outcomes, repeat=size):
        given = advantages(made, played(0, words, chain))
        said = [(logp_a[one], logp_b[one if chain else 0, other]) for one, other in words]
        chance = torch.stack([a + b for a, b in said]).sum().exp().detach()
        for e, (a, b) in enumerate(said):
            for i, logp in enumerate((a, b)):
                total = total + chance * float(given[TurnKey(0, e, i)].advantage_T[0]) * logp / size
    return list(torch.autograd.grad(total, list(logits)))


def true_gradient(logits: Sequence[Tensor], chain: bool) -> list[Tensor]:
    a, b = (x.softmax(-1) for x in logits)
    joint = a[:, None] * (b if chain else b[:1].expand(WORDS, WORDS))
    return list(torch.autograd.grad((joint * PAYS).sum(), list(logits)))


def policies() -> list[Tensor]:
    return [normal(WORDS, seed=1).requires_grad_(), normal(WORDS, WORDS, seed=2).requires_grad_()]


@BOTH
@pytest.mark.parametrize("chain", [False, True], ids=["together", "chain"])
class TestExpectedGradient:
    @pytest.mark.sample(3)
    @pytest.mark.slow
    def test_it_is_that_of_the_team_s_return(self, settings: type[VDN | QMIX], *, chain: bool) -> None:
        # Less one of n for the mean of a group that holds the episode itself, as Dr.GRPO's.
        logits = policies()
        found = expected_gradient(fixed(settings), logits, chain, size=2)
        for one, other in zip(found, true_gradient(logits, chain), strict=True):
            torch.testing.assert_close(one, other / 2, atol=2e-6, rtol=0)
            assert other.abs().max() > 0.02

    @pytest.mark.sample(3)
    @pytest.mark.slow
    def test_credit_from_q_alone_has_another_gradient(
        self, settings: type[VDN | QMIX], *, chain: bool
    ) -> None:
        logits = policies()
        found = expected_gradient(fixed(settings, "modelled"), logits, chain, size=2)
        assert (found[0] - true_gradient(logits, chain)[0] / 2).abs().max() > 0.05


WORDS_SAID = ((0, 1), (2, 1), (1, 0), (2, 2))


def updated(credit: dict[TurnKey, Credit], of: Group) -> dict[str, dict[str, Tensor]]:
    """The adapters after one optimiser step on the first task's turns."""
    team, engine = team_of("a", "b"), train_engine(lora_policies("a", "b"))
    own = {key: given for key, given in credit.items() if key.group == 0}
    samples = list(policy_samples(turns_of([of]), team, own, Signals()).values())
    engine.update(samples, Objective(SurrogateConfig().build(), parity=False))
    return {name: frozen_copy(engine.weights(name)) for name in ("a", "b")}


@pytest.mark.parametrize("credit", ["difference", "modelled"])
def test_an_update_on_a_task_does_not_know_the_step_s_other_tasks(credit: str) -> None:
    first = played(0, WORDS_SAID, chain=False)
    other = played(1, ((1, 1), (1, 1), (0, 0), (1, 2)), chain=False, seed=5)
    alone = updated(advantages(fixed(QMIX, credit), first), first[0])
    beside = updated(advantages(fixed(QMIX, credit), first, other), first[0])
    assert same_bits(alone, beside)


def test_the_baseline_is_of_the_agents_own_task_by_hand() -> None:
    # VDN, two episodes of a task: B_a is Q_b plus the mean of the other episode's Q_a, which is the same for both when
    # compared with one another. A_a = ½(R_1 − R_2) − w·½(Q_b1 − Q_b2), w = 0.7.
    words = ((0, 1), (2, 2))
    made = fixed(VDN)
    assert made.fit is not None
    saw = played(0, words, chain=False)[1][TurnKey(0, 0, 0)].observation_D
    utilities = made.fit.net.utilities
    assert isinstance(utilities, OwnUtilities)
    net = utilities.agents[1]
    with torch.no_grad():
        q_b = [float(net(torch.cat([saw, WORD[1, other]]))) for _, other in words]
    given = advantages(made, played(0, words, chain=False))
    paid = [float(PAYS[one, other]) for one, other in words]
    expected = (paid[0] - paid[1]) / 2 - 0.7 * (q_b[0] - q_b[1]) / 2
    assert float(given[TurnKey(0, 0, 0)].advantage_T[0]) == pytest.approx(expected, abs=1e-6)
    assert float(given[TurnKey(0, 1, 0)].advantage_T[0]) == pytest.approx(-expected, abs=1e-6)
