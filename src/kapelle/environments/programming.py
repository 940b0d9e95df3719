"""Programming problems that need no data: templates with drawn parameters, a solution, and tests that catch its slips.

The templates are in `programming.toml`. Each contains a problem, a program that solves it, and slips: small changes of the program, as
a programmer makes them by mistake. A test expects what the program returns (`template_programs`). Inputs are drawn until every slip
fails a test, so that only a program for the described problem passes all tests. Two tests are shown, the others are hidden.

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
"""Arguments of one call: numbers, texts, lists and dictionaries of them."""
SHOWN, HIDDEN = 2, 8
"""Numbers of shown tests and of hidden tests; an input that catches a slip is added to the hidden ones."""
MOST_ALIKE = 0.7
"""Greatest share of the tests with one result, or with the argument itself as the result."""
SEARCHED = 60
"""Maximum number of inputs that are drawn to catch one slip."""
TRIES = 2_000
"""Maximum number of draws for one task."""
HeldOut = Literal["problem", "template"]
"""`problem`: a hash of each problem, its parameters included, decides its split. `template`: whole templates belong to the test split."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A template with its parameters drawn."""

    asked: str
    """What the program should do, including its name and arguments."""
    solution: str
    slips: tuple[tuple[str, str], ...]
    """(part of the solution, what replaces it)."""
    inputs: Callable[[random.Random], Arguments]
    """Draws the arguments of a call."""
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
        """Return the template with parameters drawn from `draw`."""
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
    """Return what the statements of a template may call."""

    def integers(low: int = -20, high: int = 30, most: int = 9, least: int = 0) -> list[int]:
        return [draw.randint(low, high) for _ in range(draw.randint(least, most))]

    def word(letters: str = "abcdeilnorst", most: int = 8, least: int = 1) -> str:
        return "".join(draw.choices(letters, k=draw.randint(least, most)))

    def nth(number: int) -> str:
        return {2: "second", 3: "third", 4: "fourth", 5: "fifth"}.get(number, f"{number}th")

    def condition() -> tuple[str, str, str]:
        """Return a condition on numbers: its text after `numbers that …`, its code in `x`, and its slip."""
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
    """(arguments, what is expected); the first `SHOWN` are shown."""
    wrong: tuple[str, ...]
    """Programs with a slip; each fails at least one test."""

    @property
    def shown(self) -> tuple[str, ...]:
        """The tests that a solver reads, as asserts."""
        return tuple(
            f"assert {self.function}({', '.join(map(repr, arguments))}) == {expected!r}"
            for arguments, expected in self.tests[:SHOWN]
        )

    @property
    def prompt(self) -> str:
        """What a solver reads."""
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
    """Return the problem at an index: the same in every process, and never one problem in both splits.

    `templates` are names to draw from, all of them if empty. Raises DataError if none of them has a problem for the split.
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
        f"`code` finds no generated problem for the {split} split. Add `environment.templates`, or widen "
        "`environment.difficulty`."
    )


def tells_apart(found: Programming) -> bool:
    """Return whether tests suit rewards: programs with a slip fail, and no constant or echoed argument is mostly correct."""
    results = Counter(repr(expected) for _, expected in found.tests)
    echoed = sum(arguments[0] == expected for arguments, expected in found.tests)
    return len(found.wrong) > 1 and max(echoed, *results.values()) <= MOST_ALIKE * len(found.tests)


def with_tests(name: str, template: Drawn, draw: random.Random) -> Programming:
    """Return the problem of a template with its tests: shown ones, edges, further ones, and one for each slip that they miss."""
    function = re.findall(r"^def (\w+)\(", template.solution, re.MULTILINE)[-1]
    right = functools.partial(_result, template.solution, function)
    calls: list[Arguments] = []
    while len(calls) < SHOWN:
        arguments = template.inputs(draw)
        # Two different results show more of the problem than equal or empty ones, but some problems have few results.
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
        # For some parameters a slip changes nothing: no input separates it, so it is not a wrong program.
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
    """Return what a call returns or raises, and its type, which separates `True` from 1."""
    try:
        value = call(program, function, copy.deepcopy(arguments))
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        return "error", type(error).__name__
    return type(value).__name__, value
