"""The adapter with a fake of the package: the same calls, with simple problems."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.workflows.stage import expert, lines, play

from kapelle.environments.adapters import reasoning_gym
from kapelle.environments.adapters.reasoning_gym import ReasoningGym, evaluated_by
from kapelle.environments.questions import split_of
from kapelle.errors import ConfigError
from kapelle.types import Split
from kapelle.workflows.parallel import Parallel

sympy: Any = importlib.import_module("sympy")


class Doubling:
    """A data set: problems by index, with a verifier."""

    def __init__(self, size: int, seed: int, largest: int = 10**6) -> None:
        self._seed, self._largest = seed, largest

    def __getitem__(self, place: int) -> dict[str, Any]:
        number = (self._seed + place) % self._largest
        return {"question": f"Twice {number}?\n", "answer": str(2 * number), "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


class Evaluating(Doubling):
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(self.read(answer) == int(entry["answer"]))

    def read(self, answer: str | None) -> int:
        return evaluate(answer)


def evaluate(answer: str | None) -> int:
    return int(sympy.sympify(answer))


def parse_expr(text: str | None) -> int:
    """A harmless function with a name of SymPy's."""
    return int(text or 0)


class Reading(Doubling):
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(parse_expr(answer) == int(entry["answer"]))


class Near(Doubling):
    """`abs(nan - x) > tolerance` is false, as in complex_arithmetic of 0.1.25."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return 0.0 if abs(float(answer or 0) - int(entry["answer"])) > 1e-3 else 1.0


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    vars(module)["create_dataset"] = lambda name, **settings: {
        "doubling": Doubling,
        "reading": Reading,
        "near": Near,
    }[name](**settings)
    vars(factory)["DATASETS"] = {
        "doubling": (Doubling, object),
        "reading": (Reading, object),
        "near": (Near, object),
        "evaluating": (Evaluating, object),
        "composite": (Doubling, object),
    }
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    reasoning_gym._load.cache_clear()
    yield
    reasoning_gym._load.cache_clear()


async def test_the_reward_is_the_score_of_the_verifier() -> None:
    environment = ReasoningGym(dataset="doubling")
    task = environment.task("train", 3)
    number = int(task.question.removeprefix("Twice ").removesuffix("?"))
    texts = {"a": f"Let me see. <answer>{2 * number}</answer>", "b": f"{2 * number}", "c": "many"}
    scripts = {name: lines(text) for name, text in texts.items()}
    [episode] = await play(environment, Parallel(), ["a", "b", "c"], scripts, task)
    assert episode.rewards == {"a": 1.0, "b": 1.0, "c": 0.01}
    [solved] = await play(environment, Parallel(), ["a"], {"a": expert(environment)}, task)
    assert solved.success == 1.0


async def test_an_answer_that_makes_the_verifier_raise_has_reward_0() -> None:
    environment = ReasoningGym(dataset="reading")
    task = environment.task("train", 0)
    for text, reward in (("twelve", 0.0), (environment.script("a", task, [], 0), 1.0)):
        [episode] = await play(environment, Parallel(), ["a"], {"a": lines(text)}, task)
        assert (episode.error, episode.rewards) == (None, {"a": reward})


def test_a_verifier_that_rewards_nonsense_is_reported() -> None:
    assert ReasoningGym(dataset="doubling").doubts() == []
    assert any("'nan'" in doubt for doubt in ReasoningGym(dataset="near").doubts())


def test_splits_are_disjoint_and_tasks_repeat() -> None:
    environment = ReasoningGym(dataset="doubling")
    train = [environment.task("train", index) for index in range(60)]
    test = [environment.task("test", index) for index in range(60)]
    assert not {task.question for task in train} & {task.question for task in test}
    assert len({task.question for task in train}) == 60
    assert all(split_of(task.question) == "test" for task in test)
    assert ReasoningGym(dataset="doubling").task("test", 7) == test[7]
    assert ReasoningGym(dataset="doubling", seed=1).task("test", 7) != test[7]


def test_too_few_questions_and_unknown_kinds_are_rejected() -> None:
    few = ReasoningGym(dataset="doubling", arguments={"largest": 1})
    other: Split = "train" if split_of("Twice 0?") == "test" else "test"
    with pytest.raises(ConfigError, match="too few"):
        few.task(other, 0)
    with pytest.raises(ConfigError, match="Did you mean 'doubling'"):
        ReasoningGym(dataset="dubling").check(["a"])
    with pytest.raises(ConfigError, match="doubling"):
        ReasoningGym(dataset="doubling", arguments={"smallest": 1}).check(["a"])


def test_verifiers_that_evaluate_text_are_rejected() -> None:
    with pytest.raises(ConfigError, match="sympify"):
        ReasoningGym(dataset="evaluating").check(["a"])
    with pytest.raises(ConfigError, match="composite"):
        ReasoningGym(dataset="composite").check(["a"])
    assert evaluated_by(Reading) is None
    assert evaluated_by(Doubling) is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        ReasoningGym(dataset="doubling").check(["a"])
