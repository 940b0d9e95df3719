"""Trees: a candidate is worth what the episode pays when it is played on from it."""

from __future__ import annotations

import math
import re
from collections import Counter
from statistics import fmean, stdev
from typing import Any, cast

import pytest
from tests.support.trees import (
    NOTES,
    TASK,
    WINS,
    Counting,
    TwoSteps,
    Wins,
    WinsState,
    actor,
    at_grpo,
    candidates,
    many,
    numbered,
    reasoner,
    stage,
)

from kapelle.engines.rollout.protocol import Request
from kapelle.errors import EngineError
from kapelle.rollout.episodes import roll_out_episode
from kapelle.rows import Signals, TurnKey
from kapelle.runs.definitions import rollout_metrics
from kapelle.workflows.chain import Chain


class TestWorth:
    @pytest.mark.slow
    async def test_it_is_on_average_what_the_policies_win_from_there(self) -> None:
        groups = await many(stage(at_grpo()), 400)
        worths: dict[str, list[float]] = {}
        for one in groups:
            (episode,) = one.episodes
            assert episode.error is None
            # Candidates of one moment that say the same are one draw.
            for note, worth in {
                turn.text: turn.continuation_return for turn in candidates(episode, "reasoner")
            }.items():
                worths.setdefault(note, []).append(cast("float", worth))
            assert all(
                turn.continuation_return == float(turn.text == "win") for turn in candidates(episode, "actor")
            )
        for note, exact in WINS.items():
            own = worths[note]
            assert abs(fmean(own) - exact) < 4 * math.sqrt(exact * (1 - exact) / len(own))

    @pytest.mark.sample(2)
    @pytest.mark.slow
    @pytest.mark.parametrize("continuations", [1, 3])
    async def test_the_expected_update_of_the_first_agent_is_the_gradient_of_what_the_team_wins(
        self, continuations: int
    ) -> None:
        # Σ_k A_k ∇log π(a_k) over G candidates is (G − 1)·∇J on average; on the logits of notes
        # ∂J/∂z_a = π(a)(Q(a) − J).
        algorithm = at_grpo(4, continuations=continuations)
        groups = await many(stage(algorithm), 300)
        assert algorithm.credit is not None
        credit = algorithm.credit(groups, Signals())
        won = sum(NOTES[note] * WINS[note] for note in NOTES)
        for note, probability in NOTES.items():
            found = []
            for g, one in enumerate(groups):
                (episode,) = one.episodes
                found.append(
                    sum(
                        float(credit[TurnKey(g, 0, turn.index)].advantage_T[0])
                        * (float(turn.text == note) - probability)
                        for turn in candidates(episode, "reasoner")
                    )
                    / 3
                )
            error = stdev(found) / math.sqrt(len(found))
            exact = probability * (WINS[note] - won)
            assert abs(fmean(found) - exact) < 4 * error
            assert error < 0.03

    async def test_penalties_and_sharing_are_the_algorithms(self) -> None:
        # The actor alone is paid; `individual` leaves the reasoner nothing but the price of its words.
        costly = at_grpo(team_reward="individual", penalties={"length": 0.1, "length_limit": 1})
        (one,) = await many(stage(costly), 1)
        assert [
            turn.continuation_return for turn in candidates(one.episodes[0], "reasoner")
        ] == pytest.approx([-0.1] * 4)
        cut = {"win": 0.7, "lose": -0.4}  # 3 and 4 bytes
        for turn in candidates(one.episodes[0], "actor"):
            assert turn.continuation_return == pytest.approx(cut[turn.text])


class TestContinuing:
    async def test_only_what_follows_is_sampled_and_it_reads_the_candidate(self) -> None:
        engine = Counting(numbered, lambda r: r.messages[-1].content)
        (one,) = await many(stage(at_grpo(4, continuations=3), engine), 1)
        (episode,) = one.episodes
        notes = [turn.text for turn in candidates(episode, "reasoner")]
        assert len(set(notes)) == 4
        asked = Counter(r.agent for r in engine.asked)
        # 4 candidates; 4·3 continuations, and the actor's own 4 candidates: nothing follows those.
        assert asked == {"reasoner": 4, "actor": 4 * 3 + 4}
        continued = Counter(r.messages[-1].content for r in engine.asked if r.agent == "actor")
        assert continued == Counter(dict.fromkeys(notes, 3)) + Counter({episode.turns[0].text: 4})

    async def test_candidates_meet_the_same_luck_and_continuations_another_each(self) -> None:
        engine = Counting(numbered, lambda r: "win")
        await many(stage(at_grpo(4, continuations=3), engine), 1)
        seeds = Counter(r.seed for r in engine.asked if r.agent == "actor")
        assert sorted(seeds.values()) == [1, 1, 1, 1, 4, 4, 4]
        assert len({r.seed for r in engine.asked if r.agent == "reasoner"}) == 4

    async def test_what_is_said_does_not_depend_on_how_many_candidates_there_are(self) -> None:
        (small,) = await many(stage(at_grpo(2)), 1)
        (large,) = await many(stage(at_grpo(4)), 1)
        texts = [Counter(t.text for t in candidates(g.episodes[0], "reasoner")) for g in (small, large)]
        assert texts[0] <= texts[1]

    async def test_its_tokens_are_counted_and_not_trained_on(self) -> None:
        engine = Counting(numbered, lambda r: "win")
        (one,) = groups = await many(stage(at_grpo(4, continuations=3), engine), 1)
        assert one.episodes[0].continued == {"actor": 4 * 3 * len("win")}
        row = rollout_metrics(groups)
        assert row["tokens_continued/actor"] == 36.0
        assert row["tokens/actor"] == 36.0 + 4 * 3
        assert row["tokens/reasoner"] == 8.0
        assert "tokens_continued/reasoner" not in row
        assert row["dead_moments"] == 1.0

    async def test_a_frozen_agent_has_one_candidate_and_is_repeated_too(self) -> None:
        engine = Counting(reasoner, actor)
        (one,) = await many(stage(at_grpo(4), engine, frozen=("reasoner",)), 1)
        (episode,) = one.episodes
        assert [t.agent for t in episode.branches] == ["actor"] * 3
        assert episode.turns[0].continuation_return is None
        assert Counter(r.agent for r in engine.asked) == {"reasoner": 1, "actor": 4}


class TestFailures:
    async def test_failed_continuations_are_left_out(self) -> None:
        def falls(request: Request) -> str:
            return ["boom", "win", "half"][request.seed % 3]

        wins = 0
        for one in await many(stage(at_grpo(2, continuations=8), Counting(reasoner, falls)), 20):
            (episode,) = one.episodes
            for turn in candidates(episode, "reasoner"):
                # A mean over those that did not fail has no 0 in it.
                assert turn.continuation_return is None or 0.5 <= turn.continuation_return <= 1.0
                wins += turn.continuation_return is not None
        assert wins

    async def test_none_left_is_the_episodes_error(self) -> None:
        setup = stage(at_grpo(2), Counting(numbered, lambda r: "boom"))
        episode = await roll_out_episode(setup, TASK, 0)
        assert episode.error == (
            "EpisodeError: All continuations of a candidate failed. The first error was: EpisodeError: boom"
        )
        assert episode.continued == {"actor": 2 * len("boom")}

    async def test_an_engine_that_fails_in_a_continuation_fails_everything(self) -> None:
        def dead(request: Request) -> str:
            raise EngineError("dead")

        with pytest.raises(EngineError, match="dead"):
            await roll_out_episode(stage(at_grpo(2), Counting(reasoner, dead)), TASK, 0)

    @pytest.mark.parametrize(
        ("odd", "workflow", "how"),
        [
            ("shown", Chain(), "the prompt of 'reasoner' at its turn 1 differs from token 12 on"),
            ("paid", TwoSteps(), r"'reasoner' has the reward \d+\.0 for turn 0 .*\d+\.0"),
            (
                "over",
                TwoSteps(),
                r"it ended with 1 of the turns not replayed \(EpisodeError: the world is over\)",
            ),
        ],
    )
    async def test_a_world_that_does_not_repeat_is_the_episodes_error(
        self, odd: Any, workflow: Any, how: str
    ) -> None:
        WinsState.opened = 0
        engine = Counting(numbered, numbered)
        setup = stage(at_grpo(2), engine, environment=Wins(odd=odd), workflow=workflow)
        episode = await roll_out_episode(setup, TASK, 0)
        assert episode.error is not None
        pattern = (
            r"An episode of 'tests.support.trees:Wins' does not repeat.*: "
            + how
            + r"\. Set `algorithm\.tree: false`"
        )
        assert re.search(pattern, episode.error), episode.error
