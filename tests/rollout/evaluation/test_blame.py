"""Blame: the drop of a turn is what the team loses by it, known by hand for teams whose words are counted out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.support.plugins import Endless
from tests.support.tiny import sections
from tests.support.trees import (
    NOTES,
    TASK,
    WINS,
    Counting,
    PaysTheFirst,
    Wins,
    actor,
    at_grpo,
    reasoner,
    stage,
)

from kapelle import Trainer
from kapelle.algorithm import Data
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Outcome, Reporting
from kapelle.errors import ConfigError, EpisodeError
from kapelle.rollout.episodes import roll_out_episode, rollout
from kapelle.rollout.evaluation import blame as measuring
from kapelle.rollout.evaluation.blame import choose_episodes, measure_blame
from kapelle.rollout.setup import RolloutSetup
from kapelle.runs.blamed import (
    Blame,
    BlamedEpisode,
    BlamedTurn,
    BlameFile,
    read_blamed,
    uncertainty,
)
from kapelle.runtime.event_loop import run_async
from kapelle.types import Episode, Task
from kapelle.workflow import Scene
from kapelle.workflows.chain import Chain

HOW: dict[str, Any] = {"step": 3, "split": "eval", "samples": 10, "seed": 0, "settings": []}


def acting(
    *words: Callable[[Request], str], engine: ScriptedEngine | None = None, **over: Any
) -> RolloutSetup:
    """A reasoner and an actor who speak these words; without any, as the tables of `tests.support.trees` say."""
    return replace(stage(at_grpo(), engine or Counting(*(words or (reasoner, actor))), **over), data=Data())


def counted(*texts: str) -> Callable[[Request], str]:
    """Say these texts in turn, over and over."""
    following = cycle(texts)
    return lambda _: next(following)


def played(setup: RolloutSetup, first: str, last: str, seed: int = 1) -> Episode:
    """An episode in which these two words were said."""
    said = replace(setup, engine=Counting(lambda _: first, lambda _: last))
    return run_async(lambda: roll_out_episode(said, TASK, seed))


def blamed(setup: RolloutSetup, *episodes: Episode, **how: Any) -> Blame:
    return measure_blame(setup, [(0, each) for each in episodes], {**HOW, **how})


class TestByHand:
    def test_a_note_that_wins_never_is_what_lost(self) -> None:
        """Three notes of ten are B, which always wins, and nothing else does: the actor is acquitted."""
        setup = acting(
            counted(*"AAAAABBBCC"),
            lambda request: "win" if request.messages[-1].content.startswith("B") else "lose",
        )
        (episode,) = blamed(setup, played(setup, "A", "lose")).episodes
        note, answer = episode.turns
        assert episode.values == (0.3, 0.0, 0.0)
        assert (note.before, note.after, note.drop) == (0.3, 0.0, 0.3)
        assert (answer.before, answer.after, answer.drop) == (0.0, 0.0, 0.0)
        assert episode.culprit == note
        assert [(each.text, each.times, each.success) for each in note.instead] == [
            ("A", 5, 0.0), ("B", 3, 1.0), ("C", 2, 0.0),
        ]  # fmt: skip

    def test_right_notes_are_acquitted_where_the_actor_errs(self) -> None:
        """Every note is right, and a quarter of the answers is wrong, among them this one."""
        setup = acting(lambda _: "B", counted("win", "win", "win", "lose"))
        (episode,) = blamed(setup, played(setup, "B", "lose"), samples=8).episodes
        note, answer = episode.turns
        assert episode.values == (0.75, 0.75, 0.0)
        assert (note.drop, answer.drop) == (0.0, 0.75)
        assert sum(turn.drop or 0.0 for turn in episode.turns) == episode.values[0], "the drops add up"
        assert episode.culprit == answer
        assert answer.error == uncertainty([1.0] * 6 + [0.0] * 2), "the outcome itself is certain"
        assert note.error == pytest.approx(2**0.5 * answer.error)
        assert (episode.continuations, episode.failed) == (16, 0)

    def test_a_solved_episode_has_gained(self) -> None:
        setup = acting(lambda _: "B", counted("win", "lose"))
        result = blamed(setup, played(setup, "B", "lose"), played(setup, "B", "win", seed=2))
        lost, won = result.episodes
        assert [turn.drop for turn in lost.turns] == [0.0, 0.5]
        assert [turn.drop for turn in won.turns] == [0.0, -0.5]
        assert won.culprit is None
        assert result.lost_by == {"reasoner": 0, "actor": 1}
        _, answers = result.rows()
        assert (answers["failed"]["drop"], answers["solved"]["drop"], answers["lost"]) == (0.5, -0.5, 1)

    def test_by_chance_the_estimates_lie_about_what_is_exact(self) -> None:
        setup = acting()
        (episode,) = blamed(setup, played(setup, "A", "lose"), samples=300).episodes
        exact = sum(NOTES[note] * WINS[note] for note in NOTES)
        for found, true in zip(episode.values, (exact, WINS["A"], 0.0), strict=True):
            assert found == pytest.approx(true, abs=4 * (true * (1 - true) / 300) ** 0.5)

    def test_a_continuation_that_fails_is_in_no_mean(self) -> None:
        setup = acting(lambda _: "B", counted("win", "boom"))
        (episode,) = blamed(setup, played(setup, "B", "lose")).episodes
        assert episode.values == (1.0, 1.0, 0.0)
        assert episode.failed == 10
        assert {each.text: each.success for each in episode.turns[1].instead} == {"win": 1.0, "boom": None}


class Both(Endless):
    """Two at once: solved where both say yes."""

    name: Literal["tests.rollout.evaluation.test_blame:Both"] = "tests.rollout.evaluation.test_blame:Both"

    def start(self, task: Task, agents: Sequence[str], seed: int) -> BothState:
        return BothState()


class BothState:
    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def observe(self, agent: str) -> str:
        return "?"

    def movers(self) -> tuple[str, ...]:
        return ()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        self.said |= actions
        return {}

    def outcome(self) -> Outcome:
        solved = float(set(self.said.values()) == {"yes"})
        return Outcome(dict.fromkeys(self.said, solved), success=solved)

    async def close(self) -> None:
        pass


class AtOnce(Chain):
    async def run(self, scene: Scene) -> None:
        said = await scene.together({name: [scene.observe(name)] for name in scene.names})
        await scene.step({name: turn.text for name, turn in said.items()})


class OneThenTwo(Chain):
    async def run(self, scene: Scene) -> None:
        first, *others = scene.names
        note = await scene[first].say("?")
        await scene.step({first: note.text})
        said = await scene.together({name: ["?"] for name in others})
        await scene.step({name: turn.text for name, turn in said.items()}, final="lose")


class TestAtOnce:
    def test_each_is_judged_alone_with_the_other_kept(self) -> None:
        """The reasoner said yes and the actor no; half of the reasoner's words are yes and all of the actor's others."""
        setup = acting(counted("yes", "no"), lambda _: "yes", environment=Both(), workflow=AtOnce())
        (episode,) = blamed(setup, played(setup, "yes", "no")).episodes
        innocent, guilty = episode.turns
        assert [turn.moment for turn in episode.turns] == [0, 0]
        assert (innocent.before, innocent.drop) == (0.0, 0.0), "whatever it says, the other said no"
        assert (guilty.before, guilty.drop) == (1.0, 1.0), "the other's yes is kept"
        assert episode.values == (0.5, 0.0)
        assert episode.continuations == 30
        assert {each.text for each in innocent.instead} == {"yes", "no"}

    def test_a_world_that_pays_an_earlier_turn_later_repeats(self) -> None:
        names = ("first", "reasoner", "actor")
        engine = ScriptedEngine(dict.fromkeys(names, lambda _: "lose"))
        setup = acting(names=names, engine=engine, environment=PaysTheFirst(), workflow=OneThenTwo())
        episode = run_async(lambda: roll_out_episode(setup, TASK, 1))
        assert [turn.reward for turn in episode.turns] == [2.0, 0.0, 0.0]
        result = blamed(setup, episode)
        assert result.excluded == {}
        assert [turn.moment for turn in result.episodes[0].turns] == [0, 1, 1]


class TestFile:
    def test_what_was_interrupted_continues_and_ends_as_the_same_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measuring, "AT_ONCE", 20)
        engine = Counting(reasoner, actor)
        setup = acting(engine=engine)
        groups = run_async(lambda: rollout(setup, [Task(f"t{k}", "?") for k in range(16)], 1, 0))
        chosen = choose_episodes(groups, 3)
        engine.asked.clear()
        (tmp_path / "a").mkdir()
        whole = measure_blame(setup, chosen, HOW, BlameFile(tmp_path / "a", HOW))
        asked = len(engine.asked)
        assert whole.file is not None
        lines = whole.file.read_bytes().splitlines(keepends=True)
        assert len(lines) == 1 + len(chosen) == 7
        for kept in (0, 1, 4):  # and half of the next line
            run = tmp_path / f"b{kept}"
            again = BlameFile(run, HOW)
            again.path.parent.mkdir(parents=True)
            again.path.write_bytes(b"".join(lines[:kept]) + lines[kept][:30])
            engine.asked.clear()
            found = measure_blame(setup, chosen, HOW, again)
            assert again.path.read_bytes() == whole.file.read_bytes()
            assert found.episodes == whole.episodes
            assert (len(engine.asked) < asked) == (kept > 1)
        engine.asked.clear()
        assert measure_blame(setup, chosen, HOW, BlameFile(tmp_path / "a", HOW)).episodes == whole.episodes
        assert engine.asked == [], "nothing is left to play"


class Living(Wins, Reporting):
    name: Literal["tests.rollout.evaluation.test_blame:Living"] = "tests.rollout.evaluation.test_blame:Living"  # type: ignore[assignment]

    @property
    def alive(self) -> Sequence[str]:
        return ("a weather service",)


class TestRefused:
    def test_a_world_that_relies_on_something_outside(self) -> None:
        setup = acting(environment=Living())
        with pytest.raises(ConfigError, match=r"a weather service"):
            blamed(setup, played(setup, "A", "lose"))

    def test_a_world_that_does_not_repeat(self) -> None:
        setup = acting(environment=Wins(odd="shown"))
        with pytest.raises(EpisodeError, match="the prompt of 'reasoner' at its turn 1 differs") as raised:
            blamed(setup, played(setup, "A", "lose"))
        assert "\n" not in str(raised.value)


def test_the_costliest_turns_come_first_and_a_mean_has_the_error_of_its_episodes() -> None:
    def episode(seed: int, drop: float) -> BlamedEpisode:
        turn = BlamedTurn("a", 0, 1, 0, "", drop, 0.0, 0.1)
        return BlamedEpisode("t", 0, seed, "", "", ("a", "b"), 0.0, (drop, 0.0), (turn,), 8, 0, 9)

    result = Blame(HOW, tuple(episode(k, drop) for k, drop in enumerate((0.2, 0.6, 0.0, 0.4))))
    assert [turn.drop for _, turn in result.costliest(2)] == [0.6, 0.4]
    (row,) = result.rows()
    assert row["failed"]["drop"] == pytest.approx(0.3)
    assert row["failed"]["error"] == pytest.approx((0.2 / 3) ** 0.5 / 2), "s = √(0.2 / 3), by √4"
    assert result.lost_by == {"a": 3, "b": 0}, "one was lost by nobody"
    assert "a, turn 1: mean drop failed +0.300 ± 0.129" in str(result)


class TestTrainer:
    def test_training_goes_on_as_if_nobody_had_asked(self, tmp_path: Path) -> None:
        losses = []
        noisy = {
            "name": "tests.support.plugins:Digest",
            "noisy": True,
        }  # draws from generators that all share
        for asks in (False, True):
            random.seed(3)
            np.random.seed(3)
            torch.manual_seed(3)
            with Trainer(**sections(environment=noisy), run_dir=tmp_path / str(asks)) as trainer:
                list(trainer.steps(1))
                if asks:
                    result = trainer.blame(episodes=2, samples=2)
                    assert result.file is not None
                    assert result.file.parent == tmp_path / "True" / "blame"
                    assert len(read_blamed(result.file)[1]) == len(result.episodes)
                    assert set(result.lost_by) == {"agent_0", "agent_1"}
                losses.append([step.metrics["loss/agent_0"] for step in trainer.steps(2)])
        assert losses[0] == losses[1]

    @pytest.mark.parametrize("workflow", ["chain", "parallel", "reflect", "router", "vote"])
    def test_every_turn_of_every_workflow_can_be_continued_from(self, workflow: str) -> None:
        with Trainer(**sections(workflow={"name": workflow})) as trainer:
            result = trainer.blame(episodes=2, samples=2)
            assert result.excluded == {}
            for episode in result.episodes:
                assert episode.failed == 0
                assert all(turn.drop is not None and turn.instead for turn in episode.turns)
                if len(episode.values) > len(episode.turns):  # no one spoke at once
                    drops = sum(turn.drop or 0.0 for turn in episode.turns)
                    assert drops == pytest.approx((episode.values[0] or 0.0) - episode.success)
