"""Programs of other people's frameworks, with the packages as they are published: played, and trained."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.serving import Reciting, Watching, staged
from tests.support.tiny import frozen_copy, same_bits

from kapelle.engines.rollout.protocol import Request
from kapelle.environments import Arithmetic
from kapelle.environments.grading.text.tool_call import parse_calls
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.plugins import find_object
from kapelle.team import Agent, Policy, Team
from kapelle.training.trainer import Trainer
from kapelle.types import Episode, Turn
from kapelle.workflows import Solo

pytestmark = pytest.mark.apps

APPS = Path(__file__).parents[2] / "examples" / "apps"
AGENTS = ("planner", "solver", "critic")
PYTHON = os.environ.get("KAPELLE_APPS_PYTHON", "")
"""The interpreter of an environment in which `requirements.txt` is installed."""

CALLERS: Mapping[str, list[tuple[str, int | None]]] = {
    "plain": [("planner", None), ("solver", 0)],
    "anthropic": [("planner", None), ("solver", 0)],
    "openai_agents": [("planner", None), ("solver", 0)],
    "langgraph": [("planner", None), ("solver", 0)],
    "pydantic_ai": [("planner", None), ("solver", 0)],
    "autogen": [("planner", None), ("solver", 0)],
    "smolagents": [("planner", None), ("solver", 0), ("planner", None)],
    "crewai": [("planner", None), ("solver", 0)],
}
"""Who speaks in an episode, and which turn called for it."""


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if not PYTHON:
        pytest.skip(
            "needs KAPELLE_APPS_PYTHON, an interpreter with tests/apps/requirements.txt: make test-apps"
        )
    # Nothing is sent to the frameworks' makers.
    for name in ("CREWAI_DISABLE_TELEMETRY", "CREWAI_DISABLE_TRACKING", "OTEL_SDK_DISABLED"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("CREWAI_TRACING_ENABLED", "false")


def play(program: Path, script: Callable[[Request], str], count: int = 1) -> list[Episode]:
    """Run episodes of a program, in which agents answer by a script."""
    team = Team(
        tuple(Agent(agent) for agent in AGENTS),
        {agent: Policy(agent, base="", trained=False) for agent in AGENTS},
        {agent: agent for agent in AGENTS},
    )
    engine = Reciting(script)
    setup = RolloutSetup(team, Arithmetic(), Solo(), engine)
    with staged(setup, engine, count, timeout=300.0, python=PYTHON, entry=f"{program}:episode") as stage:
        pass
    return stage.episodes


def test_nodes_give_rewards_and_may_fail() -> None:
    episodes = play(
        Path(__file__).with_name("node_rewards.py"), lambda request: request.messages[-1].content, 2
    )
    assert [episode.error for episode in episodes] == [None, None]
    for episode in episodes:
        assert [(turn.agent, turn.reward) for turn in episode.turns] == [("planner", 0.25), ("solver", 0.0)]
    assert [episode.rewards["solver"] for episode in episodes] == [0.5, 0.0]
    assert episodes[1].info["program"] == "LookupError('no such customer')"


@pytest.mark.parametrize("name", CALLERS)
def test_a_program_is_played_as_it_stands(name: str) -> None:
    """Its agents are those of the team, and a handoff, a tool call and a job are turns with their caller."""
    say = find_object(f"{APPS}/teacher.py:say", "teacher")

    def script(request: Request) -> str:
        # The first seeds let the planner name one job.
        text: str = say(request.agent, request.task, request.messages, 0)
        return text

    [episode] = play(APPS / f"{name}_team.py", script)
    assert episode.error is None
    spoke = [(turn.agent, turn.caller) for turn in episode.turns]
    jobs = episode.turns[0].text.splitlines() if name in ("plain", "langgraph") else [""]
    assert spoke == [CALLERS[name][0], *CALLERS[name][1:2] * len(jobs), *CALLERS[name][2:]]
    assert set(episode.rewards) == {"planner", "solver"}, "the critic said nothing"


def settings(name: str) -> list[tuple[str, str, Any]]:
    """Return section, key and value of what a program's own command sets besides the recipe."""
    [command] = re.findall(r"kapelle train (.*)", (APPS / f"{name}_team.py").read_text("utf-8"))
    given = re.findall(r" (\w+)\.(\w+)=(\S+)", re.sub(r"environment\.entry=\S+", "", command))
    return [(section, key, yaml.safe_load(value)) for section, key, value in given]


@pytest.mark.parametrize("name", CALLERS)
def test_a_program_learns_in_ten_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path / "cache"))
    recipe: dict[str, Any] = yaml.safe_load((APPS / "recipe.yaml").read_text("utf-8"))
    for word in ("name", "description", "real"):
        recipe.pop(word, None)
    for section, key, value in settings(name):
        recipe[section][key] = value
    rewards: list[float] = []
    wire = tmp_path / "wire"
    monkeypatch.setenv("WIRE", str(wire))
    monkeypatch.setenv("PROGRAM", str(APPS / f"{name}_team.py"))
    entry = f"{Path(__file__).with_name('wire.py')}:episode"
    recipe["environment"] |= {"python": PYTHON, "entry": entry, "teacher": f"{APPS}/teacher.py:say"}
    with Trainer(**recipe, observer=Watching()) as trainer:
        wire.write_text("")  # what was demonstrated is not a turn of training
        first = {agent: frozen_copy(trainer.engine.weights(agent)) for agent in AGENTS}
        episodes = []
        for step in trainer.steps():
            played = [episode for group in step.groups for episode in group.episodes]
            assert [episode.error for episode in played] == [None] * len(played)
            rewards.append(sum(episode.rewards["planner"] for episode in played) / len(played))
            episodes += played
        last = {agent: frozen_copy(trainer.engine.weights(agent)) for agent in AGENTS}
    answers = [json.loads(line) for line in wire.read_text().splitlines()]

    before, after = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    print(f"{name}: {before:.2f} before, {after:.2f} after")  # noqa: T201 - docs/programs.md has these; pytest -rP shows them
    assert after > before + 0.15, rewards
    moved = {agent for agent in AGENTS if not same_bits(first[agent], last[agent])}
    assert moved == {"planner", "solver"}, "the critic has said nothing"

    # What is trained on is what was answered, episode by episode.
    told: dict[str, Counter[tuple[object, ...]]] = {}
    for answer in answers:
        session = answer["url"].split("/sessions/")[1].split("/")[0]
        told.setdefault(session, Counter())[_of_answer(answer["said"])] += 1
    for episode in episodes:
        offered = {
            turn.agent for turn in episode.turns if any("<tools>" in m.content for m in turn.new_messages)
        }
        turns = Counter(_of_turn(turn, turn.agent in offered) for turn in episode.turns)
        assert turns == told[str(episode.info["session"])]


def _of_answer(said: Any) -> tuple[object, ...]:
    """Return agent, tokens read and written, weights, words and calls of an answer on the wire."""
    if said.get("type") == "message":  # in the form of Anthropic's API
        said = _in_openais_form(said)
    message, usage = said["choices"][0]["message"], said["usage"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(each["name"], _canonical(json.loads(each["arguments"]))) for each in functions]
    tokens = usage["prompt_tokens"], usage["completion_tokens"]
    words = "" if calls else message["content"]
    return (
        said["model"].removeprefix("team/"),
        *tokens,
        said["kapelle"]["weights_hash"],
        words,
        tuple(calls),
    )


def _in_openais_form(said: Any) -> Any:
    calls = [
        {"function": {"name": block["name"], "arguments": json.dumps(block["input"])}}
        for block in said["content"]
        if block["type"] == "tool_use"
    ]
    words = "".join(block["text"] for block in said["content"] if block["type"] == "text")
    usage = {
        "prompt_tokens": said["usage"]["input_tokens"],
        "completion_tokens": said["usage"]["output_tokens"],
    }
    return {**said, "choices": [{"message": {"content": words, "tool_calls": calls}}], "usage": usage}


def _of_turn(turn: Turn, offered: bool) -> tuple[object, ...]:
    """Return the same of a turn that is trained on; only an agent that was offered tools calls them."""
    found = _calls(turn) if offered else ()
    tokens = len(turn.prompt_ids), len(turn.completion_ids)
    return (turn.agent, *tokens, turn.weights_hash, "" if found else turn.text, found)


def _calls(turn: Turn) -> tuple[tuple[str, str], ...]:
    text, mark = turn.text, "</tool_call>"
    # The server ignores the part of the closing mark that the limit has left.
    if turn.finish_reason == "length":
        text = next((text[:-n] for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), text)
    try:
        return tuple((call.name, _canonical(call.arguments)) for call in parse_calls(text, ("hermes",)))
    except Exception:  # noqa: BLE001 - a text that breaks the form is words
        return ()


def _canonical(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True, default=str)
