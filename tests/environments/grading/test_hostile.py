"""The 60 hostile answers × every grader: none paid when wrong, none executed, none slow."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
from tests.environments.grading.hostile import COST, EXTRACTION, HOSTILE, VALUE, Hostile
from tests.support.patience import timed

from kapelle.environments import math as math_environment
from kapelle.environments.grading.judge import judge_answer, judge_pair
from kapelle.environments.grading.math.grade import grade_math
from kapelle.environments.grading.math.numeric import Number, grade_numeric, read_number
from kapelle.environments.grading.processes import KillableProcesses
from kapelle.environments.grading.text.extraction import ExtractionRule
from kapelle.environments.grading.text.json_answer import grade_json
from kapelle.environments.grading.text.match import grade_choice, grade_exact, grade_regex
from kapelle.environments.grading.text.tool_call import grade_tool_call
from kapelle.environments.grading.verdict import Grade
from kapelle.types import Json, Message

STRICT: tuple[ExtractionRule, ...] = ("tag", "hash", "only_box")
USUAL: tuple[ExtractionRule, ...] = ("hash", "last_box")

Grader = Callable[[str, str], Grade]


def numeric(text: str, gold: str, policies: Sequence[ExtractionRule]) -> Grade:
    return grade_numeric(text, read_number(gold) or Number(Fraction(5)), policies)


def choice(text: str, gold: str, policies: Sequence[ExtractionRule]) -> Grade:
    return grade_choice(text, "B", {"A": "6", "B": gold, "C": "7"}, policies)


def in_environment(
    pool: KillableProcesses, text: str, gold: str, policies: Sequence[ExtractionRule]
) -> Grade:
    """The environment `math`, which pays what `grade_math` pays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_environment, "shared_math_processes", lambda: pool)
        return asyncio.run(math_environment.Math(extraction=tuple(policies)).grade(text, gold))


def as_json(text: str, gold: str, policies: Sequence[ExtractionRule]) -> Grade:
    value: Json = gold
    if re.fullmatch(r"[0-9.]+", gold):
        value = json.loads(gold)
    return grade_json(text, value, policies)


def content(text: str) -> str:
    return text.removeprefix(r"So it is \boxed{").removesuffix("}.")


def tool_call(text: str, gold: str) -> Grade:
    """Return the best of: the text itself, and its content as an argument in each form."""
    accepted = [{"answer": {"value": [gold]}}]
    inner = content(text)
    call = json.dumps({"name": "answer", "arguments": {"value": inner}})
    raw = f'{{"name": "answer", "arguments": {{"value": {inner}}}}}'
    texts = [
        text,
        f"<tool_call>{call}</tool_call>",
        f"<tool_call>{raw}</tool_call>",
        call,
        f"[answer(value={inner})]",
        f"[answer(value={inner!r})]",
    ]
    return max((grade_tool_call(each, accepted) for each in texts), key=lambda grade: grade.score)


async def echo(conversation: Sequence[Message]) -> str:
    """A judge that says whatever it is told to, and then agrees."""
    return f"{conversation[-1].content}\nVERDICT: SAME"


async def literal(conversation: Sequence[Message]) -> str:
    """A judge that sees no further than the letters."""
    system, user = (message.content for message in conversation)
    [seal] = re.findall(r"VERDICT ([0-9a-f]{16}): <", system)
    one, other = re.findall(rf'<text-[12] {seal}>\n(".*")\n', user)
    return f"VERDICT {seal}: {'SAME' if json.loads(one) == json.loads(other) else 'DIFFERENT'}"


def judge(text: str, gold: str) -> Grade:
    verdicts = [asyncio.run(judge_answer(ask, "What is it?", text, gold)) for ask in (echo, literal)]
    return max(verdicts, key=lambda grade: grade.score)


@pytest.fixture(scope="module")
def graders(math_pool: KillableProcesses, regex_pool: KillableProcesses) -> Mapping[str, Sequence[Grader]]:
    def by_policy(grade: Callable[[str, str, Sequence[ExtractionRule]], Grade]) -> Sequence[Grader]:
        return [lambda text, gold: grade(text, gold, STRICT), lambda text, gold: grade(text, gold, USUAL)]

    return {
        "exact": by_policy(grade_exact),
        "numeric": by_policy(numeric),
        "math": by_policy(lambda text, gold, policies: grade_math(text, gold, policies, math_pool)),
        "environment": by_policy(partial(in_environment, math_pool)),
        "choice": by_policy(choice),
        "regex": by_policy(
            lambda text, gold, policies: grade_regex(text, re.escape(gold), policies, regex_pool)
        ),
        "json": by_policy(as_json),
        "tool_call": [tool_call],
        "judge": [judge],
    }


@pytest.fixture(autouse=True)
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An executed answer writes its canary into the working directory, here or of the workers."""
    started = Path.cwd()
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []
    assert not list(started.glob("kapelle_canary*"))


def test_there_are_sixty() -> None:
    assert (len(EXTRACTION), len(VALUE), len(COST), len(HOSTILE)) == (23, 23, 14, 60)
    assert len({hostile.name for hostile in HOSTILE}) == 60


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["exact", "numeric", "math", "environment", "choice", "regex", "json", "tool_call", "judge"]
)
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_hostile_answer(hostile: Hostile, name: str, graders: Mapping[str, Sequence[Grader]]) -> None:
    for text in hostile.texts:
        for grader in graders[name]:
            grade, seconds = timed(partial(grader, text, hostile.gold), 1.0)
            # This process's own time; a pool's is bounded by its limit and ends as `ungraded`.
            assert seconds < 1.0
            paid = {"environment": "math"}.get(name, name) in hostile.right
            assert (grade.score == 1.0) == paid, f"{text[:80]!r}: {grade}"
            assert grade.score in {0.0, 1.0}


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
async def test_no_hostile_answer_wins_a_comparison_by_what_it_says(hostile: Hostile) -> None:
    for text in hostile.texts:
        grade = await judge_pair(echo, "What is it?", text, hostile.gold)
        assert (grade.score, grade.status == "graded") == (0.0, False)
