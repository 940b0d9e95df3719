"""Generated problems: tests expect what the text asks, programs with a slip fail, and the splits share no problem."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import re
from collections import deque
from typing import Any

import pytest
from pydantic import ValidationError
from tests.workflows.stage import expert, lines, play

from kapelle.cli.serve import named
from kapelle.environments.code import Code
from kapelle.environments.grading.code.grade import CallTest, grade_calls
from kapelle.environments.programming import (
    HIDDEN,
    SHOWN,
    TEMPLATES,
    Programming,
    candidates,
    problem,
    tells_apart,
    with_tests,
)
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.template_programs import call
from kapelle.types import Split
from kapelle.workflows.solo import Solo


@functools.cache
def made(name: str, seed: object = "golden") -> Programming:
    draw = random.Random(f"{seed}/{name}")
    return with_tests(name, TEMPLATES[name].draw(draw), draw)


WORKED: list[tuple[str, str, tuple[Any, ...], Any]] = [
    (
        "chosen",
        "Return the numbers of a list that are divisible by 6, in their order, as `chosen(numbers)`.",
        ([-18, -8, 5, 0, 19],),
        [-18, 0],
    ),
    (
        "clamped",
        "Return a number, but -17 in place of anything below it and -9 in place of anything above it, as `clamped(x)`.",
        (-24,),
        -17,
    ),
    (
        "every",
        "Return every 7th item of a list, beginning with the item at index 0, as `every(items)`.",
        ([6, 8, 6, 7, 1, 9, 5, 3, 1, 2, 4, 8, 0, 3, 6, 3, 7, 4, 7, 2],),
        [6, 3, 6],
    ),
    (
        "how_many",
        "Return how many numbers of a list are greater than 10, as `how_many(numbers)`.",
        ([-10, 24, 27],),
        2,
    ),
    (
        "joined",
        "Return a text 5 times over, with '::' between the copies and nowhere else, as `joined(text)`.",
        ("tolirlan",),
        "tolirlan::tolirlan::tolirlan::tolirlan::tolirlan",
    ),
    (
        "letters",
        "Return how many characters of a text are among the letters 'belt', small or capital, as `count(text)`.",
        ("aLeDn  dcdsE",),
        3,
    ),
    (
        "rotated",
        "Return a list rotated to the right by 1 places, as `rotated(items)`; it may be shorter than that, or empty.",
        ([30, 23, 8, 13],),
        [13, 30, 23, 8],
    ),
    (
        "encoded",
        "Replace every stretch of at least 3 equal letters of a text by its length, then ':', then the letter; shorter stretches stay as they are. Return the text, as `encoded(text)`.",
        ("ccccbbbbaaabbbb",),
        "4:c4:b3:a4:b",
    ),
    (
        "grouped",
        "Group the numbers of a list, each 0 or more, by its remainder by 2: return a dictionary from that number to the list of its numbers in their order, as `grouped(numbers)`.",
        ([11, 14, 19, 24, 9, 23, 10, 23, 3],),
        {1: [11, 19, 9, 23, 23, 3], 0: [14, 24, 10]},
    ),
    (
        "longest",
        "Return the length of the longest stretch of neighbouring numbers of a list that all are less than 7, as `longest(numbers)`.",
        ([-14, 7, 11, -9, 2, -1],),
        3,
    ),
    (
        "matrix",
        "A table is a list of rows of equally many numbers. Return the list of the sums of each row, each taken modulo 5, as `sums(table)`.",
        ([[5, 6], [7, 6], [1, 3]],),
        [1, 3, 4],
    ),
    (
        "once",
        "Remove repeated items from a list: keep the first 2 of equal ones, and the order of what stays. Return the list, as `once(items)`.",
        ([4, 1, 0, 0, 4, 3, 2, 3, 2, 1, 0, 4],),
        [4, 1, 0, 0, 4, 3, 2, 3, 2, 1],
    ),
    (
        "ordered",
        "Return the words of a list that have at least 6 letters, the longest first and words of one length in the order of the alphabet, as `ordered(words)`.",
        (["bsebdar", "rslroidi", "iinsiedl", "e"],),
        ["iinsiedl", "rslroidi", "bsebdar"],
    ),
    (
        "pieces",
        "Cut a list into pieces of 2 items and return the list of the pieces, as `pieces(items)`; leave out a last piece that is shorter.",
        ([3, 6, 2, 7, 9, 7, 4, 8],),
        [[3, 6], [2, 7], [9, 7], [4, 8]],
    ),
    (
        "shifted",
        "Replace every letter from a to z of a text by the one 22 places further in the alphabet, with a again after z; everything else stays. Return the text, as `shifted(text)`.",
        ("aRybbnbQRzQy",),
        "wRuxxjxQRvQu",
    ),
    (
        "total",
        "Return the sum of the absolute values of those numbers of a list that leave 1 when divided by 2, as `total(numbers)`.",
        ([17, 12, 27, 21, 18],),
        65,
    ),
    (
        "ledger",
        "A ledger is a text of entries such as 'ann:3', with ' ' between them; a name may come several times, and an amount may be negative. Return a dictionary from each name to the sum of its amounts, without names whose sum is above 13, as `ledger(text)`; an empty text has no entries.",
        ("ann:33 cy:13 bo:13 ann:13",),
        {"cy": 13, "bo": 13},
    ),
]
"""Template, what its first draw asks, a call, and what a person finds it must return."""


@pytest.mark.parametrize(("name", "asked", "arguments", "expected"), WORKED, ids=[each[0] for each in WORKED])
def test_worked_examples(name: str, asked: str, arguments: tuple[Any, ...], expected: Any) -> None:
    found = made(name)
    assert found.asked == asked
    names: dict[str, Any] = {}
    exec(found.solution, names)  # noqa: S102 (our own solution)
    assert names[found.function](*arguments) == expected


def oracle(name: str, asked: str, given: Any) -> Any:
    """Work out a result by another way than the solution's, from the words of the problem alone."""
    numbers = [int(each) for each in re.findall(r"-?\d+", asked)]
    if name == "line":
        return (
            sum([given] * numbers[0]) + numbers[1]
            if numbers[0] > 0
            else -sum([given] * -numbers[0]) + numbers[1]
        )
    if name == "digits":
        power = 1 + ("squares" in asked) + 2 * ("cubes" in asked)
        places = (given // numbers[-1] ** k % numbers[-1] for k in range(40))
        return sum(each**power for each in places)
    if name == "pairs":
        both = list(itertools.combinations(given, 2))
        return sum(
            a + b == numbers[0] if "add up" in asked else a - b in (numbers[0], -numbers[0]) for a, b in both
        )
    if name == "ranked":
        place = {"second": 2, "third": 3, "fourth": 4, "fifth": 5}[asked.split()[2]]
        sign = -1 if "largest" in asked else 1
        return next((x for x in given if len({y for y in given if sign * y < sign * x}) == place - 1), None)
    if name == "windows":
        sums = {
            sum(given[i:j])
            for i in range(len(given))
            for j in range(i, len(given) + 1)
            if j - i == numbers[0]
        }
        return None if not sums else sorted(sums)[-1 if "greatest" in asked else 0]
    if name == "balanced":
        opens, closes = re.findall("'(.)'", asked)[:2]
        text = "".join(c for c in given if c in opens + closes)
        for _ in range(
            numbers[0]
        ):  # every pair that holds only what went before becomes a star: one level a time
            text = re.sub(f"{re.escape(opens)}[*]*{re.escape(closes)}", "*", text)
        return not text.replace("*", "")
    if name == "coins":
        seen, queue = {0}, deque([(0, 0)])
        while queue:
            amount, count = queue.popleft()
            if amount == given:
                return count
            for coin in numbers[:-1]:
                if amount + coin <= given and amount + coin not in seen:
                    seen.add(amount + coin)
                    queue.append((amount + coin, count + 1))
        return -1
    if name == "increasing":
        sign = 1 if "rises by" in asked or "never falls" in asked else -1
        least = 0 if "never" in asked else numbers[0]
        return max(
            len(each)
            for size in range(len(given) + 1)
            for each in itertools.combinations(given, size)
            if all(sign * (b - a) >= least for a, b in itertools.pairwise(each))
        )
    if name == "recurrence":
        terms = numbers[:2]
        while len(terms) <= given:
            terms.append((numbers[2] * terms[-1] + numbers[3] * terms[-2]) % numbers[4])
        return terms[given]
    if name == "steps":
        _, divisor, times, plus, _, most, _ = numbers
        for count in range(most):
            if given == 1:
                return count
            given = given // divisor if given / divisor == given // divisor else times * given + plus
        return most
    if name == "merged":
        gap = numbers[0] if "lie at most" in asked else 0
        kept = [list(each) for each in given]
        while True:
            pair = next(
                (
                    (a, b)
                    for a, b in itertools.combinations(kept, 2)
                    if max(a[0], b[0]) - min(a[1], b[1]) <= gap
                ),
                None,
            )
            if pair is None:
                return sorted(kept)
            for each in pair:
                kept.remove(each)
            kept.append([min(pair[0][0], pair[1][0]), max(pair[0][1], pair[1][1])])
    if name == "paths":

        def ways(x: int, y: int) -> int:
            if y >= len(given) or x >= len(given[0]) or given[y][x] == "#":
                return 0
            if (x, y) == (len(given[0]) - 1, len(given) - 1):
                return 1
            return ways(x + 1, y) + ways(x, y + 1) + (ways(x + 1, y + 1) if "both" in asked else 0)

        return ways(0, 0) % numbers[0]
    assert name == "machine", name
    stack: list[int] = []
    for command in given:
        if command not in ("add", "sub", "mul", "dup"):
            stack.append(int(command))
        elif command == "dup":
            stack.extend(stack[-1:])
        elif len(stack) > 1:
            *stack, a, b = stack
            stack.append({"add": a + b, "sub": a - b, "mul": a * b}[command] % numbers[0])
    return stack


@pytest.mark.parametrize(
    "name",
    ["line", "digits", "pairs", "ranked", "windows", "balanced", "coins", "increasing", "recurrence", "steps", "merged",
     "paths", "machine"],
)  # fmt: skip
def test_the_tests_expect_what_the_text_asks(name: str) -> None:
    for seed in range(8):
        found = made(name, seed)
        for (given,), expected in found.tests:
            assert oracle(name, found.asked, given) == expected, (found.asked, given)


@pytest.mark.parametrize("name", TEMPLATES)
def test_python_agrees_with_the_tests_and_every_slip_fails(name: str) -> None:
    for seed in range(4):
        found = made(name, seed)
        assert SHOWN + 1 < len(found.tests) <= SHOWN + HIDDEN + 3
        assert len({repr(arguments) for arguments, _ in found.tests}) == len(found.tests)
        for program in (found.solution, *found.wrong):
            names: dict[str, Any] = {}
            exec(program, names)  # noqa: S102 (our own programs)
            fails = 0
            for arguments, expected in found.tests:
                try:
                    got = names[found.function](*copy.deepcopy(arguments))
                except (ArithmeticError, LookupError, TypeError, ValueError):
                    fails += 1
                    continue
                fails += (type(got), got) != (type(expected), expected)
            assert (fails > 0) == (program != found.solution), (found.asked, program)
    assert sum(tells_apart(made(name, seed)) for seed in range(8)) > 3


def test_programs_are_bounded_and_a_small_part_of_python() -> None:
    with pytest.raises(TimeoutError, match="steps"):
        call("def f(x):\n    while x:\n        pass\n", "f", (1,))
    assert call("def f(x):\n    if x:\n        pass\n", "f", (1,)) is None
    with pytest.raises(AssertionError, match="import os"):
        call("def f(x):\n    import os\n", "f", (1,))
    with pytest.raises(KeyError):
        call("def f(x):\n    return open(x)\n", "f", ("/etc/passwd",))
    with pytest.raises(AssertionError, match="method"):
        call("def f(x):\n    return x.__class__()\n", "f", (1,))
    with pytest.raises(AssertionError, match="expression"):
        call("def f(x):\n    return x.__class__\n", "f", (1,))


@pytest.mark.parametrize("name", ["chosen", "ledger", "machine"])
def test_in_the_sandbox_the_solution_passes_and_every_slip_fails(name: str, sandbox: Bubblewrap) -> None:
    found = made(name, 0)
    tests = tuple(CallTest(found.function, arguments, expected) for arguments, expected in found.tests)
    assert grade_calls(found.solution, tests, sandbox).solved
    assert found.wrong
    for program in found.wrong:
        assert not grade_calls(program, tests, sandbox).solved, (found.asked, program)


async def test_an_agent_reads_only_the_shown_tests_and_all_of_them_decide_its_reward(
    sandbox: Bubblewrap,
) -> None:
    environment = Code(format="generated", seed=3)
    task = environment.task("train", 0)
    found = problem(3, "train", 0, (1, 3), (), "problem")
    assert task.question == found.prompt
    assert not task.data
    for arguments, _ in found.tests[SHOWN:]:
        assert f"({', '.join(map(repr, arguments))})" not in task.question
    [episode] = await play(environment, Solo(), ["coder"], {"coder": expert(environment)}, task)
    assert (episode.success, len(episode.info["tests"]["coder"])) == (1.0, len(found.tests))
    # Only what is shown, by heart.
    known = {repr(list(arguments)): expected for arguments, expected in found.tests[:SHOWN]}
    learnt = f"```python\ndef {found.function}(*given):\n    return {known!r}[repr(list(given))]\n```"
    [episode] = await play(environment, Solo(), ["coder"], {"coder": lines(learnt)}, task)
    assert episode.success == 0.0
    assert episode.info["tests"]["coder"][:SHOWN] == ["passed"] * SHOWN


SPLITS: tuple[Split, ...] = ("train", "test")


def test_no_problem_is_in_both_splits_and_templates_are_held_out_whole() -> None:
    asked = {
        split: {problem(0, split, k, (1, 3), (), "problem").asked for k in range(40)} for split in SPLITS
    }
    assert not asked["train"] & asked["test"]
    assert len(asked["train"]) > 30
    names = {split: set(candidates(split, (1, 3), (), "template")) for split in SPLITS}
    assert not names["train"] & names["test"]
    for split in SPLITS:
        assert {problem(0, split, k, (1, 3), (), "template").template for k in range(8)} <= names[split]
        assert {TEMPLATES[name].level for name in names[split]} == {1, 2, 3}
    shown = Code(format="generated", held_out="template", difficulty=(3, 3)).sources
    assert "merged, steps" in shown["test"]


def test_difficulty_templates_and_seed_decide_what_is_asked() -> None:
    for level in (1, 2, 3):
        drawn = {problem(0, "train", k, (level, level), (), "problem").template for k in range(8)}
        assert {TEMPLATES[name].level for name in drawn} == {level}
    only = Code(format="generated", templates=("coins", "paths"))
    assert all(
        "coins(" in task or "ways(" in task for task in (only.task("test", k).question for k in range(10))
    )
    one, other = Code(format="generated"), Code(format="generated", seed=1)
    assert [one.task("test", k) for k in range(5)] != [other.task("test", k) for k in range(5)]
    assert one.size("train") is None
    assert (dict(one.contents()), dict(one.skipped())) == ({}, {})


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"format": "generated", "templates": ("coin",)}, "coins"),
        ({"format": "generated", "difficulty": (1, 4)}, "hardest"),
        ({"format": "generated", "templates": ("coins",), "held_out": "template"}, "test split"),
        ({"format": "generated", "templates": ("coins",), "difficulty": (1, 1)}, "train split"),
        ({"templates": ("coins",)}, "templates"),
        ({"format": "stdio", "held_out": "template"}, "held_out"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        Code(**settings)


def test_code_is_served_without_data() -> None:
    found = named("code,math=word_problems,debate", ["code.format=generated", "code.max_attempts=3"])
    assert {name: each.name for name, each in found.items()} == {
        "code": "code", "math": "word_problems", "debate": "debate_topics",
    }  # fmt: skip
    assert json.dumps(found["code"].task("train", 0).question)
