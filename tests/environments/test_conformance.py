"""Every built-in environment conforms, and each check finds its fault."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from kapelle.environment import Answerable, Outcome, Scripted, environment_class, offers
from kapelle.environments import BUILTIN, BaseEnvironment, BaseState
from kapelle.environments.grading.verdict import Grade, no_answer, right, wrong
from kapelle.environments.matrix import Matrix
from kapelle.environments.questions import QuestionState
from kapelle.rollout.conformance import Finding, Private, conform
from kapelle.settings.base import Settings
from kapelle.types import Message, Split, Task

SUMS = {"name": "arithmetic"}
READY: Mapping[str, Mapping[str, Any]] = {
    "arithmetic": {},
    "matrix": {},
    "algebra": {"kinds": ("equation", "inequality"), "difficulty": (1, 5)},
    "word_problems": {"difficulty": (1, 8)},
    "multi_step": {"difficulty": (1, 20)},
    "debate_topics": {"sides": ("A", "B", "C"), "reward": "zero_sum"},
    "mixture": {"parts": {"sums": {"environment": SUMS}, "chains": {"environment": {"name": "multi_step"}}}},
    "tools": {"questions": SUMS},
    "proposals": {"proposer": "agent_0", "problems": {"operators": ("+", "-", "*", "/"), "operations": 2}},
    "conversation": {"user": "agent_1", "satisfaction": "user"},
    "tool_tasks": {"kinds": ("calculator", "search", "notes", "calendar")},
    "plan_path": {"side": 4, "difficulty": (1, 5), "local_reward": 0.5},
    "sudoku": {},
    "sokoban": {"reward": "success"},
    "sum_game": {"number_of_cases": 3},
    "relay": {},
    "hidden_sign": {},
    "speaker": {"speaker": "leads", "other_play": True},
    "long_game": {},
    "essay": {},
    "sum_lists": {},
    "unequal": {"anyway": (0.0, 0.5)},
}
"""Environments without dependencies, with settings that cover them."""

DATA: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "math": ("gsm8k", {}),
    "gsm8k_steps": ("gsm8k", {}),
    "nli": ("anli", {"train": "r1_dev", "test": "r2_dev"}),
    "bfcl": ("bfcl", {}),
}
"""Environments over real data → the folder under $KAPELLE_DATA, and settings."""

PACKAGES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "openspiel": ("pyspiel", {}),
    "gymnasium": ("gymnasium", {"id": "FrozenLake-v1"}),
    "pettingzoo": ("pettingzoo", {"path": "tests.environments.adapters.zoo_games"}),
    "textarena": ("textarena", {}),
    "reasoning_gym": ("reasoning_gym", {}),
    "squares": ("PIL", {}),
}
"""Environments with a package → the module to import, and settings."""

ELSEWHERE = {
    "code": "each check runs programs in a sandbox",
    "benchmark": "no training tasks: tests/environments/benchmarks",
    "summarisation": "partial scores: tests/environments/test_texts.py",
    "translation": "partial scores: tests/environments/test_texts.py",
    "plain": "depends on the wrapped class",
    "siirl_env": "depends on the wrapped class",
    "trajectories": "recorded answers",
    "preferences": "recorded answers",
    "labelled": "recorded answers",
    "rewarded": "reward functions: tests/environments/rewarded/test_environment.py",
    "reward_server": "a reward server: tests/services/reward/test_client.py",
    "remote": "depends on its server: tests/environments/remote",
    "inspect": "a separate environment: tests/apps/test_inspect.py",
    "openenv": "depends on its server: tests/apps/test_openenv.py",
    "verifiers": "a separate environment: tests/apps/test_verifiers.py",
    "verifiers_v1": "a separate environment: tests/apps/test_verifiers_v1.py",
    "task_folders": "each check runs tests in a sandbox: tests/environments/task_folders/test_environment.py",
    "coding_agent": "an outside program: tests/services/policy/test_coding_agents.py",
    "external": "an outside program: tests/services/policy/test_outside.py",
}
"""Built-in environments without these checks, and why."""


def test_every_environment_is_listed() -> None:
    held = {*READY, *DATA, *PACKAGES, *ELSEWHERE}
    assert set(BUILTIN) == held, "Add new environments to READY, DATA, PACKAGES, or ELSEWHERE with a reason."


async def _failed(name: str, settings: Mapping[str, Any]) -> list[Finding]:
    findings = await conform(environment_class(name)(**settings))
    assert findings[-1].name == "cheating", "all checks ran"
    return [finding for finding in findings if finding.status == "failed"]


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", READY)
async def test_a_built_in_environment_conforms(name: str) -> None:
    assert await _failed(name, READY[name]) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
async def test_an_environment_over_real_data_conforms(name: str, data_folder: Path) -> None:
    folder, settings = DATA[name]
    if not (data_folder / folder).is_dir():
        pytest.skip(f"the folder {data_folder} holds no {folder}")
    assert await _failed(name, {"path": str(data_folder / folder), **settings}) == []


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
async def test_an_environment_over_a_package_conforms(name: str) -> None:
    package, settings = PACKAGES[name]
    pytest.importorskip(package)
    assert await _failed(name, settings) == []


class Word(Settings, Answerable, Scripted, Private):
    """The answer is the word; `fault` names the fault of this environment."""

    name: Literal["tests.environments.test_conformance:Word"] = "tests.environments.test_conformance:Word"
    fault: str = ""
    calls: list[int] = []  # noqa: RUF012 - a field of pydantic's, copied for each instance

    @property
    def reward_range(self) -> tuple[float, float]:
        return (0.0, float("inf")) if self.fault == "range" else (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": "words", "test": "other words"}

    def check(self, agents: Sequence[str]) -> None:
        pass

    def size(self, split: Split) -> int:
        return 5

    def task(self, split: Split, index: int) -> Task:
        if self.fault == "forgetful":
            self.calls.append(1)
            index = len(self.calls)
        word = f"{split}{index}"
        if self.fault == "process":
            numbers = {"one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"}
            word = "".join(sorted(numbers, key=hash)) + word
        if self.fault == "shared":
            word = f"word{index}"
        data: dict[str, Any] = {"word": word}
        if self.fault == "data kind":
            data["word"], data["more"] = word, (1, 2)
        return Task("same" if self.fault == "id" else f"{split}-{index}", f"say {word}", data)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> Any:
        return WordState(self.fault, task, tuple(agents))

    def extract(self, text: str) -> str | None:
        return text.strip() or None

    def script(self, agent: str, task: Task, new_messages: Sequence[Message], seed: int) -> str:
        return "wrong" if self.fault == "script" else str(task.data["word"])

    def private(self, task: Task, agent: str, agents: Sequence[str]) -> Sequence[str]:
        return [f"secret of {agent}"]


class WordState(QuestionState):
    def __init__(self, fault: str, task: Task, agents: tuple[str, ...]) -> None:
        super().__init__(task, agents, self._judge, {"list": (1,)} if fault == "info" else {})
        self.fault, self.looked = fault, 0

    def _judge(self, text: str) -> Grade:
        word = str(self.task.data["word"])
        if not text.strip():
            return right("empty") if self.fault == "empty" else no_answer("nothing")
        if self.fault == "question" and text == self.task.question:
            return right(text)
        if self.fault == "anything" and not text.startswith("9"):
            return right(text)
        return right(text) if text == word else wrong(text[:9], word)

    def observe(self, agent: str) -> str:
        self.looked += 1
        secrets = self.agents if self.fault == "leak" else (agent,)
        counted = f" look {self.looked}" if self.fault == "look" else ""
        return f"{super().observe(agent)} {' '.join(f'secret of {a}' for a in secrets)}{counted}"

    def movers(self) -> tuple[str, ...]:
        return self.agents if self.fault == "endless" else super().movers()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        if self.fault == "endless":
            return {}
        return await super().step(actions, final)

    def outcome(self) -> Outcome:
        made = super().outcome()
        if self.fault == "dice":
            return Outcome({agent: random.random() for agent in made.rewards}, made.success)
        if self.fault == "stranger":
            return Outcome({**made.rewards, "nobody": 1.0}, made.success)
        if self.fault == "too much":
            return Outcome(dict.fromkeys(made.rewards, 2.0), made.success)
        if self.fault == "success":
            return Outcome(made.rewards, 7.0)
        if self.fault == "seat":
            return Outcome({**made.rewards, self.agents[0]: 0.0}, made.success)
        return made


async def test_a_correct_environment_conforms() -> None:
    environment = Word()
    assert offers(environment, Private)
    assert {f.status for f in await conform(environment)} == {"ok"}


FAULTS = {
    "forgetful": ("tasks", "differs"),
    "id": ("tasks", "one id"),
    "data kind": ("tasks", "JSON"),
    "process": ("other process", "makes different tasks"),
    "shared": ("splits", "share"),
    "dice": ("determinism", "differs"),
    "look": ("private views", "depends"),
    "range": ("description", "finite"),
    "stranger": ("determinism", "nobody"),
    "too much": ("rewards", "2.0"),
    "success": ("rewards", "success 7.0"),
    "endless": ("determinism", "2,000 steps"),
    "seat": ("symmetry", "exchanging"),
    "script": ("gold", "1.0"),
    "empty": ("cheating", "''"),
    "question": ("cheating", "'say train0'"),
    "anything": ("cheating", "full reward"),
}
"""Fault → the check that finds it and a word of its message."""


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
async def test_each_fault_is_found_by_its_check(fault: str) -> None:
    check, word = FAULTS[fault]
    findings = {f.name: f for f in await conform(Word(fault=fault))}
    assert findings[check].status == "failed"
    assert re.search(word, findings[check].detail), findings[check].detail


async def test_a_secret_that_another_agent_sees_is_found() -> None:
    [finding] = [f for f in await conform(Word(fault="leak"), ["a", "b"]) if f.name == "private views"]
    assert finding.status == "failed"
    assert "'secret of a'" in finding.detail


class Hints(BaseEnvironment, Private, Scripted):
    """One agent knows a word and gives hints, the other guesses. With `leaky` the guesser sees the word after the first hint."""

    name: Literal["tests.environments.test_conformance:Hints"] = "tests.environments.test_conformance:Hints"
    leaky: bool = False
    reveals: bool = False

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": "words", "test": "other words"}

    def task(self, split: Split, index: int) -> Task:
        return Task(f"{split}-{index}", "", {"word": f"{split}word{index}"})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> Any:
        return HintsState(task, agents, self.leaky)

    def private(self, task: Task, agent: str, agents: Sequence[str]) -> Sequence[str]:
        return (str(task.data["word"]),) if agent == agents[0] else ()

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        return str(task.data["word"]) if self.reveals else "it is long"


class HintsState(BaseState):
    def __init__(self, task: Task, agents: Sequence[str], leaky: bool) -> None:
        super().__init__(task, agents)
        self.texts: list[str] = []
        self.leaky = leaky

    def movers(self) -> tuple[str, ...]:
        return () if len(self.texts) == 4 else (self.agents[len(self.texts) % 2],)

    def observe(self, agent: str) -> str:
        word = str(self.task.data["word"])
        knows = agent == self.agents[0] or (self.leaky and len(self.texts) > 1)
        return f"The word is {word}. {self.texts}" if knows else f"Guess. {self.texts}"

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        self.texts += actions.values()
        return {}


async def test_a_leak_after_a_step_is_found() -> None:
    findings = {f.name: f for f in await conform(Hints(), ["hinter", "guesser"])}
    assert findings["private views"].status == "ok"
    findings = {f.name: f for f in await conform(Hints(leaky=True), ["hinter", "guesser"])}
    assert findings["private views"].status == "failed"
    assert "after step 2: 'trainword0'" in findings["private views"].detail


async def test_a_text_that_its_owner_wrote_is_no_secret() -> None:
    findings = {f.name: f for f in await conform(Hints(reveals=True), ["hinter", "guesser"])}
    assert findings["private views"].status == "ok"


class Greeting(Hints):
    """A game whose tasks all have the same question."""

    name: Literal["tests.environments.test_conformance:Greeting"] = (
        "tests.environments.test_conformance:Greeting"  # type: ignore[assignment]
    )

    def task(self, split: Split, index: int) -> Task:
        return replace(super().task(split, index), question="Guess the word.")


async def test_one_question_for_all_tasks_is_a_finding() -> None:
    findings = {f.name: f for f in await conform(Greeting(), ["hinter", "guesser"])}
    assert findings["splits"].status == "failed"


class Unequal(Matrix):
    """Declares interchangeable roles, which they are not."""

    @property
    def symmetric(self) -> bool:
        return True


@pytest.mark.slow
async def test_declared_symmetry_is_checked() -> None:
    game = Unequal(game="custom", payoffs={"AA": (0, 1), "AB": (5, 2), "BA": (3, 9), "BB": (7, 6)})
    [finding] = [f for f in await conform(game) if f.name == "symmetry"]
    assert finding.status == "failed"
    fair = Unequal(game="prisoners_dilemma")
    [finding] = [f for f in await conform(fair) if f.name == "symmetry"]
    assert finding.status == "ok"
