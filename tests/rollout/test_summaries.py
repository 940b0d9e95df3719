"""An agent whose conversation no longer fits writes a summary of it: a turn like its others, which only the agent reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiments.lab import Arm, TableRun, recipe_of
from tests.rollout.test_compaction import config
from tests.support.recall import LETTERS, QUESTION, Recall
from tests.support.tiny import LORA

from kapelle import Trainer
from kapelle.algorithm import Change
from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.errors import ConfigError
from kapelle.features.compaction.settings import CompactionConfig, SummaryConfig
from kapelle.rollout.episodes import continue_episode, roll_out_continuation, roll_out_episode
from kapelle.rollout.interventions import Continuation, fork_of
from kapelle.rollout.partial import PartialEpisode
from kapelle.rollout.setup import RolloutSetup
from kapelle.runs.definitions import rollout_metrics
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.setup.recipe import resolve
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode, Group, Sampling
from kapelle.workflows.play import PlayWorkflow

ASKED = "Summarise."


def remembers(request: Request) -> str:
    """Summarise the secret, and answer with it if it can still be read."""
    texts = [message.content for message in request.messages]
    known = next((letter for letter in LETTERS if any(f"Secret: {letter}" in text for text in texts)), None)
    if texts[-1] == ASKED:
        return f"Secret: {known} {{seen}}"
    return (known or "?") if texts[-1].endswith(QUESTION) else "ok"


class Continuing(ScriptedEngine):
    """Continues completions that were begun."""

    async def generate(self, request: Request) -> Completion:
        whole, begun = await super().generate(request), len(request.begun)
        return replace(whole, ids=whole.ids[begun:], logprobs=whole.logprobs[begun:])


def stage(*names: str, fillers: int = 6, summary: bool = True, over: int = 60) -> RolloutSetup:
    agents = tuple(Agent(name, sampling=Sampling(max_tokens=9, stop=("!",))) for name in names)
    rule = CompactionConfig(
        over=over, keep_first=0, keep_last=1, summary=SummaryConfig(instruction=ASKED) if summary else None
    )
    return RolloutSetup(
        Team(agents, {name: Policy(name, lora=LORA) for name in names}, {name: name for name in names}),
        Recall(seats=len(names), fillers=fillers),
        PlayWorkflow(memory="conversation"),
        Continuing(dict.fromkeys(names, remembers)),
        compaction=rule,
    )


async def rolled_out(setup: RolloutSetup, index: int = 1) -> Episode:
    return await roll_out_episode(setup, setup.environment.task("train", index), 3)


async def test_what_only_a_summary_keeps_is_known_at_the_end() -> None:
    kept, lost = await rolled_out(stage("agent")), await rolled_out(stage("agent", summary=False))
    assert (kept.error, kept.success) == (None, 1.0)
    assert (lost.error, lost.success) == (None, 0.0), "the rule removes the secret"
    summaries = [turn for turn in kept.turns if turn.summary]
    assert summaries
    for turn in summaries:
        after = kept.turns[turn.index + 1]
        assert (turn.text, turn.trained, turn.reward, after.summary) == ("Secret: B {seen}", True, 0.0, False)
        assert turn.new_messages[-1].content == ASKED
        [first] = after.new_messages
        note = f"[{after.dropped} messages are omitted here.]\n\nSecret: B {{seen}}\n\n"
        assert first.content.startswith(note)
        assert after.completed_before == turn.index + 1
    # The first summary extends the exact tokens of the conversation before it.
    before = kept.turns[summaries[0].index - 1]
    assert summaries[0].prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
    assert not any(turn.summary for turn in lost.turns)


async def test_neither_the_environment_nor_another_agent_reads_it() -> None:
    episode = await rolled_out(stage("one", "two"))
    assert episode.success == 1.0
    assert len(episode.info["said"]) == 8, "rounds are counted without summaries"
    assert not any("Secret" in text for said in episode.info["said"] for text in said.values())
    assert {turn.agent for turn in episode.turns if turn.summary} == {"one", "two"}
    moments = [turn.completed_before for turn in episode.turns]
    assert moments == sorted(moments)
    assert {moments.count(moment) for moment in moments} == {2}, "both summarise at the same moment"
    row = rollout_metrics([Group(episode.task, (episode,))])
    assert row["summary_length/one"] == len("Secret: B {seen}")
    assert load_episode(json.loads(dump_episode(episode))) == episode


async def test_a_recorded_episode_repeats_with_its_summaries() -> None:
    setup = stage("one", "two")
    whole = await rolled_out(setup)
    for count in range(1, len(whole.turns)):
        seen = whole.turns[count].completed_before
        left = PartialEpisode(whole.seed, whole.turns[:seen], whole.turns[seen:count])
        assert await continue_episode(setup, whole.task, left, 0, lambda scene: None) == whole, count
    one = next(turn for turn in whole.turns if turn.summary)
    half = replace(
        one, completion_ids=one.completion_ids[:4], logprobs=one.logprobs[:4], text="", finish_reason="length"
    )
    left = PartialEpisode(whole.seed, whole.turns[: one.completed_before], (), (half,))
    assert await continue_episode(setup, whole.task, left, 0, lambda scene: None) == whole
    for turn in whole.turns:
        fork = fork_of(whole, 0, Change("resample", (turn.agent,), turn.index))
        run = Continuation(fork, fork.record, 5)
        again = await roll_out_continuation(setup, run)
        assert fork.record.diverged(again) is None
        assert again.turns == whole.turns, turn.index


async def test_a_removed_agent_writes_no_summary() -> None:
    setup = stage("one", "two")
    whole = await rolled_out(setup)
    fork = fork_of(whole, 0, Change("remove", ("two",)))
    alone = await roll_out_continuation(setup, Continuation(fork, fork.record, 5))
    assert alone.error is None
    assert {turn.agent for turn in alone.turns if turn.summary} == {"one"}


@pytest.mark.parametrize("over", [None, 240])
def test_the_context_has_room_for_the_summary(over: int | None, tmp_path: Path) -> None:
    given = config(keep_last=2, over=over, summary={"instruction": ASKED, "max_tokens": 12})
    given["workflow"] = {"name": "debate", "rounds": 9}
    given["algorithm"] = {"name": "rloo", "group_size": 2}
    with Trainer(resolve(given), run_dir=tmp_path / "run") as trainer:
        [step] = list(trainer.steps(1))
        found = [turn for group in step.groups for e in group.episodes for turn in e.turns]
        assert all(episode.error is None for group in step.groups for episode in group.episodes)
        summaries = [turn for turn in found if turn.summary]
        assert summaries
        assert max(len(turn.prompt_ids) for turn in summaries) <= 256 - 12
        assert all(0 < len(turn.completion_ids) <= 12 for turn in summaries)
        # Unless `over` is too large for it, the summarised conversation is whole.
        assert any(turn.dropped for turn in summaries) is bool(over)
        assert step.metrics["parity/max"] < 1e-4, "it is trained as it was read"


@pytest.mark.parametrize("over", [{"algorithm": {"name": "sft"}}, {"warmup": {}}], ids=["sft", "warmup"])
def test_demonstrations_contain_no_summaries(over: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"`episode.compaction.summary` .* `(sft|warmup)` contain no summaries"
    ):
        Trainer(resolve({**config(summary={}), **over}))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "rloo", "group_size": 8},
        {"name": "at_grpo", "tree": True, "group_size": 4},
        {"name": "counterfactual", "group_size": 4},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_agents_learn_to_summarise(algorithm: dict[str, Any]) -> None:
    """The policy is a table. Its summaries are one letter, and only they reach the question: chance is 1/2."""
    over = {
        "workflow": {"name": "play", "memory": "conversation"},
        "training": {"tasks_per_step": 4},
        "episode": {
            "compaction": {
                "over": 3,
                "keep_first": 0,
                "keep_last": 1,
                "summary": {"instruction": ASKED, "max_tokens": 1},
            }
        },
    }
    game = {"name": "tests.support.recall:Recall", "seats": 1}
    run = TableRun(recipe_of(game, Arm(algorithm), 30.0, 0, **over))
    found = [run.step()[1]["success"] for _ in range(25)]
    assert sum(found[20:]) / 5 > 0.9
