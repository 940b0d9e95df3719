"""Programming problems that need no data: templates with random parameters, a solution, and tests that catch typical mistakes.

The templates are in `programming.toml`. Each contains a problem, a program that solves it, and slips, which are small mistakes that a
programmer could make in it. Tests expect what the program returns (`template_programs`). Inputs are drawn until every program with a
slip fails a test, so that only a program for the described problem passes all tests. Two tests are shown; the others are hidden.

    Return the numbers of a list that are greater than 7, in their order, as `chosen(numbers)`.

    Your program must pass these tests, and others like them:
    assert chosen([3, 12, 7]) == [12]
    assert chosen([9, -2, 8, 8]) == [9, 8, 8]
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import re
import string
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from kapelle.environments.questions import split_of
from kapelle.environments.template_programs import call, run
from kapelle.errors import DataError
from kapelle.types import Split

Arguments = tuple[Any, ...]
"""Arguments of one call: numbers, strings, and lists and dictionaries of these."""
SHOWN, HIDDEN = 2, 8
"""Numbers of shown tests and of hidden tests; inputs that catch further slips are added to the hidden tests."""
MOST_ALIKE = 0.7
"""Largest share of the tests that may have the same result, or the argument itself as the result."""
SEARCHED = 60
"""Maximum number of inputs that are drawn to catch one slip."""
TRIES = 2_000
"""Maximum number of draws for one task."""
HeldOut = Literal["problem", "template"]
"""`problem`: a hash of each problem, including its parameters, decides its split. `template`: the test split has templates of its own."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A template with random parameters filled in."""

    asked: str
    """What the program should do, including its name and arguments."""
    solution: str
    slips: tuple[tuple[str, str], ...]
    """Pairs (part of the solution, its replacement)."""
    inputs: Callable[[random.Random], Arguments]
    """Function that draws the arguments of a call."""
    edges: tuple[Arguments, ...]
    """Calls that are always among the hidden tests."""


@dataclass(frozen=True, slots=True)
class Template:
    """An entry of `programming.toml`; the comment at the top of that file describes the fields."""

    level: int
    parameters: str
    asked: str
    solution: str
    slips: Sequence[tuple[str, str]]
    inputs: str
    edges: str
    held_out: bool = False

    def draw(self, draw: random.Random) -> Drawn:
        """Return the template with random parameters from `draw`."""
        names = _functions(draw)
        run(self.parameters, names)
        parameters = {name: value for name, value in names.items() if not callable(value)}

        def filled(text: str) -> str:
            return string.Template(text).substitute(parameters)

        return Drawn(
            filled(self.asked),
            filled(self.solution),
            tuple((old, filled(new)) for part, new in self.slips if (old := filled(part))),
            lambda draw: (run(self.inputs, {**_functions(draw), **parameters}),),
            tuple((edge,) for edge in run(f"return {self.edges}", dict(parameters))),
        )


def _functions(draw: random.Random) -> dict[str, Any]:
    """Return the functions that the statements of a template may call."""

    def integers(low: int = -20, high: int = 30, most: int = 9, least: int = 0) -> list[int]:
        return [draw.randint(low, high) for _ in range(draw.randint(least, most))]

    def word(letters: str = "abcdeilnorst", most: int = 8, least: int = 1) -> str:
        return "".join(draw.choices(letters, k=draw.randint(least, most)))

    def nth(number: int) -> str:
        return {2: "second", 3: "third", 4: "fourth", 5: "fifth"}.get(number, f"{number}th")

    def condition() -> tuple[str, str, str]:
        """Return a condition on numbers: its wording after `numbers that …`, its code in terms of `x`, and its slip."""
        k, r = draw.randint(-5, 20), draw.randint(2, 9)
        rest = draw.randrange(1, r) if r > 2 else 1
        return draw.choice(
            [
                (f"are greater than {k}", f"x > {k}", f"x >= {k}"),
                (f"are less than {k}", f"x < {k}", f"x <= {k}"),
                (f"are at least {k}", f"x >= {k}", f"x > {k}"),
                (f"are divisible by {r}", f"x % {r} == 0", f"x // {r} == 0"),
                (f"leave {rest} when divided by {r}", f"x % {r} == {rest}", f"x % {r} == 0"),
                (f"are at most {r} away from {k}", f"abs(x - {k}) <= {r}", f"abs(x - {k}) < {r}"),
                (f"have a square above {r * r}", f"x * x > {r * r}", f"x > {r}"),
            ]
        )

    own = (integers, word, nth, condition)
    return {
        each.__name__: each
        for each in (draw.randint, draw.random, draw.choice, draw.choices, draw.sample, *own)
    }


TEMPLATES: Mapping[str, Template] = {
    name: Template(**fields)
    for name, fields in tomllib.loads(
        (files("kapelle.environments") / "programming.toml").read_text("utf-8")
    ).items()
}
"""The templates by name."""


# -------- From a template to a problem with tests


@dataclass(frozen=True, slots=True)
class Programming:
    """A problem with its tests."""

    template: str
    asked: str
    solution: str
    function: str
    tests: tuple[tuple[Arguments, Any], ...]
    """Pairs (arguments, expected result); the first `SHOWN` pairs are shown."""
    wrong: tuple[str, ...]
    """Programs with a slip; each of them fails at least one test."""

    @property
    def shown(self) -> tuple[str, ...]:
        """The tests that a solver reads, as assert statements."""
        return tuple(
            f"assert {self.function}({', '.join(map(repr, arguments))}) == {expected!r}"
            for arguments, expected in self.tests[:SHOWN]
        )

    @property
    def prompt(self) -> str:
        """The prompt that a solver reads."""
        return "\n".join(
            [self.asked, "", "Your program must pass these tests, and others like them:", *self.shown]
        )


def candidates(
    split: Split, difficulty: tuple[int, int], templates: Sequence[str], held_out: HeldOut
) -> list[str]:
    """Return the names of the templates that a split draws from."""
    return [
        name
        for name in templates or TEMPLATES
        if difficulty[0] <= TEMPLATES[name].level <= difficulty[1]
        and (held_out == "problem" or TEMPLATES[name].held_out == (split == "test"))
    ]


@functools.lru_cache(maxsize=4096)
def problem(
    seed: int,
    split: Split,
    index: int,
    difficulty: tuple[int, int],
    templates: tuple[str, ...],
    held_out: HeldOut,
) -> Programming:
    """Return the problem at an index, which is the same in every process. No problem belongs to both splits.

    `templates` are the names to draw from; empty means all. Raises DataError if none of them has a problem for the split.
    """
    draw = random.Random(f"programming/{seed}/{split}/{index}")
    known = candidates(split, difficulty, templates, held_out)
    for _ in range(TRIES if known else 0):
        name = draw.choice(known)
        drawn = TEMPLATES[name].draw(draw)
        if held_out == "template" or split_of(f"{name}/{drawn.asked}") == split:
            found = with_tests(name, drawn, draw)
            if tells_apart(found):
                return found
    raise DataError(
        f"`code` found no generated problem for the {split} split. Add templates to `environment.templates`, or widen "
        "`environment.difficulty`."
    )


def tells_apart(found: Programming) -> bool:
    """Return whether tests are fit for rewards: programs with slips fail, and returning a constant or an argument is rarely correct."""
    results = Counter(repr(expected) for _, expected in found.tests)
    echoed = sum(arguments[0] == expected for arguments, expected in found.tests)
    return len(found.wrong) > 1 and max(echoed, *results.values()) <= MOST_ALIKE * len(found.tests)


def with_tests(name: str, template: Drawn, draw: random.Random) -> Programming:
    """Return the problem of a template with shown tests, edge cases, further tests, and a test for each slip that those miss."""
    function = re.findall(r"^def (\w+)\(", template.solution, re.MULTILINE)[-1]
    right = functools.partial(_result, template.solution, function)
    calls: list[Arguments] = []
    while len(calls) < SHOWN:
        arguments = template.inputs(draw)
        # Two different results reveal more of the problem than two equal ones, but some problems have few different results.
        if arguments not in calls and (
            len(calls) == 0 or right(arguments) != right(calls[0]) or draw.random() < 0.1
        ):
            calls.append(arguments)
    calls += [edge for edge in template.edges if edge not in calls]
    for _ in range(SEARCHED):
        if len(calls) >= SHOWN + HIDDEN:
            break
        if (arguments := template.inputs(draw)) not in calls:
            calls.append(arguments)
    wrong = []
    for old, new in template.slips:
        assert old in template.solution, f"the template '{name}' has no {old!r} to get wrong"
        program = template.solution.replace(old, new)
        slip = functools.partial(_result, program, function)
        # For some parameters a slip has no effect: no input reveals it, so the program counts as correct.
        further = (each for each in (template.inputs(draw) for _ in range(SEARCHED)) if each not in calls)
        for place, arguments in enumerate(itertools.chain(tuple(calls), further)):
            if slip(arguments) != right(arguments):
                if place >= len(calls):
                    calls.append(arguments)
                wrong.append(program)
                break
    results = [right(arguments) for arguments in calls]
    assert all(kind != "error" for kind, _ in results), (
        f"the template '{name}' draws a call that its solution cannot answer"
    )
    tests = tuple((arguments, value) for arguments, (_, value) in zip(calls, results, strict=True))
    return Programming(name, template.asked, template.solution, function, tests, tuple(wrong))


def _result(program: str, function: str, arguments: Arguments) -> tuple[str, Any]:
    """Return the type and value that a call returns or raises; the type distinguishes `True` from 1."""
    try:
        value = call(program, function, copy.deepcopy(arguments))
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        return "error", type(error).__name__
    return type(value).__name__, value
