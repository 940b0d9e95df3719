"""Data parallelism is one new folder: a sketch of it, chosen in a recipe, learns what one process learns.

Nothing but the sketch knows that there are two processes: not the loop, the trainer, checkpoints or the algorithms.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.algorithms.test_every_algorithm import SETTINGS
from tests.engines.train.two_processes import DataParallel, Rank
from tests.support.tiny import draw_samples, frozen_copy, same_bits, sections, with_behaviour
from torch import Tensor

from kapelle import Trainer
from kapelle.algorithm import BUILTIN_ALGORITHMS, algorithm_class
from kapelle.engines.train import bundles
from kapelle.errors import EngineError, NumericsError
from kapelle.runtime.interrupts import StopRequested

SKETCH = {"name": "tests.engines.train.two_processes:TwoProcesses"}
ROUNDING = 1e-6

Weights = dict[str, Mapping[str, Tensor]]


def learned(trainer: Trainer) -> Weights:
    names = [*trainer.team.trained, *(c.name for c in trainer.team.critics.values() if c.trained)]
    return {name: frozen_copy(trainer.engine.weights(name)) for name in names}


def alone(steps: int = 3, **over: Any) -> Weights:
    with Trainer(**sections(**over)) as trainer:
        list(trainer.steps(steps))
        return learned(trainer)


def furthest(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(
        float((tensor - other[name][key]).abs().max())
        for name, weights in one.items()
        for key, tensor in weights.items()
    )


SOLO = {"agents": 1, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 4}}
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"training": {"steps": 3, "tasks_per_step": 3}},
    "ppo, several steps in an update": {
        "algorithm": {"name": "ppo", "epochs": 2, "minibatches": 2},
        "team": SOLO,
        "workflow": {"name": "solo"},
        "training": {"steps": 3, "tasks_per_step": 5},
    },
    "happo": {"algorithm": {"name": "happo"}, "training": {"steps": 3, "tasks_per_step": 3}},
    "dpo, whose loss compares two episodes": {
        "algorithm": {"name": "dpo", "group_size": 3},
        "training": {"steps": 3, "tasks_per_step": 3},
    },
    "a rank without rows": {
        "team": SOLO,
        "workflow": {"name": "solo"},
        "training": {"steps": 3, "tasks_per_step": 1},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_learn_what_one_learns(name: str) -> None:
    over = {"optimizer": {"lr": 1e-2, "eps": 1e-4}, **RUNS[name]}
    begun = alone(0, **over)
    with Trainer(**sections(train_engine=SKETCH, **over)) as trainer:
        engine = trainer.engine
        assert isinstance(engine, DataParallel)
        list(trainer.steps(3))
        both = learned(trainer)
        rows = list(zip(engine.sharing.rows, engine.ask(1, "rows"), strict=True))
        assert same_bits(engine.ask(1, "state"), engine.state())
    assert furthest(both, begun) > 1e-3
    assert furthest(both, alone(**over)) <= ROUNDING
    if name == "a rank without rows":
        assert {min(each) for each in rows} == {0}
    else:
        assert any(ours and theirs and ours != theirs for ours, theirs in rows)


def test_what_a_loss_compares_stays_on_one_rank() -> None:
    shares = [Rank(rank, 2).share(PAIRS) for rank in range(2)]
    assert sorted(map(id, [*shares[0], *shares[1]])) == sorted(map(id, PAIRS))
    for bundle in range(3):
        assert [sum(s.bundle == bundle for s in share) for share in shares] in ([2, 0], [0, 2])


PAIRS = [replace(s, bundle=k // 2) for k, s in enumerate(draw_samples(["a"], [(3, 2)] * 6))]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["rank 0", "rank 1", "a stop"])
def test_what_breaks_off_in_one_process_leaves_none_behind(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is no number on one rank alone, or a run that is to stop: both break off, and both can go on."""
    with Trainer(**sections(train_engine=SKETCH, **RUNS["grpo"])) as trainer:
        engine, objective = trainer.engine, trainer._loop._objective
        assert isinstance(engine, DataParallel)
        samples = with_behaviour(engine, draw_samples(["agent_0"], [(3, 2), (4, 2)]))
        bad = [
            replace(s, columns={**s.columns, "advantage": s.columns["advantage"] * float("nan")})
            if where == f"rank {k}"
            else s
            for k, s in enumerate(samples)
        ]
        with monkeypatch.context() as patched:
            if where == "a stop":
                patched.setattr(bundles, "stop_if_asked", stop)
            with pytest.raises(BaseException, match=r"not finite|stop") as raised:
                engine.update(bad, objective)
        assert isinstance(raised.value, NumericsError | EngineError | StopRequested)
        assert engine.versions["agent_0"] == 0
        engine.update(samples, objective)
        assert engine.versions["agent_0"] == 1
        assert same_bits(engine.ask(1, "state"), engine.state())


def stop() -> None:
    raise StopRequested("stop")


@pytest.mark.parametrize("name", BUILTIN_ALGORITHMS)
def test_the_losses_of_every_algorithm_go_to_another_process(name: str) -> None:
    row = algorithm_class(name)(**SETTINGS.get(name, {})).build()
    assert pickle.dumps((row.policy_loss, row.critic and row.critic.loss))
