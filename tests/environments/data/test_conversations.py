"""Rows of messages are rendered by the chat template, with roles, tool calls and tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.tool_templates import QWEN

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment
from kapelle.environments import Math, Preferences, Rewarded, Trajectories
from kapelle.environments.rewarded import Reward, RowsInMemory, rows_in_memory
from kapelle.errors import DataError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode, Message
from kapelle.workflows import Chain, Parallel, Solo

RENDERER = QWEN.renderer()
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
]
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
]


def rendered(messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = True) -> str:
    """Return the template's text of plain messages."""
    rows = [{**message} for message in messages]
    return str(
        RENDERER.tokenizer.apply_chat_template(rows, tools, tokenize=False, add_generation_prompt=prompt)
    )


async def episode(environment: Environment, workflow: Any = None, *agents: Agent) -> Episode:
    """Return an episode of the first task with agents that answer `ok`, or the record."""
    team_agents = agents or (Agent("solver"),)
    team = Team(
        team_agents,
        {a.name: Policy(a.name, base="", trained=False) for a in team_agents},
        {a.name: a.name for a in team_agents},
    )

    def say(request: Any) -> str:
        if isinstance(environment, Preferences | Trajectories):
            turn = sum(message.role == "assistant" for message in request.messages)
            record = environment.recorded(request.agent, request.task, turn, request.sample)
            return RENDERER.answer(record) if isinstance(record, Message) else record
        return "ok"

    engine = ScriptedEngine({a.name: say for a in team_agents}, {a.name: RENDERER for a in team_agents})
    stage = RolloutSetup(team, environment, workflow or Solo(), engine)
    environment.check(team.names)
    [group] = await rollout(stage, [environment.task("train", 0)], 1, 0)
    [one] = group.episodes
    assert one.error is None, one.error
    return one


def rewarded(*rows: Mapping[str, Any], **settings: Any) -> Rewarded:
    made = Rewarded.model_validate(
        {
            "path": "in-memory",
            "eval_path": "none",
            "rewards": [Reward(function="in-memory:one")],
            **settings,
        }
    )
    return made.holding(RowsInMemory(rows_in_memory(rows, "dataset"), (), {"one": lambda: 1.0}))


def file_of(place: Path, *rows: Mapping[str, Any]) -> str:
    for split in ("train", "test"):
        other = [{**row, "id": split} for row in rows]
        text = "".join(json.dumps(row) + "\n" for row in other)
        (place / f"{split}.jsonl").write_text(text.replace("1+1", "3+3") if split == "test" else text)
    return str(place)


def prompt_of(one: Episode, turn: int = 0) -> str:
    return RENDERER.decode(one.turns[turn].prompt_ids)


SHAREGPT = [
    {"from": "human", "value": "1+1"},
    {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1, "b": 1}})},
    {"from": "observation", "value": "2"},
]


@pytest.mark.parametrize(
    ("row", "messages", "tools"),
    [
        ({"prompt": HISTORY}, HISTORY, None),
        ({"messages": [*HISTORY, {"role": "assistant", "content": "4"}]}, HISTORY, None),
        ({"prompt": CALLING}, CALLING, None),
        ({"prompt": CALLING, "tools": [TOOL]}, CALLING, [TOOL]),
        ({"prompt": CALLING, "tools": json.dumps([TOOL["function"]])}, CALLING, [TOOL]),
        (
            {"prompt": [{**m, "name": m.get("name"), "tool_calls": m.get("tool_calls")} for m in CALLING]},
            CALLING,
            None,
        ),
        ({"conversations": SHAREGPT}, CALLING, None),
        ({"prompt": "1+1", "tools": [TOOL]}, CALLING[:1], [TOOL]),
        ({"prompt": [{"role": "developer", "content": "Be brief."}, *HISTORY[1:]]}, HISTORY, None),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}]}, CALLING[:1], None),
        ({"prompt": "1+1"}, CALLING[:1], None),
        ({"conversations": HISTORY[1:], "system": "Be brief."}, HISTORY, None),
    ],
)
async def test_a_prompt_is_rendered_as_a_conversation(
    row: dict[str, Any], messages: list[dict[str, Any]], tools: Any
) -> None:
    one = await episode(rewarded(row))
    assert prompt_of(one) == rendered(messages, tools)


async def test_tools_of_a_row_stay_inside_an_agents_prompt(tmp_path: Path) -> None:
    row = {"prompt": "1+1", "tools": [TOOL]}
    one = await episode(rewarded(row), Solo(), Agent("solver", prompt="Solve this: {question}"))
    assert prompt_of(one) == rendered([{"role": "user", "content": "Solve this: 1+1"}], [TOOL])
    row = {**row, "choices": ["2", "3"], "answer": "A"}
    two = await episode(Math(path=file_of(tmp_path, row), question_field="prompt"))
    assert prompt_of(two) == rendered([{"role": "user", "content": "1+1\n\nA. 2\nB. 3"}], [TOOL])


def test_a_result_has_the_name_of_its_call() -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ba"]
    row = {"prompt": [CALLING[0], {"role": "assistant", "content": None, "tool_calls": calls}, *results]}
    [read] = rewarded(row).task("train", 0).messages
    assert [json.loads(message.structured or "")["name"] for message in read[2:]] == ["b", "a"]


async def test_agents_with_the_question_in_their_prompt_read_its_history() -> None:
    agents = (
        Agent("planner"),
        Agent("coder", prompt="Plan: {planner}\n{question}"),
        Agent("judge", prompt="Rate {coder}"),
    )
    one = await episode(rewarded({"prompt": HISTORY}), Chain(), *agents)
    question = [{"role": "user", "content": "Plan: ok\nand 2+2?"}]
    assert prompt_of(one) == rendered(HISTORY)
    assert prompt_of(one, 1) == rendered([*HISTORY[:3], *question])
    assert prompt_of(one, 2) == rendered([HISTORY[0], {"role": "user", "content": "Rate ok"}])


async def test_the_mathematics_environment_reads_conversations(tmp_path: Path) -> None:
    one = await episode(Math(path=file_of(tmp_path, {"question": HISTORY, "answer": "4"})))
    assert prompt_of(one) == rendered(HISTORY)


ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": HISTORY, "chosen": "4", "rejected": "5"},
        {"prompt": HISTORY, "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "5"}]},
        {"chosen": [*HISTORY, ANSWER], "rejected": [*HISTORY, {**ANSWER, "content": "5"}]},
        {"prompt": None, "chosen": [*HISTORY, ANSWER], "rejected": [*HISTORY, {**ANSWER, "content": "5"}]},
        {"prompt": HISTORY, "chosen": [*HISTORY, ANSWER], "rejected": [*HISTORY, {**ANSWER, "content": "5"}]},
        {
            "prompt": HISTORY[:2],
            "chosen": [*HISTORY[2:], ANSWER],
            "rejected": [*HISTORY[2:], {**ANSWER, "content": "5"}],
        },
        {
            "chosen": "\n\nHuman: 1+1\n\nAssistant: 2\n\nHuman: and 2+2?\n\nAssistant: 4",
            "rejected": "\n\nHuman: 1+1\n\nAssistant: 2\n\nHuman: and 2+2?\n\nAssistant: 5",
        },
    ],
)
async def test_both_answers_of_a_pair_follow_the_same_conversation(
    row: dict[str, Any], tmp_path: Path
) -> None:
    one = await episode(Preferences(path=file_of(tmp_path, row)))
    history = HISTORY if "Human" not in str(row["chosen"]) else HISTORY[1:]
    assert prompt_of(one) == rendered(history)
    assert (one.turns[0].text, one.rewards) == ("4", {"solver": 1.0})


OTHER = [*HISTORY[2:3], {"role": "user", "content": "?"}, ANSWER]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*HISTORY, ANSWER], "rejected": [*HISTORY[:2], *OTHER]},
        {"prompt": HISTORY[:2], "chosen": [*HISTORY[2:], ANSWER], "rejected": OTHER},
        {"prompt": HISTORY, "chosen": HISTORY[1:2], "rejected": ANSWER},
    ],
)
def test_a_pair_with_different_conversations_is_an_error(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1"):
        Preferences(path=file_of(tmp_path, row)).check(["solver"])


@pytest.mark.parametrize("tools", [None, [TOOL]])
async def test_a_recorded_conversation_with_tools_has_the_tokens_of_the_template(
    tools: Any, tmp_path: Path
) -> None:
    messages = [*CALLING, {"role": "assistant", "content": "It is 2."}]
    row = {"messages": messages, **({} if tools is None else {"tools": tools})}
    one = await episode(Trajectories(path=file_of(tmp_path, row)), Parallel())
    last = one.turns[-1]
    assert (
        RENDERER.decode([*last.prompt_ids, *last.completion_ids])
        == rendered(messages, tools, prompt=False).rstrip()
    )
    assert [turn.prompt_ids[: len(one.turns[0].prompt_ids)] for turn in one.turns] == [
        one.turns[0].prompt_ids
    ] * 2
    assert one.rewards == {"solver": 1.0}


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"prompt": HISTORY[:2], "completion": [*HISTORY[2:], ANSWER]}, [HISTORY[:2], HISTORY]),
        ({"prompt": HISTORY[:2], "completion": [*HISTORY[:2], ANSWER]}, [HISTORY[:2]]),
        ({"prompt": HISTORY, "completion": [ANSWER]}, [HISTORY]),
        ({"conversations": [ANSWER, *HISTORY]}, [[HISTORY[0], ANSWER, HISTORY[1]]]),
        (
            {"messages": [*HISTORY[:3], ANSWER, HISTORY[3], ANSWER]},
            [HISTORY[:2], [*HISTORY[:3], ANSWER, HISTORY[3]]],
        ),
    ],
)
async def test_every_answer_of_a_record_follows_the_messages_before_it(
    row: dict[str, Any], read: list[list[dict[str, Any]]], tmp_path: Path
) -> None:
    one = await episode(Trajectories(path=file_of(tmp_path, row)), Parallel())
    assert [prompt_of(one, turn) for turn in range(len(one.turns))] == [rendered(each) for each in read]
    assert one.turns[-1].text == ("2" if "conversations" in row else "4")


async def test_a_prompt_column_precedes_a_question_column() -> None:
    made = rewarded({"question": "1+1", "prompt": HISTORY})
    assert prompt_of(await episode(made)) == rendered(HISTORY)
    assert "`prompt`" in made.remarks()[0]
    assert rewarded({"question": "1+1", "prompt": HISTORY}, question_field="question").remarks() == ()
    assert prompt_of(await episode(rewarded({"question": HISTORY, "prompt": None}))) == rendered(HISTORY)


WHOLE = rendered(HISTORY)


@pytest.mark.parametrize("before", ["", "Continue: "])
async def test_a_rendered_prompt_is_reported_and_can_be_used_unchanged(before: str) -> None:
    wrapped = rewarded({"prompt": before + WHOLE}, {"prompt": "1+1"})
    assert "1 of 2 prompts" in wrapped.remarks()[0]
    plain = rewarded({"prompt": WHOLE, "tools": [TOOL]}, rendered_prompts=True)
    assert plain.remarks() == ()
    assert prompt_of(await episode(plain)) == WHOLE


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "narrator", "content": "1+1"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c1"}]},
            {"role": "user", "content": "?"},
        ],
    ],
)
def test_an_unreadable_message_is_an_error(messages: Any) -> None:
    with pytest.raises(DataError, match="Row 1"):
        rewarded({"prompt": messages}).check(["solver"])
