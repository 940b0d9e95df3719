"""The one loop: that what acted is what learns, and what happens when it is not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from tests.support.plugins import Digest
from tests.support.tiny import SIZE, frozen_copy, same_bits, sections, stir, tiny_model
from torch import Tensor

from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import Completion, Renderer, Request
from kapelle.environment import Environment
from kapelle.errors import ContextError, ParityError, TrainingHalted
from kapelle.models.weights import weights_hash
from kapelle.setup.recipe import resolve
from kapelle.training.selection import training_tasks
from kapelle.training.trainer import Trainer
from kapelle.types import Task

DEBATE = {
    "agents": 3,
    "lora": {"rank": 2, "alpha": 4.0},
    "sampling": {"max_tokens": 6, "temperature": 0.7},
}


def trainer(**over: Any) -> Trainer:
    """A trainer on a sharp model whose adapters already differ."""
    return stirred(Trainer(**sections(model=tiny_model(), team=DEBATE, **over)))


def stirred(made: Trainer, size: float = 0.3) -> Trainer:
    for seed, name in enumerate(made.team.trained):
        stir(made.engine.weights(name), seed, size)
        made.setup.engine.load(name, made.engine.weights(name), 0)
    return made


class Between:
    """A rollout engine that hands everything on, for engines that do one thing wrong."""

    def __init__(self, inner: LocalEngine) -> None:
        self.inner = inner
        self.policies = inner.policies

    def renderer(self, policy: str) -> Renderer:
        return self.inner.renderer(policy)

    async def generate(self, request: Request) -> Completion:
        return await self.inner.generate(request)

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        self.inner.load(policy, weights, version)

    def release_caches(self) -> None:
        self.inner.release_caches()

    def close(self) -> None:
        self.inner.close()


class IgnoresAdapters(Between):
    """Plays the bare base in every policy's name, and says that it took the weights."""

    def __init__(self, inner: LocalEngine) -> None:
        super().__init__(inner)
        self.said: dict[str, tuple[int, str]] = {}
        for held in inner._loaded.values():
            held.adapter = None

    async def generate(self, request: Request) -> Completion:
        version, digest = self.said.get(request.policy, (0, ""))
        return replace(await super().generate(request), version=version, weights_hash=digest)

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        self.said[policy] = version, weights_hash(cast("Mapping[str, Tensor]", weights))


class MixesAdapters(Between):
    """Plays the first policy's adapter for everyone."""

    async def generate(self, request: Request) -> Completion:
        return await super().generate(replace(request, policy="agent_0"))


class ShiftsLogProbs(Between):
    """Reports log-probs that are a thousandth too high."""

    async def generate(self, request: Request) -> Completion:
        said = await super().generate(request)
        return replace(said, logprobs=tuple(value + 1e-3 for value in said.logprobs))


class ForgetsTemperature(Between):
    """Samples at temperature 1 whatever is asked for."""

    async def generate(self, request: Request) -> Completion:
        return await super().generate(replace(request, sampling=replace(request.sampling, temperature=1.0)))


class KeepsOldWeights(Between):
    """Never takes new weights."""

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        pass


def played_by(made: Trainer, kind: type[Between]) -> Trainer:
    engine = made.setup.engine
    assert isinstance(engine, LocalEngine)
    made.setup = replace(made.setup, engine=kind(engine))
    made.loop.setup, made.loop.rollouts.players = made.setup, [made.setup.engine]
    return made


class TestWhatActedIsWhatLearns:
    def test_trainer_and_sampler_agree_over_agents_turns_and_steps(self) -> None:
        made = trainer(workflow={"name": "debate", "rounds": 3}, optimizer={"lr": 3e-2})
        for step in made.steps(3):
            turns = [t for g in step.groups for e in g.episodes for t in e.turns]
            assert len(turns) == 2 * 3 * 9
            assert len({len(t.prompt_ids) for t in turns}) > 3
            assert step.metrics["parity/max"] <= 1e-4
            assert step.metrics["clip_share/agent_0"] == 0.0
        # And what was trained on really was of different weights.
        drift = made.engine.score(_as_samples(made, step))
        behaviour = [torch.tensor(t.logprobs) for g in step.groups for e in g.episodes for t in e.turns]
        assert max(float((a - b).abs().max()) for a, b in zip(drift, behaviour, strict=True)) > 1e-2

    def test_every_turn_carries_the_version_and_hash_that_were_published(self) -> None:
        made = trainer(algorithm={"name": "grpo", "group_size": 3, "epochs": 2})
        published = {name: (0, weights_hash(made.engine.weights(name))) for name in made.team.trained}
        for step in made.steps(3):
            turns = [t for g in step.groups for e in g.episodes for t in e.turns]
            assert {t.policy for t in turns} == set(published)
            for turn in turns:
                assert (turn.version, turn.weights_hash) == published[turn.policy]
            published = {
                name: (2 * step.number, weights_hash(made.engine.weights(name))) for name in made.team.trained
            }
        assert len({digest for _, digest in published.values()}) == 3

    @pytest.mark.sample(4)
    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [IgnoresAdapters, MixesAdapters, ShiftsLogProbs, ForgetsTemperature])
    def test_an_engine_that_plays_something_else_is_caught_at_the_first_step(
        self, kind: type[Between]
    ) -> None:
        made = played_by(trainer(), kind)
        before = {name: frozen_copy(made.engine.weights(name)) for name in made.team.trained}
        with pytest.raises(ParityError, match="differ by"):
            next(made.steps(1))
        assert made.done == 0
        assert all(same_bits(frozen_copy(made.engine.weights(n)), w) for n, w in before.items())

    @pytest.mark.long
    @pytest.mark.slow
    def test_new_adapters_that_are_ignored_are_caught_once_they_are_something(self) -> None:
        # At first an adapter changes nothing, so that ignoring it is no fault; after one step it is.
        made = played_by(
            Trainer(**sections(model=tiny_model(), team=DEBATE, optimizer={"lr": 3e-2})), IgnoresAdapters
        )
        steps = made.steps(2)
        assert next(steps).metrics["parity/max"] <= 1e-4
        with pytest.raises(ParityError):
            next(steps)

    @pytest.mark.long
    @pytest.mark.slow
    def test_rounding_above_the_bound_does_not_stop_a_run(self) -> None:
        # Weights that have grown make a few tokens depend on sums whose terms nearly cancel.
        found = stirred(trainer(training={"parity_tolerance": 1.0}), 8.0).steps(3)
        largest = max(step.metrics["parity/max"] for step in found)
        made = stirred(trainer(training={"parity_tolerance": largest / 2}), 8.0)
        assert sum(step.metrics.get("parity/rounded", 0.0) for step in made.steps(3)) >= 1

    def test_an_engine_that_stays_behind_is_caught_however_small_the_step_was(self) -> None:
        made = played_by(trainer(optimizer={"lr": 1e-9}), KeepsOldWeights)
        steps = made.steps(2)
        next(steps)
        with pytest.raises(ParityError, match="sampled with version 0 of policy 'agent_0', but version 1"):
            next(steps)


def _as_samples(made: Trainer, step: Any) -> list[Any]:
    from kapelle.algorithms.signals.samples import policy_sample

    return [
        policy_sample(t, made.team, t.policy, {}) for g in step.groups for e in g.episodes for t in e.turns
    ]


class TestWhoLearns:
    def test_an_agent_that_never_speaks_stays_as_it_is(self) -> None:
        made = trainer(
            workflow={"name": "solo", "agent": "agent_1"}, optimizer={"lr": 1e-2, "weight_decay": 0.1}
        )
        before = {name: frozen_copy(made.engine.weights(name)) for name in made.team.trained}
        for _ in made.steps(2):
            pass
        changed = [n for n, w in before.items() if not same_bits(frozen_copy(made.engine.weights(n)), w)]
        assert changed == ["agent_1"]
        assert made.engine.versions == {"agent_0": 0, "agent_1": 2, "agent_2": 0}

    def test_a_step_is_the_same_whenever_it_is_taken(self) -> None:
        one, other = trainer(), trainer()
        for a, b in zip(one.steps(2), other.steps(2), strict=True):
            assert a.groups == b.groups
            rows = [{k: v for k, v in s.metrics.items() if not k.startswith("time/")} for s in (a, b)]
            assert rows[0] == rows[1]
        assert same_bits(one.engine.state(), other.engine.state())


class Failing:
    """An environment whose first tasks of a step cannot be played."""

    def __init__(self, inner: Environment, failing: int) -> None:
        self.inner, self.failing = inner, failing
        self.name, self.reward_range, self.sources = inner.name, inner.reward_range, inner.sources
        self.opened = 0

    def start(self, task: Task, agents: Any, seed: int) -> Any:
        self.opened += 1
        if self.opened <= self.failing:
            raise OSError("no such board")
        return self.inner.start(task, agents, seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class TestFailures:
    def with_failures(self, count: int, **training: Any) -> Trainer:
        made = Trainer(**sections(training={"steps": 1, "tasks_per_step": 5, **training}))
        setup = replace(made.setup, environment=cast("Environment", Failing(made.setup.environment, count)))
        made.loop.setup = setup
        return made

    def test_a_failed_episode_is_data(self) -> None:
        (step,) = self.with_failures(3).steps()  # 3 of 15, the default share of 0.2
        errors = [e.error for g in step.groups for e in g.episodes if e.error]
        assert len(errors) == 3
        (error,) = set(errors)
        assert re.fullmatch(r"OSError: no such board \(test_loop.py, line \d+\)", error)
        assert step.metrics["failed_episodes"] == pytest.approx(0.2)

    def test_too_many_stop_the_run_with_the_reason(self) -> None:
        with pytest.raises(
            TrainingHalted, match=r"4 of 15 .* 0\.2\. The most frequent reason \(4 times\): OSError: no such"
        ):
            next(self.with_failures(4).steps())


class TestTasks:
    @staticmethod
    def ids(environment: Any, steps: int, count: int, seed: int = 0) -> list[list[str]]:
        config = resolve(sections(seed=seed, training={"tasks_per_step": count}))
        return [[t.id for t in training_tasks(environment, config, step + 1)] for step in range(steps)]

    def test_a_finite_split_is_used_up_before_it_starts_again_in_another_order(self) -> None:
        ten = Digest(tasks=10)
        steps = self.ids(ten, steps=10, count=4)
        flat = [name for step in steps for name in step]
        epochs = [flat[k : k + 10] for k in range(0, 40, 10)]
        assert all(sorted(epoch) == [f"train-{k}" for k in range(10)] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 4
        assert steps == self.ids(ten, steps=10, count=4)
        assert steps != self.ids(ten, steps=10, count=4, seed=1)

    def test_generated_tasks_depend_on_seed_and_place_alone(self) -> None:
        config = resolve(sections(environment={"name": "arithmetic", "digits": 6}))
        environment = cast("Environment", config.environment)
        steps = self.ids(environment, steps=4, count=25)
        assert len({name for step in steps for name in step}) == 100
        assert self.ids(environment, steps=2, count=50)[1][:25] == steps[2]
        assert self.ids(environment, steps=4, count=25, seed=1) != steps
        again = {task.id for task in training_tasks(environment, config, 1, attempt=1)}
        assert again.isdisjoint(name for step in self.ids(environment, 3, 2) for name in step), (
            "redrawn tasks are of no other step"
        )


class TestInsideARunningLoop:
    async def test_a_step_can_be_taken(self) -> None:
        asyncio.get_running_loop()  # as in a notebook
        (step,) = trainer().steps(1)
        assert step.number == 1


def test_samples_are_the_turns_that_the_update_learns_from() -> None:
    """Three agents answer once or twice; a turn cut at its limit is omitted with `truncated: mask`."""
    masked = {"algorithm": {"name": "grpo", "group_size": 2, "truncated": "mask"}}
    with trainer(**masked) as made:
        step = next(iter(made.steps(1)))
    for agent in made.team.names:
        turns = [turn for group in step.groups for episode in group.valid for turn in episode.by(agent)]
        whole = [turn for turn in turns if turn.finish_reason != "length"]
        assert step.metrics[f"samples/{agent}"] == len(whole) < len(turns)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["mappo", "marft", "happo"])
def test_a_central_view_beyond_the_critics_context_stops_the_run(name: str) -> None:
    """Each agent's own prompts fit in 64 tokens; what all of them read and wrote in two rounds does not."""
    model = {"embedded": {**SIZE, "context": 64}}
    debate = {"name": "debate", "rounds": 2}
    made = sections(model=model, workflow=debate, algorithm={"name": name})
    with (
        Trainer(**made) as long,
        pytest.raises(ContextError, match=r"critic.*context is 64"),
    ):
        long.train()
    own = sections(model=model, workflow=debate, algorithm={"name": "ippo"}, training={"steps": 1})
    with Trainer(**own) as local:
        local.train()
