"""Interventions and shared beginnings, played: what is replayed, what is sampled again, what it comes to and what it costs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from statistics import fmean
from typing import Any, cast

import pytest
from tests.support.trees import (
    NOTES,
    TASK,
    WINS,
    Counting,
    PaysTheFirst,
    TwoSteps,
    Wins,
    WinsState,
    actor,
    numbered,
    reasoner,
    stage,
)

from kapelle.algorithm import Algorithm, Change, Interventions, Slot, algorithm_class
from kapelle.algorithms.shared.replays import disagreement, entropy
from kapelle.engines.rollout.protocol import Request
from kapelle.rollout.episodes import rollout
from kapelle.rollout.interventions import affordable, moment_of, turns_until
from kapelle.rollout.setup import RolloutSetup
from kapelle.runs.definitions import own_returns, rollout_metrics
from kapelle.team import Policy, Team
from kapelle.types import Episode, Group, RewardEvent, Task, Turn
from kapelle.workflow import GoesOnWithout, Scene
from kapelle.workflows.chain import Chain


def row(name: str, **settings: Any) -> Algorithm:
    kind: Any = algorithm_class(name)
    algorithm: Algorithm = kind.model_validate({"name": name, **settings}).build()
    return algorithm


async def played(setup: RolloutSetup, samples: int, tasks: int = 1, seed: int = 0) -> list[Group]:
    return await rollout(setup, [Task(f"t{k}", "?") for k in range(tasks)], samples, seed)


def changing(algorithm: Algorithm, *changes: Change, continuations: int = 1) -> Algorithm:
    """The same algorithm with other interventions: these, of every episode."""
    asked = Interventions(
        lambda group, number, team: changes, continuations, lambda episode: {"actor": episode.total("actor")}
    )
    return replace(algorithm, data=replace(algorithm.data, interventions=asked))


PLAIN = row("grpo", group_size=2)


class TestWhatBecomesOfIt:
    @pytest.mark.slow
    async def test_a_turn_sampled_anew_is_worth_what_the_policies_win_from_there(self) -> None:
        algorithm = row("counterfactual", group_size=2, continuations=2)
        groups = await played(stage(algorithm), 2, tasks=150)
        found: dict[str, list[float]] = {}
        for episode in (episode for one in groups for episode in one.episodes):
            first, second = (
                episode.interventions if episode.interventions[0].turn == 0 else episode.interventions[::-1]
            )
            assert (first.agents, second.agents) == (("reasoner",), ("actor",))
            found.setdefault("any", []).extend(paid["reasoner"] for paid in first.returns)
            found.setdefault(episode.turns[0].text, []).extend(paid["actor"] for paid in second.returns)
        expected = {"any": sum(NOTES[note] * WINS[note] for note in NOTES), **WINS}
        for note, exact in expected.items():
            own = found[note]
            assert abs(fmean(own) - exact) < 4 * math.sqrt(exact * (1 - exact) / len(own)), note

    async def test_what_came_before_is_replayed_and_what_follows_is_live(self) -> None:
        engine = Counting(numbered, numbered)
        algorithm = changing(PLAIN, Change("resample", ("actor",), 1), continuations=2)
        [one] = await played(stage(algorithm, engine), 2)
        asked = Counter(request.agent for request in engine.asked)
        assert asked == {"reasoner": 2, "actor": 2 + 2 * 2}
        prompts = Counter(request.prompt_ids for request in engine.asked if request.agent == "actor")
        assert sorted(prompts.values()) == [3, 3], "the actor reads again what it has read"
        for episode in one.episodes:
            assert episode.continued == {"actor": 2 * len(episode.turns[1].completion_ids)}

    async def test_another_turn_stands_in_its_place(self) -> None:
        engine = Counting(numbered, lambda request: request.messages[-1].content)
        other = Turn("reasoner", "reasoner", 0, "script", 0, 0, (), (), (), "stop", "")
        setup = stage(PLAIN, engine)
        [one] = await played(setup, 2)
        first, second = one.episodes
        other = second.turns[0]
        assert other.prompt_ids == first.turns[0].prompt_ids
        algorithm = changing(PLAIN, Change("replace", ("reasoner",), 0, other))
        engine.asked.clear()
        await played(stage(algorithm, engine), 2)
        *_, last, after = [request for request in engine.asked if request.agent == "actor"]
        assert last.messages[-1].content == after.messages[-1].content == other.text

    async def test_a_removed_agent_says_nothing(self) -> None:
        engine = Counting(numbered, lambda request: f"<{request.messages[-1].content}>")
        algorithm = changing(PLAIN, Change("remove", ("reasoner",)), Change("remove", ("actor", "reasoner")))
        [one] = await played(stage(algorithm, engine), 1)
        said = [request for request in engine.asked if request.agent == "actor"]
        assert [request.messages[-1].content for request in said] == [one.episodes[0].turns[0].text, ""]
        assert [each.turn for each in one.episodes[0].interventions] == [0, 0]
        assert one.episodes[0].continued == {"actor": len("<>")}

    async def test_a_workflow_can_go_on_without_it(self) -> None:
        class Further(Chain, GoesOnWithout):
            pass

        engine = Counting(numbered, lambda request: request.messages[-1].content or "alone")
        new_messages: list[tuple[str, ...]] = []

        class Noting(Further):
            async def run(self, scene: Scene) -> None:
                new_messages.append(scene.names)
                await super().run(scene)

        algorithm = changing(PLAIN, Change("remove", ("reasoner",)), Change("remove", ("reasoner", "actor")))
        await played(stage(algorithm, engine, workflow=Noting()), 1)
        everybody = ("reasoner", "actor")
        assert new_messages == [everybody, ("actor",), everybody]

    async def test_another_policy_speaks_for_an_agent(self) -> None:
        engine = Counting(
            lambda request: "A", lambda request: "win" if "Z" in str(request.messages[-1].content) else "lose"
        )
        algorithm = changing(PLAIN, Change("swap", ("reasoner",), None, "other"))
        setup = stage(algorithm, engine)
        engine.scripts["other"] = lambda request: "Z"
        team = replace(setup.team, policies={**setup.team.policies, "other": Policy("other", trained=False)})
        [one] = await played(replace(setup, team=team), 1)
        [found] = one.episodes[0].interventions
        assert one.episodes[0].total("actor") == 0.0
        assert found.returns == ({"actor": 1.0},)
        assert one.episodes[0].continued == {"other": 1, "actor": 3}
        assert rollout_metrics([one], own_returns)["tokens/other"] == 1.0, (
            "it has no turn in an episode of the team"
        )

    async def test_a_continuation_that_fails_is_left_out(self) -> None:
        words = iter(["win", "boom", "win"])
        engine = Counting(numbered, lambda request: next(words))
        algorithm = changing(PLAIN, Change("resample", ("actor",), 1), continuations=2)
        [one] = await played(stage(algorithm, engine), 1)
        [found] = one.episodes[0].interventions
        assert found.returns == ({"actor": 1.0},)
        assert one.episodes[0].error is None

    @pytest.mark.parametrize("odd", ["shown", "paid", "over"])
    async def test_a_world_that_does_not_repeat_fails_its_episode_by_name(self, odd: Any) -> None:
        WinsState.opened = 0
        algorithm = changing(PLAIN, *(Change("resample", ("actor",), 1) for _ in range(4)))
        setup = stage(algorithm, environment=Wins(odd=odd), workflow=TwoSteps())
        [one] = await played(setup, 1)
        assert one.episodes[0].error is not None
        assert "does not repeat" in one.episodes[0].error

    async def test_a_world_that_pays_an_earlier_turn_later_repeats(self) -> None:
        algorithm = row("counterfactual", group_size=2)
        setup = stage(algorithm, environment=PaysTheFirst(), workflow=TwoSteps())
        [one] = await played(setup, 2)
        for episode in one.episodes:
            assert episode.error is None
            assert episode.turns[0].reward == 2.0, "once after each turn"
            assert {each.turn for each in episode.interventions} == {0, 1}


class TestMoments:
    def test_what_others_say_at_the_same_moment_is_replayed(self) -> None:
        def said(agent: str, index: int, seen: int) -> Turn:
            return Turn(agent, agent, 0, "", index, seen, (index,), (index,), (0.0,), "stop", "")

        turns = (said("a", 0, 0), said("b", 1, 1), said("c", 2, 1), said("a", 3, 3))
        episode = Episode(TASK, 0, ("a", "b", "c"), turns)
        past, beside = moment_of(episode, Change("resample", ("c",), 2))
        assert [turn.index for turn in past] == [0]
        assert [turn.index for turn in beside] == [1]
        past, beside = moment_of(episode, Change("remove", ("b", "c")))
        assert [turn.index for turn in past] == [0]
        assert beside == []
        past, _ = moment_of(episode, Change("remove", ("nobody",)))
        assert len(past) == 4

    def test_what_was_paid_after_it_is_not_repeated(self) -> None:
        """`a` is paid 0.1 before it speaks, 0.2 for its turn, and 0.3 once more after `b` has spoken; 0.1 + 0.2 + 0.3 − 0.3 is another number."""
        turns = tuple(
            Turn(agent, agent, 0, "", k, k, (k,), (k,), (0.0,), "stop", "", reward=reward)
            for k, (agent, reward) in enumerate((("a", 0.1 + 0.2 + 0.3), ("b", 7.0), ("a", 1.0)))
        )
        paid = (("a", 0, 0.1), ("a", 1, 0.2), ("a", 2, 0.3), ("b", 3, 7.0), ("a", 3, 1.0))
        episode = Episode(
            TASK, 0, ("a", "b"), turns, reward_events=tuple(RewardEvent(*each) for each in paid)
        )
        rewards = [[turn.reward for turn in turns_until(episode, count)] for count in range(4)]
        assert rewards == [[], [0.1 + 0.2], [0.1 + 0.2 + 0.3, 0.0], [0.1 + 0.2 + 0.3, 7.0, 1.0]]
        older = replace(episode, reward_events=())
        assert turns_until(older, 1) == turns[:1], "when it was paid is not known"
        more = replace(episode, turns=(replace(turns[0], reward=5.0), *turns[1:]))
        assert [turn.reward for turn in turns_until(more, 2)] == [5.0, 0.0], "nor of what was not recorded"


class TestBudget:
    def episode(self, paid: float, tokens: int = 10) -> Episode:
        turns = tuple(
            Turn(agent, agent, 0, "", k, k, (k,), (1,) * tokens, (0.0,) * tokens, "stop", "")
            for k, agent in enumerate(("a", "b"))
        )
        return Episode(TASK, 0, ("a", "b"), turns, {"b": paid})

    def asked(self, **over: Any) -> Interventions:
        def changes(group: Group, number: int, team: Team) -> list[Change]:
            return [Change("resample", (turn.agent,), turn.index) for turn in group.episodes[number].turns]

        return replace(Interventions(changes, 1, lambda episode: {}), **over)

    @pytest.mark.parametrize(
        ("over", "turns"),
        [
            ({}, [0, 1]),
            ({"share": 1.5}, [0, 1]),
            ({"share": 1.0}, [0]),
            ({"share": 0.0}, []),
            ({"tokens": 2 * 3 * 30}, [0, 1]),
            ({"tokens": 2 * 3 * 20}, [0]),
            ({"tokens": 2 * 3 * 20, "share": 1.5}, [0]),
            ({"share": 2.0, "continuations": 2}, [0]),
            ({"share": 0.5, "says": lambda others: lambda slot: float(slot.agents == ("b",))}, [1]),
            ({"share": 1.5, "says": lambda others: lambda slot: float(slot.agents == ("b",))}, [0, 1]),
        ],
    )
    def test_what_is_expected_to_fit(self, over: dict[str, Any], turns: list[int]) -> None:
        group = Group(TASK, tuple(self.episode(1.0) for _ in range(3)))
        team: Any = None
        assert [change.turn for change in affordable(group, 0, self.asked(**over), team, 2)] == turns

    def test_what_fits_in_part_is_played_in_that_share_of_the_episodes(self) -> None:
        """The first slot costs 20 tokens and the second 10, of 25: all of the first and half of the second."""
        team: Any = None
        asked = self.asked(share=1.25)
        found = Counter[int | None]()
        for seed in range(400):
            own = replace(self.episode(1.0), seed=seed)
            group = Group(TASK, (own, self.episode(1.0), self.episode(1.0)))
            found.update(change.turn for change in affordable(group, 0, asked, team, 1))
        assert found[0] == 400
        assert abs(found[1] - 200) < 4 * math.sqrt(400 / 4)

    def test_a_slot_that_not_every_episode_has_is_expected_to_cost_less(self) -> None:
        """One of two others has no second turn: the slots cost (20 + 10)/2 and (10 + 0)/2 tokens, of 4/3 of 15."""
        short = replace(self.episode(1.0), turns=self.episode(1.0).turns[:1])
        team: Any = None
        for seed in range(10):
            group = Group(TASK, (replace(self.episode(1.0), seed=seed), self.episode(1.0), short))
            found = affordable(group, 0, self.asked(share=4 / 3 + 1e-9), team, 1)
            assert [change.turn for change in found] == [0, 1]

    def test_its_own_turns_have_no_say_in_it(self) -> None:
        """However long they are, whatever they are paid, and whether the later one is there at all."""
        team: Any = None
        for seed in range(20):
            for share in (0.5, 1.0, 1.3):
                asked = self.asked(share=share)
                told = []
                for tokens, paid in ((1, 0.0), (10, 1.0), (500, 9.0), (0, 1.0)):
                    own = replace(self.episode(paid), seed=seed)
                    longer = replace(own.turns[1], completion_ids=(1,) * tokens, logprobs=(0.0,) * tokens)
                    own = replace(own, turns=(own.turns[0], longer)[: 1 + bool(tokens)])
                    group = Group(TASK, (own, self.episode(1.0), self.episode(0.0)))
                    told.append([change.turn for change in affordable(group, 0, asked, team, 1)])
                assert told[0] == told[1] == told[2]
                assert told[3] == [turn for turn in told[0] if turn == 0]

    def test_those_are_played_on_after_which_others_disagree(self) -> None:
        one, two = (self.episode(paid) for paid in (0.0, 4.0))
        apart = replace(two, turns=(two.turns[0], replace(two.turns[1], prompt_ids=(9,))))

        def differ(*episodes: Episode) -> Any:
            return disagreement(
                Group(TASK, episodes), lambda episode: dict.fromkeys("ab", episode.total("b"))
            )

        assert differ(one, apart)(Slot(("a",), 0)) == pytest.approx(4.0)  # both read the same there
        assert differ(one, apart)(Slot(("b",), 0)) == pytest.approx(4.0)  # and no one the same here: of all
        assert differ(one, self.episode(0.0), apart)(Slot(("b",), 0)) == 0.0
        assert differ(one, self.episode(0.0), apart)(Slot(("a",), 0)) > 0.0

    def test_those_are_played_on_at_which_the_policy_is_uncertain(self) -> None:
        """By hand: the others' second turn has ½·(1 + 2) nats per token and their first 0.5; the own turns do not count."""

        def surprised(first: float, second: float, tokens: int = 2) -> Episode:
            own = self.episode(1.0, tokens)
            return replace(
                own,
                turns=tuple(
                    replace(turn, logprobs=(-2 * nats, *(0.0,) * (tokens - 1)))
                    for turn, nats in zip(own.turns, (first, second), strict=True)
                ),
            )

        others = surprised(0.2, 1.0), surprised(0.8, 2.0), replace(self.episode(0.0, 0), error="boom")
        nats = entropy(Group(TASK, others))
        assert nats(Slot(("a",), 0)) == pytest.approx(0.5)
        assert nats(Slot(("b",), 0)) == pytest.approx(1.5)
        assert nats(Slot(("b",), 1)) == 0.0
        # The second turn costs 2 tokens of each episode, and the first 4.
        asked, team = self.asked(share=0.5, says=entropy), cast("Any", None)
        for first, second in ((9.0, 0.0), (0.0, 9.0)):
            one = Group(TASK, (surprised(first, second), *others[:2]))
            assert [change.turn for change in affordable(one, 0, asked, team, 1)] == [1]
        certain = Group(TASK, (others[0], surprised(3.0, 1.0), surprised(3.0, 2.0)))
        more = replace(asked, share=1.0)
        assert [change.turn for change in affordable(certain, 0, more, team, 1)] == [0]


class TestSharedBeginnings:
    async def test_every_turn_is_sampled_once(self) -> None:
        engine = Counting(numbered, numbered)
        algorithm = row("c3", widths=(4, 3))
        setup = stage(algorithm, engine)
        groups = await played(setup, 12, tasks=2)
        assert Counter(request.agent for request in engine.asked) == {"reasoner": 8, "actor": 24}
        for one in groups:
            notes = [episode.turns[0].completion_ids for episode in one.episodes]
            assert all(notes[k] == notes[k - k % 3] for k in range(12))
            assert len(set(notes)) == 4
            copied = [[turn.copied for turn in episode.turns] for episode in one.episodes]
            assert copied == [[k % 3 > 0, False] for k in range(12)]
            assert len({episode.seed for episode in one.episodes}) == 1
        metrics = rollout_metrics(groups)
        assert metrics["tokens/reasoner"] == 2 * 8
        assert metrics["tokens/actor"] == 2 * 24

    async def test_each_is_compared_with_its_siblings(self) -> None:
        paid = {"A1": 1.0, "A2": 0.0, "B1": 1.0, "B2": 1.0}
        notes, words = iter("AB"), Counter[str]()

        def answer(request: Request) -> str:
            note = request.messages[-1].content
            words[note] += 1
            return f"{note}{words[note]}"

        class Pays(Wins):
            pass

        algorithm = row("c3", widths=(2, 2))
        engine = Counting(lambda request: next(notes), answer)
        [one] = await played(stage(algorithm, engine), 4)
        found = [replace(episode, rewards={"actor": paid[episode.turns[1].text]}) for episode in one.episodes]
        assert algorithm.credit is not None
        from kapelle.rows import Signals, TurnKey

        credit = algorithm.credit([replace(one, episodes=tuple(found))], Signals())
        first = {
            key.episode: float(each.advantage_T[0])
            for key, each in credit.items()
            if key.turn == 0 and each.weight
        }
        second = {key.episode: float(each.advantage_T[0]) for key, each in credit.items() if key.turn == 1}
        assert first == {0: pytest.approx(0.5 - 1.0), 2: pytest.approx(1.0 - 0.5)}
        assert second == {0: 1.0, 1: -1.0, 2: 0.0, 3: 0.0}
        assert credit[TurnKey(0, 1, 0)].weight == 0.0, "it was sampled once"

    @pytest.mark.slow
    async def test_worths_are_those_of_the_policies(self) -> None:
        algorithm = row("c3", widths=(4, 8))
        groups = await played(stage(algorithm, Counting(reasoner, actor)), 32, tasks=40)
        worth: dict[str, list[float]] = {}
        for one in groups:
            for start in range(0, 32, 8):
                own = one.episodes[start : start + 8]
                worth.setdefault(own[0].turns[0].text, []).extend(each.total("actor") for each in own)
        for note, exact in WINS.items():
            assert fmean(worth[note]) == pytest.approx(
                exact, abs=4 * math.sqrt(exact * (1 - exact) / len(worth[note]))
            )
