from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.workflows.stage import TASK, lines, play, transcript

from kapelle.environment import Outcome
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.types import Task
from kapelle.workflows.dag import Dag, Node


def dag(*nodes: Mapping[str, Any], **settings: Any) -> Dag:
    return Dag(nodes=tuple(Node(**node) for node in nodes), **settings)


DIAMOND = dag(
    {"id": "plan", "agent": "a"},
    {"id": "left", "agent": "b", "dependencies": ("plan",)},
    {"id": "right", "agent": "c", "dependencies": ("plan",), "prompt": "${question}|${plan.output}"},
    {"id": "end", "agent": "a", "dependencies": ("left", "right")},
)


async def test_nodes_run_after_their_dependencies_and_the_last_one_answers() -> None:
    scripts = {
        "a": lambda r: (
            "132" if "c: " in r.messages[-1].content or "right" in r.messages[-1].content else "units"
        ),
        "b": lines("12"),
        "c": lines("12+1"),
    }
    [episode] = await play(Arithmetic(), DIAMOND, ["a", "b", "c"], scripts, TASK)
    assert transcript(episode) == [
        "0 seen=0 47+85 -> a: units",
        "1 seen=1 47+85\n\nplan: units -> b: 12",
        "2 seen=1 47+85|units -> c: 12+1",
        "3 seen=3 47+85\n\nplan: units\n\nleft: 12\n\nright: 12+1 -> a: 132",
    ]
    assert episode.rewards == {"a": 1.0}
    assert episode.success == 1.0
    assert episode.turns[3].prompt_ids == tuple(b"user: 47+85\n\nplan: units\n\nleft: 12\n\nright: 12+1\n"), (
        "a node reads its prompt alone, not its agent's earlier turns"
    )


async def test_agents_by_number_and_one_agent_in_two_nodes_of_a_layer() -> None:
    workflow = dag(
        {"id": "x", "agent_group": 0},
        {"id": "y", "agent_group": 1},
        {"id": "z", "agent_group": 0, "prompt": "${question}?"},
        {
            "id": "end",
            "agent_group": 1,
            "dependencies": ("x", "y", "z"),
            "prompt": "${x.output}${y.output}${z.output}",
        },
    )
    scripts = {"a": lambda r: "1" if r.messages[-1].content == "47+85" else "2", "b": lines("3")}
    [episode] = await play(Arithmetic(), workflow, ["a", "b"], scripts, TASK)
    assert transcript(episode) == [
        "0 seen=0 47+85 -> a: 1",
        "1 seen=0 47+85 -> b: 3",
        "2 seen=2 47+85? -> a: 2",
        "3 seen=3 132 -> b: 3",
    ]


async def test_nodes_define_rewards_and_the_answer() -> None:
    workflow = dag(
        {"id": "x", "agent": "a", "rewards_with_env": True},
        {"id": "y", "agent": "b", "rewards_with_env": True},
        answer="x",
    )
    scripts = {"a": lines("132"), "b": lines("1")}
    [episode] = await play(Arithmetic(), workflow, ["a", "b"], scripts, TASK)
    assert episode.rewards == {"a": 1.0, "b": 0.0}
    assert episode.success == 1.0


async def test_an_agent_s_text_cannot_change_a_template() -> None:
    workflow = dag(
        {"id": "x", "agent": "a"},
        {"id": "y", "agent": "b", "dependencies": ("x",), "prompt": "<${x.output}>"},
    )
    scripts = {"a": lines("${question} ${x.output}"), "b": lines("132")}
    [episode] = await play(Arithmetic(), workflow, ["a", "b"], scripts, TASK)
    assert episode.turns[1].new_messages[0].content == "<${question} ${x.output}>"


OURS = """
def pre_process(prompt, word="", **rest):
    return f"{word} {prompt}"

def post_process(prompt, response, **rest):
    return f"[{prompt}/{response}]"
"""

SIIRLS = """
def pre_process(tokenizer, prompt_id, obs, **kwargs):
    answered = tokenizer.encode(f"|{obs}") if obs else []
    return tokenizer.encode(kwargs["before"]) + prompt_id + answered

def post_process(tokenizer, prompt_id, response_id, **kwargs):
    return prompt_id + tokenizer.encode(" then ") + response_id
"""


@pytest.mark.parametrize(
    ("source", "kwargs", "first", "second"),
    [
        (OURS, {"word": "Do"}, "Do 47+85", "[47+85/ü]!"),
        (SIIRLS, {"before": "Do "}, "Do 47+85", "47+85 then ü!"),
    ],
)
async def test_custom_functions_before_and_after_a_node(
    tmp_path: Path, source: str, kwargs: Mapping[str, str], first: str, second: str
) -> None:
    (tmp_path / "process.py").write_text(source)
    path = str(tmp_path / "process.py")
    workflow = dag(
        {"id": "x", "agent": "a", "process_path": path, "pre_process_kwargs": kwargs},
        {"id": "y", "agent": "b", "dependencies": ("x",), "prompt": "${prompt}!"},
    )
    [episode] = await play(Arithmetic(), workflow, ["a", "b"], {"a": lines("ü"), "b": lines("132")}, TASK)
    assert episode.error is None
    assert [turn.new_messages[0].content for turn in episode.turns] == [first, second]


async def test_a_function_that_returns_something_else_makes_a_failed_episode(tmp_path: Path) -> None:
    (tmp_path / "process.py").write_text("def pre_process(prompt): return 3 if '47' in prompt else prompt")
    workflow = dag({"id": "x", "agent": "a", "process_path": str(tmp_path / "process.py")})
    [episode] = await play(Arithmetic(), workflow, ["a"], {"a": lines("132")}, TASK)
    assert episode.error is not None
    assert "returned int, not a string" in episode.error


class Patient(Arithmetic):
    """Takes three attempts and says after each that it was wrong."""

    def start(self, task: Task, agents: Sequence[str], seed: int) -> PatientState:  # type: ignore[override]
        return PatientState()


class PatientState:
    def __init__(self) -> None:
        self.new_messages: list[str] = []

    def observe(self, agent: str) -> str:
        return "again" if self.new_messages else "47+85"

    def movers(self) -> tuple[str, ...]:
        return () if len(self.new_messages) == 3 else ("a", "b")

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        self.new_messages.append(str(final))
        return dict.fromkeys(actions, 0.25)

    def outcome(self) -> Outcome:
        return Outcome({}, 0.0, {"new_messages": self.new_messages})

    async def close(self) -> None: ...


@pytest.mark.parametrize(("turns", "played"), [(1, 1), (2, 2), (9, 3)])
async def test_the_graph_runs_until_the_episode_ends(turns: int, played: int) -> None:
    workflow = dag(
        {"id": "x", "agent": "a"},
        {"id": "y", "agent": "b", "dependencies": ("x",)},
        max_assistant_turns=turns,
    )
    scripts = {"a": lines("1"), "b": lines("2")}
    [episode] = await play(Patient(), workflow, ["a", "b"], scripts, TASK)
    assert episode.error is None
    assert len(episode.turns) == 2 * played
    assert [turn.reward for turn in episode.by("b")] == [0.25] * played
    if played > 1:
        assert episode.turns[2].new_messages[0].content == "47+85\n\nx: 1\n\ny: 2\n\nagain"
        assert episode.turns[3].new_messages[0].content == "47+85\n\nx: 1\n\ny: 2\n\nagain\n\nx: 1"


async def test_a_node_can_read_the_task_without_observations() -> None:
    workflow = dag({"id": "x", "agent": "a", "obs_with_env": False}, max_assistant_turns=2)
    [episode] = await play(Patient(), workflow, ["a"], {"a": lines("1")}, Task("t", "the task"))
    assert [turn.new_messages[0].content for turn in episode.turns] == ["the task", "the task\n\nx: 1"]


def test_unsupported_combinations_raise_an_error() -> None:
    two = [Agent("a"), Agent("b")]
    x, y = {"id": "x", "agent": "a"}, {"id": "y", "agent": "b", "dependencies": ("x",)}
    for workflow, says in (
        (dag({**x, "dependencies": ("y",)}, y), "x <- y <- x"),
        (dag(x, {**y, "dependencies": ("z",)}), r"unknown node 'z'"),
        (dag(x, {**y, "agent": "c"}), r"Node 'y' refers to the unknown agent 'c'"),
        (dag(x, {**y, "agent_group": 1}), "Set one of them"),
        (dag({"id": "x"}), "Set one of them"),
        (
            dag(x, {"id": "y", "agent_group": 2, "dependencies": ("x",)}),
            "agent_group: 2",
        ),
        (dag(x), "Agent 'b' has no node"),
        (dag(x, x, y), r"has the id 'x' twice"),
        (dag(x, {"id": "y", "agent": "b"}), "workflow.answer"),
        (dag(x, y, answer="yy"), r"answer refers to the unknown node 'yy'. Did you mean 'y'"),
        (dag(x, {**y, "prompt": "${x.outptu}"}), r"uses \$\{x.outptu\}.*Did you mean 'x.output'"),
        (dag({**x, "prompt": "${y.output}"}, y), r"The prompt of node 'x' uses \$\{y.output\}"),
        (dag({**x, "process_path": "gone.py"}, y), r"the file 'gone.py' does not exist"),
        (dag({**x, "process_path": "no_such_module_here"}, y), r"cannot be imported"),
        (dag({**x, "process_path": "json"}, y), r"defines neither"),
        (
            dag(
                {**x, "rewards_with_env": True},
                y,
                {"id": "z", "agent": "a", "rewards_with_env": True},
                answer="z",
            ),
            r"Two nodes of agent 'a'",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            workflow.check(two, Arithmetic())
    with pytest.raises(ConfigError, match="is a game of moves"):
        dag(x, y).check(two, Matrix())
    with pytest.raises(ConfigError, match="Remove `prompt` of agent 'b'"):
        dag(x, y).check([Agent("a"), Agent("b", prompt="{question}")], Arithmetic())


def test_the_drawing_names_nodes_and_agents() -> None:
    assert DIAMOND.mermaid(["a", "b", "c"]).splitlines() == [
        "flowchart TD",
        '    n0["plan: a"]',
        '    n1["left: b"]',
        '    n2["right: c"]',
        '    n3((("end: a")))',
        "    n0 --> n1",
        "    n0 --> n2",
        "    n1 --> n3",
        "    n2 --> n3",
    ]
