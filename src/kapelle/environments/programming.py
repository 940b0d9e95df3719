"""Programming problems that need no data: templates with drawn parameters, a solution, and tests that tell it from near misses.

A template writes what is asked, a program that does it, and slips: small changes of the program that somebody could make by
mistake. What a test expects is what the program returns (`template_programs`); no test stands in a file. Inputs are drawn until every slip fails
a test, so that a program that passes all of them has understood the problem. Two tests are shown, the others hidden.

    Return the numbers of a list that are greater than 7, in their order, as `chosen(numbers)`.

    Your program must pass these tests, and others like them:
    assert chosen([3, 12, 7]) == [12]
    assert chosen([9, -2, 8, 8]) == [9, 8, 8]

To add a template: write a function of a `Random` that returns a `Problem`, and give it a line in `TEMPLATES`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kapelle.environments.questions import split_of
from kapelle.environments.template_programs import call
from kapelle.errors import DataError
from kapelle.types import Split

Arguments = tuple[Any, ...]
"""Of one call: numbers, texts, lists and dictionaries of them."""
SHOWN, HIDDEN = 2, 8
"""Tests that a solver reads, and others; an input that catches a slip is added to the hidden ones."""
MOST_ALIKE = 0.7
"""Greatest share of the tests with one result, or whose result is the argument itself."""
SEARCHED = 60
"""Most inputs that are drawn to catch one slip."""
TRIES = 2_000
"""Most draws for one task."""
HeldOut = Literal["problem", "template"]
"""`problem`: a hash of each problem, its parameters included, decides its split. `template`: whole templates are tested on."""


@dataclass(frozen=True, slots=True)
class Template:
    """One problem, with its parameters drawn."""

    asked: str
    """What the program should do, with its name and arguments; different parameters are different texts."""
    solution: str
    """A program that does it; the function that its last `def` at the margin opens is asked for."""
    slips: tuple[tuple[str, str], ...]
    """(part of the solution, what stands in its place): mistakes that somebody could make."""
    draw: Callable[[random.Random], Arguments]
    """Draws the arguments of a call."""
    edges: tuple[Arguments, ...] = ()
    """Calls that are always among the hidden tests."""


@dataclass(frozen=True, slots=True)
class Programming:
    """A problem with its tests, ready to be asked."""

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


# -------- What inputs are drawn from, and conditions that several templates ask about


def _numbers(draw: random.Random, low: int = -20, high: int = 30, most: int = 9, least: int = 0) -> list[int]:
    return [draw.randint(low, high) for _ in range(draw.randint(least, most))]


def _word(draw: random.Random, letters: str = "abcdeilnorst", most: int = 8, least: int = 1) -> str:
    return "".join(draw.choices(letters, k=draw.randint(least, most)))


def _words(draw: random.Random, most: int = 7) -> list[str]:
    return [_word(draw) for _ in range(draw.randint(0, most))]


@dataclass(frozen=True, slots=True)
class _Condition:
    """Something that is true of some numbers."""

    words: str
    """As it stands behind `numbers that …`."""
    code: str
    """Of `x`."""
    slip: str


def _condition(draw: random.Random) -> _Condition:
    k, r = draw.randint(-5, 20), draw.randint(2, 9)
    left = draw.randrange(1, r) if r > 2 else 1
    return draw.choice(
        [
            _Condition(f"are greater than {k}", f"x > {k}", f"x >= {k}"),
            _Condition(f"are less than {k}", f"x < {k}", f"x <= {k}"),
            _Condition(f"are at least {k}", f"x >= {k}", f"x > {k}"),
            _Condition(f"are divisible by {r}", f"x % {r} == 0", f"x // {r} == 0"),
            _Condition(f"leave {left} when divided by {r}", f"x % {r} == {left}", f"x % {r} == 0"),
            _Condition(f"are at most {r} away from {k}", f"abs(x - {k}) <= {r}", f"abs(x - {k}) < {r}"),
            _Condition(f"have a square above {r * r}", f"x * x > {r * r}", f"x > {r}"),
        ]
    )


# -------- Templates of level 1: one idea


def _chosen(draw: random.Random) -> Template:
    true = _condition(draw)
    return Template(
        f"Return the numbers of a list that {true.words}, in their order, as `chosen(numbers)`.",
        f"def chosen(numbers):\n    return [x for x in numbers if {true.code}]\n",
        ((true.code, true.slip), ("[x for", "[x + 1 for")),
        lambda draw: (_numbers(draw),),
        (([],),),
    )


def _how_many(draw: random.Random) -> Template:
    true = _condition(draw)
    return Template(
        f"Return how many numbers of a list {true.words}, as `how_many(numbers)`.",
        f"def how_many(numbers):\n    return sum(1 for x in numbers if {true.code})\n",
        ((true.code, true.slip), ("sum(1 for", "sum(x for")),
        lambda draw: (_numbers(draw),),
        (([],),),
    )


def _line(draw: random.Random) -> Template:
    a, b = draw.choice([k for k in range(-12, 13) if k not in (0, 1)]), draw.randint(1, 30)
    return Template(
        f"Return {a} times a whole number plus {b}, as `line(x)`.",
        f"def line(x):\n    return {a} * x + {b}\n",
        ((f"+ {b}", f"- {b}"), (f"{a} * x + {b}", f"{a} * (x + {b})")),
        lambda draw: (draw.randint(-50, 50),),
        ((0,),),
    )


def _every(draw: random.Random) -> Template:
    step, start = draw.randint(2, 9), draw.randint(0, 6)
    return Template(
        f"Return every {_nth(step)} item of a list, beginning with the item at index {start}, as `every(items)`.",
        f"def every(items):\n    return items[{start}::{step}]\n",
        ((f"[{start}::", f"[{start + 1}::"), (f"::{step}]", f"::{step + 1}]")),
        lambda draw: (_numbers(draw, 0, 9, 20, 5),),
        (([],), ([1],)),
    )


def _nth(number: int) -> str:
    return {2: "second", 3: "third", 4: "fourth", 5: "fifth"}.get(number, f"{number}th")


def _joined(draw: random.Random) -> Template:
    times, between = draw.randint(2, 6), draw.choice(("-", "_", ", ", "+", " and ", "/", "::"))
    return Template(
        f"Return a text {times} times over, with {between!r} between the copies and nowhere else, as `joined(text)`.",
        f"def joined(text):\n    return {between!r}.join([text] * {times})\n",
        ((f"* {times}", f"* {times + 1}"), (f"{between!r}.join", '"".join')),
        lambda draw: (_word(draw),),
        (("",),),
    )


def _clamped(draw: random.Random) -> Template:
    low = draw.randint(-30, 10)
    high = low + draw.randint(5, 40)
    return Template(
        f"Return a number, but {low} in place of anything below it and {high} in place of anything above it, as `clamped(x)`.",
        f"def clamped(x):\n    return max({low}, min({high}, x))\n",
        (
            (f"max({low}, min({high}, x))", f"min({high}, x)"),
            (f"max({low}, min({high}, x))", f"max({low}, x)"),
        ),
        lambda draw: (draw.randint(-80, 80),),
        ((low,), (high,)),
    )


def _letters(draw: random.Random) -> Template:
    letters = "".join(sorted(draw.sample("abcdeilnorst", draw.randint(2, 5))))
    return Template(
        f"Return how many characters of a text are among the letters {letters!r}, small or capital, as `count(text)`.",
        f"def count(text):\n    return sum(letter in {letters!r} for letter in text.lower())\n",
        ((".lower()", ""), (f"in {letters!r}", f"in {letters[:-1]!r}")),
        lambda draw: ("".join(draw.choice((c, c.upper(), " ")) for c in _word(draw, most=14)),),
        (("",),),
    )


def _rotated(draw: random.Random) -> Template:
    by, left = draw.randint(1, 9), draw.random() < 0.5
    place = f"{by} % len(items)" if left else f"-{by} % len(items)"
    return Template(
        f"Return a list rotated to the {'left' if left else 'right'} by {by} places, as `rotated(items)`; it may be shorter than "
        "that, or empty.",
        f"def rotated(items):\n    if not items:\n        return []\n    k = {place}\n    return items[k:] + items[:k]\n",
        (
            (f"k = {place}", f"k = {'-' if left else ''}{by} % len(items)"),
            (f"k = {place}", f"k = {by if left else -by}"),
        ),
        lambda draw: (_numbers(draw, 0, 30, 8),),
        (([],), ([4],)),
    )


# -------- Templates of level 2: two ideas, or one with corners


def _total(draw: random.Random) -> Template:
    true, m = _condition(draw), draw.randint(2, 9)
    words, code = draw.choice(
        [
            ("squares", "x * x"),
            (f"products with {m}", f"{m} * x"),
            ("absolute values", "abs(x)"),
            (f"remainders by {m}", f"x % {m}"),
        ]
    )
    return Template(
        f"Return the sum of the {words} of those numbers of a list that {true.words}, as `total(numbers)`.",
        f"def total(numbers):\n    return sum({code} for x in numbers if {true.code})\n",
        ((true.code, true.slip), (f"sum({code} for", "sum(x for"), (f" if {true.code}", "")),
        lambda draw: (_numbers(draw),),
        (([],),),
    )


def _digits(draw: random.Random) -> Template:
    base, m = draw.randint(2, 16), draw.choice((1, 1, 2, 3))
    power = "" if m == 1 else f" ** {m}"
    what = {1: "digits", 2: "squares of the digits", 3: "cubes of the digits"}[m]
    return Template(
        f"Return the sum of the {what} of a whole number n, 0 or more, written in base {base}, as `digits(n)`.",
        f"def digits(n):\n    total = 0\n    while n:\n        total += (n % {base}){power}\n        n //= {base}\n    return total\n",
        ((f"n % {base}", f"n % {base + 1}"), ("total += ", "total = ")),
        lambda draw: (draw.randint(0, 10 ** draw.randint(1, 6)),),
        ((0,), (base,)),
    )


def _longest(draw: random.Random) -> Template:
    true = _condition(draw)
    return Template(
        f"Return the length of the longest stretch of neighbouring numbers of a list that all {true.words}, as `longest(numbers)`.",
        "def longest(numbers):\n    best = here = 0\n    for x in numbers:\n"
        f"        here = here + 1 if {true.code} else 0\n        best = max(best, here)\n    return best\n",
        ((true.code, true.slip), (" else 0", " else here"), ("return best", "return here")),
        lambda draw: (_numbers(draw, most=14),),
        (([],),),
    )


def _pieces(draw: random.Random) -> Template:
    size, whole = draw.randint(2, 5), draw.random() < 0.5
    last = "leave out a last piece that is shorter" if whole else "the last piece may be shorter"
    end = f"len(items) - {size - 1}" if whole else "len(items)"
    return Template(
        f"Cut a list into pieces of {size} items and return the list of the pieces, as `pieces(items)`; {last}.",
        f"def pieces(items):\n    return [items[i : i + {size}] for i in range(0, {end}, {size})]\n",
        (
            (f"range(0, {end}", f"range(0, {'len(items)' if whole else f'len(items) - {size - 1}'}"),
            (f"i + {size}", f"i + {size + 1}"),
        ),
        lambda draw: (_numbers(draw, 0, 9, 13),),
        (([],), ([1],), (list(range(size)),)),
    )


def _shifted(draw: random.Random) -> Template:
    by = draw.randint(2, 24)
    return Template(
        f"Replace every letter from a to z of a text by the one {by} places further in the alphabet, with a again after z; everything "
        "else stays. Return the text, as `shifted(text)`.",
        'def shifted(text):\n    return "".join(\n'
        f'        chr((ord(c) - ord("a") + {by}) % 26 + ord("a")) if "a" <= c <= "z" else c for c in text\n    )\n',
        ((") % 26 +", ") +"), (f"+ {by})", f"- {by})"), (' if "a" <= c <= "z" else c', "")),
        lambda draw: (_word(draw, "abcxyzmnQR 1", 12),),
        (("",), ("zebra",)),
    )


def _ranked(draw: random.Random) -> Template:
    place, largest = draw.randint(2, 5), draw.random() < 0.5
    return Template(
        f"Return the {_nth(place)} {'largest' if largest else 'smallest'} of the different numbers of a list, or None if it has fewer "
        "different ones, as `ranked(numbers)`.",
        f"def ranked(numbers):\n    known = sorted(set(numbers){', reverse=True' if largest else ''})\n"
        f"    return known[{place - 1}] if len(known) >= {place} else None\n",
        (
            ("set(numbers)", "numbers"),
            (f"known[{place - 1}]", f"known[{place - 2}]"),
            (f">= {place}", f"> {place}"),
        ),
        lambda draw: (_numbers(draw, 0, 9, 10),),
        (([],), ([5] * 6,)),
    )


def _pairs(draw: random.Random) -> Template:
    total, kind = draw.randint(-5, 25), draw.choice(("sum", "difference"))
    code = (
        f"numbers[i] + numbers[j] == {total}"
        if kind == "sum"
        else f"abs(numbers[i] - numbers[j]) == {abs(total)}"
    )
    asked = f"add up to {total}" if kind == "sum" else f"are {abs(total)} apart"
    return Template(
        f"Return how many pairs of items at different places of a list {asked}, each pair counted once, as `pairs(numbers)`.",
        "def pairs(numbers):\n    n = len(numbers)\n"
        f"    return sum({code} for i in range(n) for j in range(i + 1, n))\n",
        (
            ("range(i + 1, n)", "range(n)"),
            ("range(i + 1, n)", "range(i, n)"),
            ("range(i + 1, n)", "range(i + 2, n)"),
        ),
        lambda draw: (_near(draw, total if kind == "sum" else abs(total)),),
        (([],),),
    )


def _near(draw: random.Random, total: int) -> list[int]:
    """Return numbers of which some pairs add up to a total, and some are that far apart."""
    found: list[int] = []
    for _ in range(draw.randint(0, 9)):
        other = draw.choice(found) if found else 0
        found.append(draw.choice((draw.randint(-9, 20), total - other, other + total, total // 2)))
    return found


def _windows(draw: random.Random) -> Template:
    size, best = draw.randint(2, 5), draw.choice(("max", "min"))
    return Template(
        f"Return the {'greatest' if best == 'max' else 'least'} sum of {size} neighbouring numbers of a list, or None if it is shorter, "
        "as `window(numbers)`.",
        f"def window(numbers):\n    sums = [sum(numbers[i : i + {size}]) for i in range(len(numbers) - {size} + 1)]\n"
        f"    return {best}(sums) if sums else None\n",
        (
            (f"- {size} + 1", f"- {size}"),
            (f"return {best}", f"return {'min' if best == 'max' else 'max'}"),
            (f"i + {size}]", f"i + {size - 1}]"),
        ),
        lambda draw: (_numbers(draw, most=10),),
        (([],), ([1] * (size - 1),), ([2] * size,)),
    )


def _once(draw: random.Random) -> Template:
    last, most = draw.random() < 0.5, draw.randint(1, 4)
    asked = (
        f"keep the {'last' if last else 'first'} {most} of equal ones"
        if most > 1
        else f"keep the {'last' if last else 'first'} of equal ones"
    )
    turn = "reversed(items)" if last else "items"
    back = "kept[::-1]" if last else "kept"
    return Template(
        f"Remove repeated items from a list: {asked}, and the order of what stays. Return the list, as `once(items)`.",
        f"def once(items):\n    kept = []\n    for item in {turn}:\n        if kept.count(item) < {most}:\n"
        f"            kept.append(item)\n    return {back}\n",
        (
            (turn + ":", ("items" if last else "reversed(items)") + ":"),
            (f"< {most}", f"<= {most}"),
            (f"return {back}", "return sorted(kept)"),
        ),
        lambda draw: (_numbers(draw, 0, 4, 12),),
        (([],), ([3] * 6,)),
    )


def _sorted_words(draw: random.Random) -> Template:
    least, down = draw.randint(2, 6), draw.random() < 0.5
    key = "(-len(word), word)" if down else "(len(word), word)"
    return Template(
        f"Return the words of a list that have at least {least} letters, the {'longest' if down else 'shortest'} first and words of one "
        "length in the order of the alphabet, as `ordered(words)`.",
        f"def ordered(words):\n    return sorted((word for word in words if len(word) >= {least}), key=lambda word: {key})\n",
        (
            (f">= {least}", f"> {least}"),
            (f"key=lambda word: {key}", "key=len"),
            (f", key=lambda word: {key}", ""),
        ),
        lambda draw: (_words(draw),),
        (([],),),
    )


def _grouped(draw: random.Random) -> Template:
    by = draw.randint(2, 7)
    words, code, slip = draw.choice(
        [
            (f"its remainder by {by}", f"x % {by}", f"x // {by}"),
            (f"how many times {by} goes into it", f"x // {by}", f"x % {by}"),
        ]
    )
    return Template(
        f"Group the numbers of a list, each 0 or more, by {words}: return a dictionary from that number to the list of its numbers "
        "in their order, as `grouped(numbers)`.",
        f"def grouped(numbers):\n    found = {{}}\n    for x in numbers:\n        found.setdefault({code}, []).append(x)\n    return found\n",
        ((code, slip), (f"found.setdefault({code}, []).append(x)", f"found[{code}] = [x]")),
        lambda draw: (_numbers(draw, 0, 30, 9),),
        (([],),),
    )


def _encoded(draw: random.Random) -> Template:
    least, mark = draw.randint(1, 3), draw.choice(("", "x", "*", ":"))
    written = (
        f"every stretch of at least {least} equal letters" if least > 1 else "every stretch of equal letters"
    )
    otherwise = "; shorter stretches stay as they are" if least > 1 else ""
    shape = f'f"{{size}}{mark}{{letter}}"'
    code = f"{shape} if size >= {least} else letter * size" if least > 1 else shape
    return Template(
        f"Replace {written} of a text by its length, {f'then {mark!r}, ' if mark else ''}then the letter{otherwise}. Return the text, as "
        "`encoded(text)`.",
        "def encoded(text):\n    parts = []\n    at = 0\n    while at < len(text):\n        letter, size = text[at], 1\n"
        "        while text[at : at + size + 1] == letter * (size + 1):\n            size += 1\n"
        f'        parts.append({code})\n        at += size\n    return "".join(parts)\n',
        (
            ("at += size", "at += 1"),
            ("{size}", "{size + 1}"),
            *(((f">= {least}", f"> {least}"),) if least > 1 else ()),
        ),
        lambda draw: ("".join(c * draw.randint(1, 4) for c in _word(draw, "abc", 5, 0)),),
        (("",),),
    )


def _matrix(draw: random.Random) -> Template:
    k = draw.randint(2, 9)
    words, code, slip = draw.choice(
        [
            ("row", "[sum(row) for row in table]", "[sum(row[1:]) for row in table]"),
            ("column", "[sum(column) for column in zip(*table)]", "[sum(row) for row in table]"),
        ]
    )
    return Template(
        f"A table is a list of rows of equally many numbers. Return the list of the sums of each {words}, each taken modulo {k}, as "
        "`sums(table)`.",
        f"def sums(table):\n    return [each % {k} for each in {code}]\n",
        ((code, slip), (f"each % {k}", "each"), (f"each % {k}", f"each // {k}")),
        lambda draw: (_table(draw),),
        (([],), ([[1]],)),
    )


def _table(draw: random.Random) -> list[list[int]]:
    wide = draw.randint(1, 4)
    return [[draw.randint(0, 9) for _ in range(wide)] for _ in range(draw.randint(1, 4))]


# -------- Templates of level 3: something is kept from step to step


def _recurrence(draw: random.Random) -> Template:
    first, second, a, b, m = (draw.randint(*span) for span in ((0, 5), (1, 6), (1, 4), (1, 4), (50, 999)))
    return Template(
        f"A sequence begins with {first} and {second}; every further term is {a} times the term before plus {b} times the one before that, "
        f"modulo {m}. Return the term at index n, counted from 0, as `term(n)`.",
        f"def term(n):\n    one, two = {first}, {second}\n    for _ in range(n):\n"
        f"        one, two = two, ({a} * two + {b} * one) % {m}\n    return one\n",
        (
            (f"{a} * two + {b} * one", f"{a} * one + {b} * two" if a != b else f"{a} * two - {b} * one"),
            ("range(n)", "range(n - 1)"),
            (f") % {m}", f") % {m + 1}"),
        ),
        lambda draw: (draw.randint(0, 40),),
        ((0,), (1,), (2,)),
    )


def _steps(draw: random.Random) -> Template:
    divisor, a, b, most = draw.randint(2, 4), draw.randint(2, 5), draw.randint(1, 5), draw.randint(20, 60)
    return Template(
        f"Begin with a whole number n from 1. A step divides it by {divisor} where that comes out even, and otherwise multiplies it by {a} "
        f"and adds {b}. Return how many steps it takes until it is 1, or {most} if it takes {most} steps or more, as `steps(n)`.",
        f"def steps(n):\n    count = 0\n    while n != 1 and count < {most}:\n"
        f"        n = n // {divisor} if n % {divisor} == 0 else {a} * n + {b}\n        count += 1\n    return count\n",
        (
            (f"count < {most}", f"count < {most - 1}"),
            (f"{a} * n + {b}", f"{a} * (n + {b})"),
            (f"n % {divisor} == 0", f"n % {divisor} == 1"),
        ),
        lambda draw: (
            draw.choice((draw.randint(1, 99), divisor ** draw.randint(0, 5), divisor * draw.randint(1, 9))),
        ),
        ((1,), (divisor,)),
    )


def _balanced(draw: random.Random) -> Template:
    opens, closes = draw.choice(("()", "[]", "{}", "<>"))
    depth = draw.randint(1, 5)
    return Template(
        f"Return whether the brackets {opens!r} and {closes!r} of a text are balanced and never nested more than {depth} deep; other "
        "characters do not matter. The function is `balanced(text)`.",
        f"def balanced(text):\n    depth = 0\n    for c in text:\n        depth += (c == {opens!r}) - (c == {closes!r})\n"
        f"        if depth < 0 or depth > {depth}:\n            return False\n    return depth == 0\n",
        (
            ("depth < 0 or ", ""),
            (f"depth > {depth}", f"depth > {depth + 1}"),
            ("return depth == 0", "return True"),
        ),
        lambda draw: (_brackets(draw, opens, closes, depth),),
        (("",), (closes + opens,), (opens * (depth + 1) + closes * (depth + 1),)),
    )


def _brackets(draw: random.Random, opens: str, closes: str, depth: int) -> str:
    """Return a text that is balanced half of the time."""
    text, here = "", 0
    for _ in range(draw.randint(0, 10)):
        if here and draw.random() < 0.5:
            text, here = text + closes, here - 1
        elif here < depth:
            text, here = text + opens + draw.choice(("", "a")), here + 1
    text += closes * here
    return text if draw.random() < 0.5 else text[: -draw.randint(1, 2)] + draw.choice((opens, closes, ""))


def _machine(draw: random.Random) -> Template:
    m, other = draw.randint(7, 999), draw.choice((("sub", "-"), ("mul", "*")))
    return Template(
        f"A stack machine takes commands in a list: a text of digits pushes that number; `add` and `{other[0]}` take the two top "
        f"numbers, the upper one b and the lower one a, and push a + b or a {other[1]} b, modulo {m}; `dup` pushes the top number again. "
        "A command that lacks its numbers is skipped. Return the stack as a list, the top last, as `machine(commands)`.",
        "def machine(commands):\n    stack = []\n    for command in commands:\n        if command.isdigit():\n"
        '            stack.append(int(command))\n        elif command == "dup":\n            stack += stack[-1:]\n'
        "        elif len(stack) >= 2:\n            b, a = stack.pop(), stack.pop()\n"
        f'            stack.append((a + b if command == "add" else a {other[1]} b) % {m})\n    return stack\n',
        ((f"a {other[1]} b)", f"b {other[1]} a + 1)"), (f") % {m}", ")"), ("stack += stack[-1:]", "pass")),
        lambda draw: (
            [
                draw.choice((str(draw.randint(0, 99)),) * 4 + ("add", other[0], "dup"))
                for _ in range(draw.randint(0, 9))
            ],
        ),
        (([],), (["add"],), (["dup"],), (["3", "5", "add", other[0]],)),
    )


def _increasing(draw: random.Random) -> Template:
    up, equal, gap = draw.random() < 0.5, draw.random() < 0.4, draw.randint(1, 4)
    name = (
        f"{'rises' if up else 'falls'} by at least {gap}"
        if not equal
        else ("never falls" if up else "never rises")
    )
    later, sooner = ("numbers[i]", "numbers[j]") if up else ("numbers[j]", "numbers[i]")
    code = f"{later} >= {sooner}" if equal else f"{later} - {sooner} >= {gap}"
    slip = f"{later} > {sooner}" if equal else f"{later} - {sooner} > {gap}"
    return Template(
        f"Numbers may be crossed out of a list, so that what is left, in its order, {name} from one number to the next. Return the "
        "greatest number of numbers that can be left, as `left(numbers)`.",
        "def left(numbers):\n    best = []\n    for i in range(len(numbers)):\n"
        f"        best.append(1 + max((best[j] for j in range(i) if {code}), default=0))\n    return max(best, default=0)\n",
        (
            (code, slip),
            ("range(i) if", "range(max(i - 1, 0), i) if"),
            ("return max(best, default=0)", "return best[-1] if best else 0"),
        ),
        lambda draw: (_numbers(draw, 0, 12, 9),),
        (([],), ([4, 4, 4],)),
    )


def _coins(draw: random.Random) -> Template:
    coins = sorted(draw.sample(range(2, 20), draw.randint(2, 4)))
    return Template(
        f"Return the least number of coins of the values {', '.join(map(str, coins))} that make up an amount, any of them as often as "
        "wanted, or -1 if none do, as `coins(amount)`.",
        f"def coins(amount):\n    best = [0]\n    for target in range(1, amount + 1):\n"
        f"        options = [best[target - coin] for coin in {coins} if coin <= target and best[target - coin] >= 0]\n"
        "        best.append(min(options) + 1 if options else -1)\n    return best[amount]\n",
        (
            ("min(options)", "max(options)"),
            (" and best[target - coin] >= 0", ""),
            (f"{coins}", f"{coins[:-1]}"),
        ),
        lambda draw: (draw.randint(0, 60),),
        ((0,), (1,)),
    )


def _paths(draw: random.Random) -> Template:
    m, diagonal = draw.randint(11, 9999), draw.random() < 0.5
    moves = "right, down, or both at once" if diagonal else "right or down"
    more = " + above[x]" if diagonal else ""
    return Template(
        f"A map is a list of texts of one length, in which '#' cannot be entered. A move goes one place {moves}. Return the number of "
        f"ways from the top left to the bottom right, modulo {m}, and 0 if either cannot be entered, as `ways(rows)`.",
        "def ways(rows):\n    above = [0] * (len(rows[0]) + 1)\n    for y, row in enumerate(rows):\n        here = [0]\n"
        "        for x, place in enumerate(row):\n"
        f"            count = 1 if x == y == 0 else here[x] + above[x + 1]{more}\n"
        f'            here.append(0 if place == "#" else count % {m})\n        above = here\n    return above[-1]\n',
        (
            (" + above[x + 1]", ""),
            ('0 if place == "#" else count', "count"),
            ("here[x] + above[x + 1]", "here[x] + 2 * above[x + 1]"),
        ),
        lambda draw: (_map(draw),),
        ((["."],), (["#"],), ([".#", ".."],)),
    )


def _map(draw: random.Random) -> list[str]:
    wide = draw.randint(1, 6)
    return ["".join(draw.choices(".#", (5, 1), k=wide)) for _ in range(draw.randint(1, 6))]


def _merged(draw: random.Random) -> Template:
    gap = draw.randint(0, 6)
    rule = f"lie at most {gap} apart" if gap else "overlap or touch"
    return Template(
        f"Merge intervals: a list holds lists [low, high] with low at most high, in any order. Two that {rule} become one that covers "
        "both. Return the merged ones by their lows, as `merged(intervals)`.",
        "def merged(intervals):\n    found = []\n    for low, high in sorted(intervals):\n"
        f"        if found and low - found[-1][1] <= {gap}:\n            found[-1][1] = max(found[-1][1], high)\n"
        "        else:\n            found.append([low, high])\n    return found\n",
        (
            ("max(found[-1][1], high)", "high"),
            (f"<= {gap}", f"< {gap}"),
            ("in sorted(intervals)", "in intervals"),
        ),
        lambda draw: (_intervals(draw),),
        (([],), ([[0, 1], [1 + gap, 9 + gap]],), ([[0, 9], [2, 3]],)),
    )


def _intervals(draw: random.Random) -> list[list[int]]:
    return [
        [low, low + draw.randint(0, 6)] for low in (draw.randint(0, 30) for _ in range(draw.randint(0, 6)))
    ]


def _ledger(draw: random.Random) -> Template:
    between, sign = draw.choice((";", ",", "|", " ")), draw.choice(("=", ":", "->"))
    most = draw.randint(5, 60)
    return Template(
        f"A ledger is a text of entries such as 'ann{sign}3', with {between!r} between them; a name may come several times, and an amount "
        f"may be negative. Return a dictionary from each name to the sum of its amounts, without names whose sum is above {most}, as "
        "`ledger(text)`; an empty text has no entries.",
        "def ledger(text):\n    sums = {}\n"
        f"    for entry in text.split({between!r}) if text else []:\n        name, amount = entry.split({sign!r})\n"
        "        sums[name] = sums.get(name, 0) + int(amount)\n"
        f"    return {{name: total for name, total in sums.items() if total <= {most}}}\n",
        (
            ("sums.get(name, 0) + int(amount)", "int(amount)"),
            (f"<= {most}", f"< {most}"),
            (f" if total <= {most}", ""),
        ),
        lambda draw: (
            between.join(
                f"{draw.choice(('ann', 'bo', 'cy'))}{sign}{draw.choice((draw.randint(-9, 40), most))}"
                for _ in range(draw.randint(1, 6))
            ),
        ),
        (("",),),
    )


TEMPLATES: Mapping[str, tuple[int, Callable[[random.Random], Template]]] = {
    "chosen": (1, _chosen),
    "clamped": (1, _clamped),
    "every": (1, _every),
    "how_many": (1, _how_many),
    "joined": (1, _joined),
    "letters": (1, _letters),
    "line": (1, _line),
    "rotated": (1, _rotated),
    "digits": (2, _digits),
    "encoded": (2, _encoded),
    "grouped": (2, _grouped),
    "longest": (2, _longest),
    "matrix": (2, _matrix),
    "once": (2, _once),
    "ordered": (2, _sorted_words),
    "pairs": (2, _pairs),
    "pieces": (2, _pieces),
    "ranked": (2, _ranked),
    "shifted": (2, _shifted),
    "total": (2, _total),
    "windows": (2, _windows),
    "balanced": (3, _balanced),
    "coins": (3, _coins),
    "increasing": (3, _increasing),
    "ledger": (3, _ledger),
    "machine": (3, _machine),
    "merged": (3, _merged),
    "paths": (3, _paths),
    "recurrence": (3, _recurrence),
    "steps": (3, _steps),
}
"""Name → level, 1 to 3, and what writes a problem."""
HELD_OUT = frozenset({"letters", "rotated", "longest", "shifted", "windows", "merged", "steps"})
"""The templates that are tested on where whole templates are held out; some of each level."""


# -------- From a template to a problem with tests


def problem(
    seed: int,
    split: Split,
    index: int,
    difficulty: tuple[int, int],
    templates: Sequence[str],
    held_out: HeldOut,
) -> Programming:
    """Return the problem at an index: the same in every process, and never one problem in both splits.

    `templates` are names to draw from, all of them if empty. Raises DataError if none of them has a problem for the split.
    """
    return _problem(seed, split, index, difficulty, tuple(templates), held_out)


def candidates(
    split: Split, difficulty: tuple[int, int], templates: Sequence[str], held_out: HeldOut
) -> list[str]:
    """Return the names of the templates that a split draws from."""
    return [
        name
        for name in templates or TEMPLATES
        if difficulty[0] <= TEMPLATES[name][0] <= difficulty[1]
        and (held_out == "problem" or (name in HELD_OUT) == (split == "test"))
    ]


@functools.lru_cache(maxsize=4096)
def _problem(
    seed: int,
    split: Split,
    index: int,
    difficulty: tuple[int, int],
    templates: tuple[str, ...],
    held_out: HeldOut,
) -> Programming:
    draw = random.Random(f"programming/{seed}/{split}/{index}")
    known = candidates(split, difficulty, templates, held_out)
    for _ in range(TRIES if known else 0):
        name = draw.choice(known)
        template = TEMPLATES[name][1](draw)
        if held_out == "template" or split_of(f"{name}/{template.asked}") == split:
            made = with_tests(name, template, draw)
            if tells_apart(made):
                return made
    raise DataError(
        f"`code` finds no generated problem for the {split} split. Name more `environment.templates`, or a wider "
        "`environment.difficulty`."
    )


def tells_apart(made: Programming) -> bool:
    """Return whether tests are fit to pay for: programs with a slip fail, and no answer is right for most calls whatever they ask."""
    results = Counter(repr(expected) for _, expected in made.tests)
    echoed = sum(arguments[0] == expected for arguments, expected in made.tests)
    return len(made.wrong) > 1 and max(echoed, *results.values()) <= MOST_ALIKE * len(made.tests)


def with_tests(name: str, template: Template, draw: random.Random) -> Programming:
    """Return the problem of a template with its tests: shown ones, edges, further ones, and one for each slip that they miss."""
    function = re.findall(r"^def (\w+)\(", template.solution, re.MULTILINE)[-1]
    right = functools.partial(_result, template.solution, function)
    calls: list[Arguments] = []
    while len(calls) < SHOWN:
        arguments = template.draw(draw)
        # Two shown results that differ say more than two that are equal or empty; but some problems have few results.
        if arguments not in calls and (
            len(calls) == 0 or right(arguments) != right(calls[0]) or draw.random() < 0.1
        ):
            calls.append(arguments)
    calls += [edge for edge in template.edges if edge not in calls]
    for _ in range(SEARCHED):
        if len(calls) >= SHOWN + HIDDEN:
            break
        if (arguments := template.draw(draw)) not in calls:
            calls.append(arguments)
    wrong = []
    for old, new in template.slips:
        assert old in template.solution, f"the template '{name}' has no {old!r} to get wrong"
        program = template.solution.replace(old, new)
        slip = functools.partial(_result, program, function)
        # A slip may be none for some parameters: then nothing tells it apart, and it is no wrong program.
        further = (each for each in (template.draw(draw) for _ in range(SEARCHED)) if each not in calls)
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
    """Return what a call returns or raises, and its type: `True` is no 1 to a test."""
    try:
        value = call(program, function, copy.deepcopy(arguments))
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        return "error", type(error).__name__
    return type(value).__name__, value
