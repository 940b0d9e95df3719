"""Thoughts are an agent's own: others read its words, rewards the whole completion."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.models.test_thinking import ALWAYS_OPEN
from tests.support.thinking import THINKING, thinking_tokenizer
from tests.workflows.stage import TASK, lines, play, team_of

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.rewarded import answer_of
from kapelle.models.renderer import ChatRenderer
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.settings.base import Settings
from kapelle.types import Episode, Message
from kapelle.workflow import Continued, Scene
from kapelle.workflows.chain import Chain
from kapelle.workflows.debate import Debate

THOUGHT = "<think>\nIs it 7? No.\n</think>\n\n#### 132"


async def chain(first: str, second: str, template: str = THINKING) -> Episode:
    scripts = {"a": lines(first), "b": lines(second)}
    renderer = ChatRenderer(thinking_tokenizer(template), 4096)
    [episode] = await play(Arithmetic(), Chain(), ["a", "b"], scripts, TASK, renderer=renderer)
    return episode


@pytest.mark.parametrize(
    ("text", "template"), [(THOUGHT, THINKING), (THOUGHT.removeprefix("<think>\n"), ALWAYS_OPEN)]
)
async def test_a_partner_and_the_graders_read_the_words(text: str, template: str) -> None:
    episode = await chain(text, text, template)
    assert [turn.text for turn in episode.turns] == [text, text]
    assert [turn.words for turn in episode.turns] == ["#### 132", "#### 132"]
    assert "a: #### 132" in episode.turns[1].new_messages[0].content
    assert "No." not in episode.turns[1].new_messages[0].content
    assert (episode.answer, episode.success) == ("#### 132", 1.0)
    assert answer_of(episode, episode.info) == text


@pytest.mark.parametrize(
    ("text", "template"), [("<think>\nIs it 132", THINKING), ("Is it\n#### 132", ALWAYS_OPEN)]
)
async def test_thoughts_that_were_cut_off_are_no_answer(text: str, template: str) -> None:
    episode = await chain(text, text, template)
    assert episode.turns[1].new_messages[0].content.endswith("a: ")
    assert (episode.answer, episode.success) == ("", 0.0)


async def test_a_setting_shares_them() -> None:
    team = team_of("a", "b")
    engine = ScriptedEngine({name: lines(THOUGHT) for name in team.names})
    stage = RolloutSetup(team, Arithmetic(), Chain(), engine)
    for shares in (False, True):
        [group] = await rollout(replace(stage, share_thoughts=shares), [TASK], 1, 0)
        assert ("No." in group.episodes[0].turns[1].new_messages[0].content) == shares


async def test_an_agent_keeps_its_own_by_its_template_s_rule() -> None:
    scripts = {name: lines(THOUGHT, THOUGHT) for name in ("a", "b")}
    renderer = ChatRenderer(thinking_tokenizer(), 4096)
    [episode] = await play(Arithmetic(), Debate(rounds=2), ["a", "b"], scripts, TASK, renderer=renderer)
    for turn in episode.turns[2:]:
        prompt = renderer.decode(turn.prompt_ids)
        assert "No." not in prompt
        assert "<|im_start|>assistant\n#### 132<|im_end|>" in prompt
        assert [message.role for message in turn.new_messages] == ["user", "assistant", "user"], (
            "its prompt begins anew"
        )


class Kept(Settings):
    """A program that keeps its conversation itself, as those behind the API do."""

    name: str = "kept"

    def check(self, agents: object, environment: object) -> None: ...

    async def run(self, scene: Scene) -> None:
        first = (await scene.converse({"a": Continued((Message("user", "47+85?"),), None)}))["a"]
        again = (await scene.converse({"a": Continued((Message("user", "Sure?"),), first.index)}))["a"]
        assert first.text == THOUGHT, "it reads what was sampled"
        await scene.step({"a": again.words}, final=again.words)


async def test_a_conversation_that_a_program_keeps_follows_the_template_too() -> None:
    renderer = ChatRenderer(thinking_tokenizer(), 4096)
    scripts = {"a": lines(THOUGHT, THOUGHT)}
    [episode] = await play(Arithmetic(), Kept(), ["a"], scripts, TASK, renderer=renderer)
    prompt = renderer.decode(episode.turns[1].prompt_ids)
    assert "No." not in prompt
    assert "<|im_start|>assistant\n#### 132<|im_end|>\n<|im_start|>user\nSure?" in prompt
    assert [message.role for message in episode.turns[1].new_messages] == ["user", "assistant", "user"]
