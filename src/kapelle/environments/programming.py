"""Generated programming problems: templates with random parameters, a solution, and tests that catch typical mistakes.

The templates are in `programming.toml`. Each template contains a problem, a program that solves it, and slips, which are small
mistakes that a programmer could make. The expected results of tests are the results of the solution (`template_programs`). Inputs
are generated until every program with a slip fails a test, so that only a program for the described problem passes all tests. Two
tests are shown in the prompt; all other tests are hidden.

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
"""The arguments of a function call: numbers, strings, and lists and dictionaries of these types."""
SHOWN, HIDDEN = 2, 8
"""The numbers of shown and hidden tests. Inputs that catch further slips are added to the hidden tests."""
MOST_ALIKE = 0.7
"""The maximum fraction of the tests that may have the same result, or whose result may be equal to the argument."""
SEARCHED = 60
"""The maximum number of inputs that are generated to catch a slip."""
TRIES = 2_000
"""The maximum number of problems that are generated in search of a valid problem for a task."""
HeldOut = Literal["problem", "template"]
"""How the test split differs from the training split. `problem`: a hash of each problem, including its parameters, determines its
split. `template`: the two splits use different templates."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A template in which the parameters have been replaced with random values."""

    asked: str
    """The description of the problem, which includes the name and the arguments of the function."""
    solution: str
    slips: tuple[tuple[str, str], ...]
    """The slips, as pairs (part of the solution, incorrect replacement)."""
    inputs: Callable[[random.Random], Arguments]
    """A function that generates random arguments for a call."""
    edges: tuple[Arguments, ...]
    """Arguments of calls that are always among the hidden tests."""


@dataclass(frozen=True, slots=True)
class Template:
    """An entry of `programming.toml`. The comment at the beginning of that file describes the fields."""

    level: int
    parameters: str
    asked: str
    solution: str
    slips: Sequence[tuple[str, str]]
    inputs: str
    edges: str
    held_out: bool = False

    def draw(self, draw: random.Random) -> Drawn:
        """Return the template with random parameters that are sampled with `draw`."""
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
        """Return a random condition on numbers.

        The condition consists of its wording after `numbers that …`, its code in terms of `x`, and the code with a slip.
        """
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
"""Mapping from the names of the templates to the templates."""


# -------- From a template to a problem with tests


@dataclass(frozen=True, slots=True)
class Programming:
    """A generated problem with its tests."""

    template: str
    asked: str
    solution: str
    function: str
    tests: tuple[tuple[Arguments, Any], ...]
    """The tests, as pairs (arguments, expected result). The first `SHOWN` tests are shown in the prompt."""
    wrong: tuple[str, ...]
    """Programs with a slip, each of which fails at least one test."""

    @property
    def shown(self) -> tuple[str, ...]:
        """The tests that are shown in the prompt, as assert statements."""
        return tuple(
            f"assert {self.function}({', '.join(map(repr, arguments))}) == {expected!r}"
            for arguments, expected in self.tests[:SHOWN]
        )

    @property
    def prompt(self) -> str:
        """The prompt for the problem."""
        return "\n".join(
            [self.asked, "", "Your program must pass these tests, and others like them:", *self.shown]
        )


def candidates(
    split: Split, difficulty: tuple[int, int], templates: Sequence[str], held_out: HeldOut
) -> list[str]:
    """Return the names of the templates from which the problems of a split are generated."""
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

    `templates` are the names of the templates to use; if empty, all templates are used. Raises DataError if no problem for the
    split is found.
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
    """Return whether the tests of a problem are suitable for rewards.

    Tests are suitable if several programs with slips fail, and if programs that return a constant or an argument pass at most the
    fraction `MOST_ALIKE` of the tests.
    """
    results = Counter(repr(expected) for _, expected in found.tests)
    echoed = sum(arguments[0] == expected for arguments, expected in found.tests)
    return len(found.wrong) > 1 and max(echoed, *results.values()) <= MOST_ALIKE * len(found.tests)


def with_tests(name: str, template: Drawn, draw: random.Random) -> Programming:
    """Return the problem of a template with its tests.

    The tests are the shown tests, the edge cases, further random tests, and a test for each slip that these tests do not catch.
    """
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
    """Return the type and the value of the result of a call, or `error` and the type of the exception.

    The type is included to distinguish `True` from 1.
    """
    try:
        value = call(program, function, copy.deepcopy(arguments))
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        return "error", type(error).__name__
    return type(value).__name__, value
