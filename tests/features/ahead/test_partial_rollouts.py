"""Episodes that a step leaves continue in the next one: the same run with and without a second process, stopped or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.features.ahead.test_overlap import assert_same, end_of
from tests.features.ahead.test_queue import SMALL
from tests.support.episodes import episode, group, turn
from tests.support.tiny import team_of

from kapelle import Trainer
from kapelle.engines.rollout.request_queue import PAUSE
from kapelle.errors import ParityError, PeerFailed
from kapelle.features.ahead.queue import RolloutQueue, RolloutsAhead, enough_for, steps_ahead
from kapelle.rollout.episodes import begun, collect_groups
from kapelle.rollout.partial import EndOfStep, PartialEpisode, PartialGroup
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.ranks import Meeting
from kapelle.settings.schema import TrainingConfig
from kapelle.setup.recipe import resolve
from kapelle.training.collate import fresh_samples
from kapelle.training.rollouts import StepShare
from kapelle.training.selection import training_tasks

ON = {"steps": 5, "tasks_per_step": 4, "max_staleness": 2, "partial_rollouts": 0.5}


def settings(**training: Any) -> dict[str, Any]:
    """Answers of all lengths up to 120 tokens: they end at the first vowel."""
    return {
        **SMALL,
        "team": {"agents": 2, "lora": {"rank": 2}, "sampling": {"max_tokens": 120, "stop": [*"aeiou"]}},
        "algorithm": {"name": "grpo", "group_size": 2, "loss": {"importance_cap": 2.0}},
        "training": {**ON, **training},
    }


def trainer_of(run: Path | None = None, *, resume: bool = False, **training: Any) -> Trainer:
    return Trainer(resolve(settings(**training)), run_dir=run, resume=resume)


def left_of(trainer: Trainer) -> Sequence[PartialGroup]:
    """The groups that the last step has not finished."""
    rollouts = trainer.loop.rollouts
    assert isinstance(rollouts, RolloutsAhead)
    return rollouts.queue.left


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run in one process, never stopped: its folder, and the weights at its end."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    oldest, mixed, left = 0, 0, 0
    with trainer_of(folder) as trainer:
        for step in trainer.steps():
            turns = [t for g in step.groups for e in g.episodes for t in e.turns]
            mixed += sum(bool(t.versions) for t in turns)
            # Every step is one optimiser step: the weights that learn in step n have version n - 1.
            oldest = max([oldest, *(step.number - 1 - version for t in turns for version, _ in t.runs)])
            left += len(left_of(trainer))
            assert step.metrics["parity/max"] <= 1e-4
        trainer.save()
        assert left > 0, "something is left, or this asks nothing"
        assert mixed > 0
        assert oldest == ON["max_staleness"]
        return folder, end_of(trainer)


@pytest.mark.slow
def test_a_stopped_run_is_the_whole_run(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    for steps in (1, 2, 2):
        with trainer_of(run, resume=run.exists()) as trainer:
            trainer.train(steps)
            if steps == 1:
                assert left_of(trainer), "the checkpoint holds what is left"
    with trainer_of(run, resume=True) as trainer:
        assert_same(run, trainer, whole)


@pytest.mark.long
@pytest.mark.slow
def test_a_second_process_plays_the_same(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with trainer_of(run, overlap=True) as trainer:
        for _ in trainer.steps():
            pass
        trainer.save()
        assert_same(run, trainer, whole)


def test_when_the_rest_may_be_left() -> None:
    def enough(max_staleness: int, number: int, begun: list[int], done: list[bool]) -> bool:
        training = TrainingConfig(tasks_per_step=4, max_staleness=max_staleness, partial_rollouts=0.5)
        groups = [PartialGroup(episode(turn("a", 0)).task, each, ()) for each in begun]
        return enough_for(training, number, groups)(done)

    assert [steps_ahead(TrainingConfig(max_staleness=k, partial_rollouts=0.5)) for k in (1, 2, 4)] == [
        0,
        1,
        1,
    ]
    assert steps_ahead(TrainingConfig(max_staleness=4)) == 4
    fresh = [1, 1, 1, 1]
    assert not enough(1, 1, fresh, [True, False, False, False])
    assert enough(1, 1, fresh, [True, False, False, True])
    # One step ahead and one for what is left: nothing is left twice.
    for staleness in (1, 2):
        assert not enough(staleness, 2, [1, 1, 2, 2, 2, 2], [True, False, True, True, True, True])
        assert enough(staleness, 2, [1, 1, 2, 2, 2, 2], [True, True, True, True, False, False])
    assert enough(3, 2, [1, 1, 2, 2, 2, 2], [True, False, True, True, True, False])
    assert not enough(3, 3, [1, 2, 3, 3, 3, 3], [False, True, True, True, True, True])


class Other(Meeting):
    """The first of two; the other one says at each mark which of its groups are done, or fails."""

    rank, size = 0, 2

    def __init__(self, *said: bytes | Exception) -> None:
        self.said, self.new_messages = said, list[bytes]()

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        self.new_messages.append(work())
        said = self.said[min(len(self.new_messages), len(self.said)) - 1]
        if isinstance(said, Exception):
            raise said
        return [self.new_messages[-1], said]


NONE, BOTH = bytes([0, 0]), bytes([1, 1])


class TestMarks:
    def played(self, trainer: Trainer, meeting: Other, most: int) -> list[PartialGroup]:
        tasks = training_tasks(trainer.setup.environment, trainer.config, 1)
        groups = begun(tasks[:2], 2, seed=5, number=1)
        return run_async(lambda: collect_groups(trainer.setup, groups, EndOfStep((), most), meeting))

    def test_a_step_ends_at_the_mark_at_which_enough_is_done_everywhere(self) -> None:
        long = {"agents": 2, "lora": {"rank": 2}, "sampling": {"max_tokens": 120}}
        with Trainer(resolve({**settings(), "team": long})) as trainer:
            one, again = Other(NONE, NONE, BOTH), Other(NONE, NONE, BOTH)
            left = self.played(trainer, one, most=2)
            unfinished = [e for g in left for e in g.episodes if isinstance(e, PartialEpisode)]
            (tokens,) = {len(turn.completion_ids) for episode in unfinished for turn in episode.begun}
            assert one.new_messages == [NONE] * 3
            assert 3 * PAUSE <= tokens < 4 * PAUSE
            trainer.setup.engine.release_caches()
            assert self.played(trainer, again, most=2) == left
            # The other one alone may leave some: this one plays to its end, and meets it there.
            last = Other(NONE, NONE)
            done = self.played(trainer, last, most=2)
            assert all(group.done for group in done)
            assert last.new_messages[-1] == BOTH

    def test_who_is_done_waits_for_the_others(self) -> None:
        with trainer_of() as trainer:
            meeting = Other(*[NONE] * 40, BOTH)
            assert all(group.done for group in self.played(trainer, meeting, most=0))
            assert (len(meeting.new_messages), meeting.new_messages[-1]) == (41, BOTH)

    def test_where_another_one_fails_nobody_plays_on(self) -> None:
        with trainer_of() as trainer:
            with pytest.raises(PeerFailed, match="no memory"):
                self.played(trainer, Other(NONE, PeerFailed("Rank 1 failed: no memory")), most=0)
            assert all(group.done for group in self.played(trainer, Other(BOTH), most=0))


def test_only_what_these_weights_sampled_is_compared_with_them() -> None:
    mixed = turn(
        "a", 0, tokens=5, version=4, versions=((2, 1), (3, 2), (4, 2)), logprobs=(-1, -2, -3, -4, -5)
    )
    old, new = turn("a", 1, version=2), turn("a", 2, version=3)
    (one, two) = fresh_samples([mixed, old, new], team_of("a"), 16, {"a": 3})
    assert one.targets == (4, 5)
    assert one.tokens == (5, 10, 11, *range(20, 25))
    assert one.columns["behaviour"].tolist() == [-2, -3]
    assert two.targets == (3, 4)
    assert len(fresh_samples([mixed, old, new], team_of("a"), 16)) == 5  # all of it
    assert len(fresh_samples([mixed, old, new], team_of("a"), 1, {"a": 3})) == 1


class TestQueue:
    def left(self) -> PartialGroup:
        return PartialGroup(episode(turn("a", 0)).task, 1, (PartialEpisode(3, begun=(turn("a", 0),)),))

    def test_what_a_step_leaves_is_given_to_the_next_and_kept(self) -> None:
        queue, got = RolloutQueue(0, 1), []

        def play(number: int, left: Any) -> StepShare:
            got.append(list(left))
            return StepShare({0: group(episode(turn("a", 0, version=number - 1)))}, {1: self.left()})

        queue.take(1, {"a": 0}, play)
        queue.take(2, {"a": 1}, play)
        other = RolloutQueue(0, 1)
        other.load_state(queue.state())
        other.take(3, {"a": 2}, play)
        assert got == [[], [self.left()], [self.left()]]

    def test_no_token_is_older_than_allowed(self) -> None:
        def played(*runs: tuple[int, int]) -> Any:
            own = turn("a", 0, tokens=sum(n for _, n in runs), version=runs[-1][0], versions=runs)
            return lambda *_: StepShare({0: group(episode(own))}, {1: self.left()})

        queue = RolloutQueue(0, 1)
        queue.take(1, {"a": 0}, lambda *_: StepShare({}, {0: self.left()}))
        groups = queue.take(2, {"a": 1}, played((0, 1), (1, 3)))
        assert queue.staleness(groups) == 0.25
        with pytest.raises(ParityError, match="version 0 of policy 'a', but version 2 was published"):
            queue.take(3, {"a": 2}, played((0, 1), (2, 3)))

    def test_what_is_begun_now_has_the_weights_of_now(self) -> None:
        queue = RolloutQueue(0, 1)
        queue.take(1, {"a": 0}, lambda *_: StepShare({0: group(episode(turn("a", 0)))}))
        with pytest.raises(ParityError, match="version 0 of policy 'a', but version 1 was published"):
            queue.take(2, {"a": 1}, lambda *_: StepShare({0: group(episode(turn("a", 0)))}))
