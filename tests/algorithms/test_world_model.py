"""The loss on observations beside a policy loss (ECHO): by hand, in expectation, and in a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experiments.tables import Words
from tests.support.episodes import episode, group, turn
from tests.support.expected import ARMS, MARK, Game, Tables, expected_update
from tests.support.tiny import sections, team_of

from kapelle.algorithm import Credit, Outputs, Targets, algorithm_class
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.rows import Signals, turns_of
from kapelle.training.collate import observed_samples, policy_samples
from kapelle.training.trainer import Trainer
from kapelle.types import Task


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    # Generated: ρ = 1 and A = −2, in completions of two tokens and of one. Observed: nll 1, 2 and 5 in messages of two and of one.
    [
        ("token_mean", (6 + 0.5 * 8) / 3),
        ("sequence_mean", (2 + 2 + 0.5 * (1.5 + 5)) / 2),
        ("sequence_sum", (6 + 0.5 * 8) / 10 / 2),
    ],
)
def test_observations_are_aggregated_like_completions_and_leave_the_divisor(
    aggregation: str, expected: float
) -> None:
    logp_K = torch.tensor([-1.0, -3, -2, -1, -2, -5], requires_grad=True)
    generated_K = torch.tensor([1.0, 1, 1, 0, 0, 0])
    columns = {"behaviour": logp_K.detach() * generated_K, "advantage": -2 * generated_K}
    targets = Targets(
        torch.tensor([0, 0, 1, 2, 2, 3]), 4, generated_K, columns, observed_S=torch.tensor([0.0, 0, 1, 1])
    )
    settings = {"world_model": 0.5, "aggregation": aggregation, "constant": 10}
    found = SurrogateConfig.model_validate(settings).build()(Outputs(logp_K), targets)
    assert (found.total / found.weight).item() == pytest.approx(expected)
    total, weight = found.metrics["nll_heard"]
    assert (float(total), float(weight)) == (8.0, 3.0)
    # Without observations in the batch, or without the weight, it is the policy loss.
    alone = SurrogateConfig.model_validate({**settings, "world_model": 0.0}).build()(Outputs(logp_K), targets)
    assert found.weight.item() == alone.weight.item()
    assert "nll_heard" not in alone.metrics


def test_observed_tokens_are_what_the_next_prompt_adds() -> None:
    first = turn("a", 0, prompt_ids=(5, 6), completion_ids=(20, 21))
    other = turn("b", 1, 1, prompt_ids=(5,), completion_ids=(40,))
    second = turn("a", 2, 1, prompt_ids=(5, 6, 20, 21, 7, 8, 9), completion_ids=(30,))
    afresh = turn("b", 3, 1, prompt_ids=(5, 1), completion_ids=(41,))
    turns = turns_of([group(episode(first, other, second, afresh))])
    credit = {key: Credit(torch.ones(len(each.completion_ids))) for key, each in turns}
    policies = policy_samples(turns, team_of("a", "b"), credit, Signals())
    (sample,) = observed_samples(turns, policies)
    assert ([sample.tokens[k] for k in sample.targets], sample.observed) == ([7, 8, 9], True)
    assert sample.mask is not None
    assert sample.mask.tolist() == [0.0] * 3
    assert {name: column.tolist() for name, column in sample.columns.items()} == {
        "behaviour": [0.0] * 3,
        "advantage": [0.0] * 3,
    }
    # A policy none of whose turns is trained on in this step learns nothing from what it observes either.
    of_b = {key: each for key, each in policies.items() if each.learner == "b"}
    assert observed_samples(turns, of_b) == []


class Tool(Game):
    """After each word, a tool answers with the word that follows it."""

    def prompt(self, said: list[Words]) -> Words:  # type: ignore[override]
        """Return the conversation so far."""
        return (MARK, *(token for (word,) in said for token in (word, (word + 1) % 3)))

    def start(self, prefix: Words) -> list[float]:
        """Return the chances of words, and any answers of the tool."""
        return self.chance(()) if len(prefix) % 2 else [0.2, 0.3, 0.5]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {"group_size": 2, "scale": "none"}),
        ("grpo", {"group_size": 2, "loss": {"aggregation": "sequence_mean", "kind": "cispo"}}),
        ("ippo", {"loss": {"kl_coefficient": 0.1}}),
        ("happo", {}),
    ],
)
def test_the_expected_update_adds_the_gradient_of_the_log_likelihood(
    name: str, settings: dict[str, Any]
) -> None:
    game = Tool(("a", "a"), lambda said: {"a": float(said[1] == (1,))}, ARMS)
    kind: Any = algorithm_class(name)

    def update(world_model: float) -> Tables:
        loss = {**settings.get("loss", {}), "world_model": world_model}
        return expected_update(kind.model_validate({**settings, "epochs": 1, "loss": loss}).build(), game)[0]

    tables = update(0.25)
    likelihood = torch.zeros((), dtype=torch.float64)
    for outcome, count in game.outcomes():
        second = game.episode(outcome, Task("t", "")).turns[1]
        likelihood = likelihood + count / 16 * tables.log_probs("a", second.prompt_ids, [2]).sum()
    # One observed token for two that the agent writes.
    (direction,) = torch.autograd.grad(0.25 * likelihood / 2, tables.logits["a"])
    added = tables.ascent["a"] - update(0.0).ascent["a"]
    torch.testing.assert_close(added, direction, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_learns_what_its_partner_says() -> None:
    found: dict[float, list[list[float]]] = {}
    for weight in (0.0, 1.0):
        run = Trainer(
            **sections(
                algorithm={"name": "grpo", "group_size": 2, "loss": {"world_model": weight}},
                workflow={"name": "debate", "rounds": 2, "reply": "{answers}"},
                team={"agents": 2, "sharing": "shared", "sampling": {"max_tokens": 3}},
                optimizer={"lr": 3e-2},
                training={"steps": 8, "tasks_per_step": 2},
            )
        )
        rows = [step.metrics for step in run.steps()]
        assert all(row["parity/max"] < 1e-3 for row in rows)
        found[weight] = [[row[key] for key in row if key.startswith("nll_heard/")] for row in rows]
    assert found[0.0] == [[]] * 8
    (first,), *_, (last,) = found[1.0]
    assert last < first - 1.0
