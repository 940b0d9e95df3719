"""Environments for the package verifiers, as its users write them: single turns, a conversation, tools.

`vf.load_environment("vf-sums", kind=…)` finds this module where the tests' folder is on the path.
"""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset


def _rows(first: int, count: int) -> Dataset:
    return Dataset.from_list(
        [{"question": f"{k}+{k + 1}", "answer": str(2 * k + 1)} for k in range(first, first + count)]
    )


def right(parser: Any, completion: Any, answer: str) -> float:
    return float(parser.parse_answer(completion) == answer)


async def short(completion: Any) -> float:
    await asyncio.sleep(0)
    return float(len(completion[-1]["content"]) <= 40)


def length(completion: Any) -> float:
    return float(len(completion[-1]["content"]))


def broken(completion: Any) -> float:
    raise KeyError("no such column")


def together(completions: Any) -> list[float]:
    return [0.0 for _ in completions]


class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
    """Guess a number; the environment says higher or lower, and ends the episode itself."""

    async def env_response(self, messages: Any, state: Any, **given: Any) -> Any:
        said, gold = messages[-1]["content"], int(state["answer"])
        if said == "crash":
            raise RuntimeError("the guess broke the game")
        if said.isdigit() and int(said) == gold:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if not said.isdigit() or int(said) < gold else "lower"}]


def found(state: Any) -> float:
    return float(state["trajectory"][-1]["completion"][-1]["content"] == state["answer"])


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def said_it(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


def load_environment(kind: str = "single", size: int = 20, evaluation: int = 5, overlap: int = 0) -> Any:
    train, test = _rows(0, size), _rows(size - overlap, evaluation) if evaluation else None
    if kind in {"single", "broken", "group", "loud"}:
        parser = vf.XMLParser(["answer"], answer_field="answer")
        rubric = vf.Rubric(funcs=[right, short], weights=[0.75, 0.25], parser=parser)
        rubric.add_metric(length)
        if kind == "broken":
            rubric.add_reward_func(broken, weight=0.0)
        if kind == "group":
            rubric.add_reward_func(together, weight=0.0)
        if kind == "loud":
            rubric = vf.Rubric(funcs=[length], parser=parser)
        return vf.SingleTurnEnv(
            dataset=train, eval_dataset=test, system_prompt="Add.", parser=parser, rubric=rubric
        )
    if kind == "guess":
        return Guess(dataset=train, eval_dataset=test, rubric=vf.Rubric(funcs=[found]), max_turns=4)
    if kind == "tools":
        return vf.ToolEnv(
            dataset=train, eval_dataset=test, tools=[add], rubric=vf.Rubric(funcs=[said_it]), max_turns=4
        )
    if kind == "both":
        one, other = (load_environment("single", evaluation=evaluation) for _ in range(2))
        return vf.EnvGroup([one, other], env_names=["one", "other"])
    raise ValueError(f"no kind {kind}")
