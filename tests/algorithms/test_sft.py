"""Supervised fine-tuning: losses on completions and on next observations, weighted by hand."""

from __future__ import annotations

import pytest
import torch
from tests.support.episodes import episode, group, turn
from tests.support.tiny import sections, team_of

from kapelle.algorithm import Outputs, Targets
from kapelle.algorithms.sft import negative_log_likelihood
from kapelle.training.collate import demonstrated_samples
from kapelle.training.trainer import Trainer

# a says 20 21, then hears 7 8 9 and says 30; b says 40 in between, and later begins a fresh conversation.
FIRST = turn("a", 0, prompt_ids=(5, 6), completion_ids=(20, 21))
OTHER = turn("b", 1, 1, prompt_ids=(5,), completion_ids=(40,))
SECOND = turn("a", 2, 1, prompt_ids=(5, 6, 20, 21, 7, 8, 9), completion_ids=(30,))
FRESH = turn("b", 3, 1, prompt_ids=(5, 1), completion_ids=(41,))
GROUPS = [group(episode(FIRST, OTHER, SECOND, FRESH))]


def test_the_next_observation_is_what_the_next_prompt_adds() -> None:
    samples = demonstrated_samples(GROUPS, team_of("a", "b"), 0.5)
    asked = [
        (
            [s.tokens[place] for place in s.targets],
            s.columns["weight"].tolist(),
            s.observed,
        )
        for s in samples
    ]
    assert asked == [
        ([20, 21], [1, 1], False),
        ([40], [1], False),
        ([30], [1], False),
        ([7, 8, 9], [0.5] * 3, True),
        ([41], [1], False),
    ]


def test_without_a_world_model_there_is_no_observation_loss() -> None:
    samples = demonstrated_samples(GROUPS, team_of("a", "b"), 0.0)
    assert [len(s.targets) for s in samples] == [2, 1, 1, 1]
    assert all(not s.columns for s in samples)


def test_the_weighed_mean_by_hand() -> None:
    # Said: nll 1 and 3; heard: nll 2, 4 and 3, weight ½: (1 + 3 + ½·9) / (2 + ½·3) = 17/7.
    columns = {"weight": torch.tensor([1, 1, 0.5, 0.5, 0.5])}
    heard_S = torch.tensor([0.0, 0, 1, 1, 1])
    targets = Targets(torch.arange(5), 5, torch.ones(5), columns, observed_S=heard_S)
    loss = negative_log_likelihood(Outputs(torch.tensor([-1.0, -3, -2, -4, -3])), targets)
    assert float(loss.total / loss.weight) == pytest.approx(17 / 7)
    means = {name: float(total / weight) for name, (total, weight) in loss.metrics.items()}
    assert means == {"nll": 2.0, "nll_heard": 3.0}


@pytest.mark.long
@pytest.mark.slow
def test_a_partner_can_be_foreseen() -> None:
    """The partner always says the same: after some steps it is expected, and not without a world model."""
    found = {}
    for weight in (0.0, 1.0):
        run = Trainer(
            **sections(
                algorithm={"name": "sft", "world_model": weight},
                workflow={"name": "debate", "rounds": 2, "reply": "{answers}"},
                team={"agents": 2, "sharing": "shared"},
                optimizer={"lr": 3e-2},
                training={"steps": 25, "tasks_per_step": 4},
            )
        )
        groups = list(run.steps())[-1].groups
        new_messages = [s for s in demonstrated_samples(groups, run.team, 1.0) if s.observed]
        found[weight] = float(torch.cat(run.engine.score(new_messages)).mean())
    assert found[1.0] > found[0.0] + 1.0
