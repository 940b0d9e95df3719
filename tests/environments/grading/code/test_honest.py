"""What honest programs do beside returning numbers, and faults that are the tests' own."""

from __future__ import annotations

from typing import Any

import pytest
from tests.environments.grading.code.test_styles import is_literal

from kapelle.environments.grading.code.grade import (
    ProgramTests,
    grade_program,
    same_value,
)
from kapelle.environments.sandbox.bubblewrap import Bubblewrap

HONEST = """
import asyncio, datetime
from decimal import Decimal
from fractions import Fraction

class Refusal(ValueError):
    pass

class Strange(Exception):
    pass

class Account:
    def __init__(self, start): self.balance = start; self.log = []
    def pay(self, amount):
        if amount > self.balance: raise Refusal("too much")
        self.balance -= amount; self.log.append(amount); return self
    def __len__(self): return len(self.log)
    def __getitem__(self, place): return self.log[place]
    def __iter__(self): return iter(self.log)
    def __str__(self): return f"account with {self.balance}"

def count(n):
    for k in range(n): yield k
def forever():
    k = 0
    while True:
        yield k
        k += 1
def even(n): return range(0, n, 2)
def double(xs): xs[:] = [2 * x for x in xs]
def deep(grid, table): grid[0][0] = 9; table["new"] = [1]; table["old"].append(2)
def fill(buffer): buffer.extend(b"xy")
def apply(f, xs): return [f(x) for x in xs]
def twice(f): return lambda x: f(f(x))
def guarded(f):
    try: return f()
    except KeyError as error: return f"caught {error}"
def third(): return Fraction(1, 3)
def price(): return Decimal("0.10")
def leap(): return datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 2, 3, 4), datetime.timedelta(hours=5)
async def soon(x):
    await asyncio.sleep(0)
    return x + 1
def strange(): raise Strange("oh")
def loud(n): print("x" * n); return n
def long(n): return list(range(n))
def nothing(): return float("nan")
class Words:
    def __init__(self, *words): self.words = words
    def __contains__(self, word): return word in self.words
    def __repr__(self): return "words"
class Vector:
    def __init__(self, x): self.x, self.next = x, None
    def __add__(self, other): return Vector(self.x + other.x)
    def __rmul__(self, k): return Vector(k * self.x)
    def __abs__(self): return abs(self.x)
class Pile:
    def __init__(self): self.things = []
    def put(self, thing): self.things.append(thing)
    def __len__(self): return len(self.things)
    def __iter__(self): return iter(self.things)
    def take(self): return self.things.pop()
from collections import Counter, deque, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
LIMIT, SEEN = 10, []
def see(x): SEEN.append(x)
def letters(text): return Counter(text)
def queue(n): return deque(range(n), 5)
Pair = namedtuple("Pair", "first second")
def pair(): return Pair(1, 2)
@dataclass(order=True)
class Point:
    x: int
    y: int = 0
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
def point(x, y): return Point(x, y)
class Light(Enum):
    RED = 1
    GREEN = 2
def after(light): return Light.GREEN if light is Light.RED else Light.RED
@contextmanager
def forgiving():
    try: yield 5
    except KeyError: pass
class Coded(Exception):
    def __init__(self, text, code): super().__init__(text); self.code = code
def coded(): raise Coded("oh", 7)
def strip(xs):
    kept = sorted(set(xs))
    xs[:len(kept)] = kept
    return len(kept)
async def later(n):
    for k in range(n):
        await asyncio.sleep(0)
        yield k
class Open:
    async def __aenter__(self): return self
    async def __aexit__(self, *args): pass
    async def get(self): return 5
class Squares:
    def __getitem__(self, k):
        if k > 3: raise IndexError
        return k * k
"""
PASSED = (
    "assert list(count(3)) == [0, 1, 2] and sum(count(1000)) == 499500",
    "g = count(2)\nassert next(g) == 0 and next(g) == 1\ntry:\n    next(g)\n    assert False\nexcept StopIteration:\n    pass",
    "from itertools import islice\nassert list(islice(forever(), 3)) == [0, 1, 2]",
    "assert even(5) == range(0, 5, 2) and list(even(5)) == [0, 2, 4]",
    "xs = [1, 2]\nassert double(xs) is None\nassert xs == [2, 4]",
    "row = [1]\ngrid, table = [row, [2]], {'old': [1]}\ndeep(grid, table=table)\nassert grid == [[9], [2]] and row == [9] and table == {'old': [1, 2], 'new': [1]}",
    "b = bytearray(b'a')\nfill(b)\nassert b == bytearray(b'axy')",
    "assert apply(lambda x: x * x, [1, 2]) == [1, 4] and apply(len, ['a', 'bc']) == [1, 2]",
    "assert twice(lambda x: x + 3)(1) == 7",
    "def f():\n    raise KeyError('k')\nassert guarded(f) == \"caught 'k'\"",
    "from fractions import Fraction\nassert third() == Fraction(1, 3) and third() * 3 == 1",
    "from decimal import Decimal\nassert price() == Decimal('0.10')",
    "import datetime\nassert leap() == (datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 2, 3, 4), datetime.timedelta(hours=5))",
    "import asyncio\nassert asyncio.run(soon(1)) == 2",
    "async def main():\n    assert await soon(4) == 5\nimport asyncio\nasyncio.run(main())",
    "a = Account(10)\nassert a.pay(3).balance == 7 and len(a) == 1 and a[0] == 3 and list(a) == [3] and str(a) == 'account with 7'",
    "try:\n    Account(1).pay(2)\n    assert False\nexcept Refusal as error:\n    assert str(error) == 'too much'",
    "try:\n    Account(1).pay(2)\n    assert False\nexcept ValueError:\n    pass",
    "try:\n    strange()\n    assert False\nexcept (KeyError, Strange):\n    pass",
    "assert loud(3_000_000) == 3_000_000",
    "assert sum(len(long(40_000)) for _ in range(6)) == 240_000",
    "assert 'a' in Words('a', 'b') and 'c' not in Words('a')",
    "assert abs(Vector(-2)) == 2 and (Vector(1) + Vector(2)).x == 3 and (2 * Vector(3)).x == 6",
    "p, v = Pile(), Vector(1)\np.put(v)\nassert len(p) == 1\np.put(2)\nassert len(p) == 2 and p.take() == 2 and p.take() == v",
    "v, steps = Vector(1), 0\nwhile v:\n    v, steps = v.next, steps + 1\nassert steps == 1 and repr(Words()) == 'words'",
    "assert 3 in count(4) and 5 not in count(4)",
    "g = count(1)\ndef drain():\n    yield next(g, None)\n    yield next(g, None)\nassert list(drain()) == [0, None]",
    "import math\nassert math.isnan(nothing()) and nothing() != nothing()",
    "assert letters('aab').most_common(1) == [('a', 2)] and letters('ab')['z'] == 0",
    "from collections import Counter\nassert letters('ab') + letters('b') == Counter('abb') == {'a': 1, 'b': 2}",
    "from collections import deque\nd = queue(3)\nd.appendleft(9)\nassert d == deque([9, 0, 1, 2]) and d.maxlen == 5",
    "assert pair().second == 2 and pair() == (1, 2) == Pair(1, 2) and pair()._asdict() == {'first': 1, 'second': 2}",
    "assert LIMIT == 10 and LIMIT + 1 == 11 and isinstance(LIMIT, int)",
    "assert SEEN == []\nsee(3)\nassert SEEN == [3]",
    "assert point(1, 2) == Point(1, 2) and point(1, 2) != Point(1, 3) and [point(3, 4)] == [Point(3, 4)]",
    "assert Point(1, 2) + Point(3, 4) == Point(4, 6)",
    "assert sorted([Point(2), Point(1)])[0] == Point(1) < Point(2) and isinstance(Point(1), Point)",
    "assert after(Light.RED) == Light.GREEN and after(Light.RED).name == 'GREEN' and Light(2) == Light.GREEN != Light.RED",
    "with forgiving() as five:\n    assert five == 5\n    raise KeyError('k')",
    "try:\n    coded()\n    assert False\nexcept Coded as error:\n    assert error.code == 7 and str(error) == 'oh'",
    "try:\n    strange()\nexcept Exception as error:\n    assert type(error).__name__ == 'Strange' and str(error) == 'oh'",
    "xs = [2, 1, 2]\nk = strip(xs)\nassert k == 2 and xs[:k] == [1, 2]",
    "import asyncio\nasync def main():\n    return [k async for k in later(3)]\nassert asyncio.run(main()) == [0, 1, 2]",
    "import asyncio\nasync def main():\n    async with Open() as o:\n        assert await o.get() == 5\nasyncio.run(main())",
    "assert 4 in Squares() and 5 not in Squares() and count.__name__ == 'count'",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("literal", [True, False])
def test_honest_code_is_rewarded(sandbox: Bubblewrap, literal: bool) -> None:
    tests = tuple(test for test in PASSED if is_literal(test) is literal)
    grade = grade_program(HONEST, ProgramTests(tests), sandbox, allow_untrusted=not literal)
    assert grade.trusted is literal
    refused = [
        (test, found) for test, found in zip(tests, grade.tests, strict=True) if found.status != "passed"
    ]
    assert not refused


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        ProgramTests(("import no_such_module\nassert f([1]) == f([1])",)),
        ProgramTests(("assert f([1]) == f([1])",), setup="import no_such_module"),
        ProgramTests(("assert f(1) == = 1",)),
        ProgramTests(("assert True",)),
        ProgramTests(("def check():\n    assert f(1) == 2",)),
        ProgramTests(("try:\n    assert f(1) == 2\nexcept:\n    print('failed')",)),
        ProgramTests(
            (
                "assert f(1) == f(1)",
                "import contextlib\nwith contextlib.suppress(Exception):\n    assert f(1) == 2",
            )
        ),
    ],
    ids=lambda tests: f"{tests.setup} {tests.programs[-1]}",
)
def test_an_error_in_the_tests_gives_no_grade(sandbox: Bubblewrap, tests: ProgramTests) -> None:
    grade = grade_program("f = lambda x: 2 * x", tests, sandbox, allow_untrusted=True)
    assert (grade.status, grade.score) == ("ungraded", 0.0), grade
    assert grade.explanation


@pytest.mark.slow
def test_a_missing_name_is_an_error_of_the_candidate(sandbox: Bubblewrap) -> None:
    # A single name is what is asked for, however it is called.
    tests = ProgramTests(("assert deepcopy([4]) == [4]",))
    assert grade_program("from copy import deepcopy", tests, sandbox).solved
    missing = grade_program("import no_such_module", tests, sandbox)
    assert (missing.status, missing.tests[0].status) == ("graded", "error")


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ({True}, {1}, False),
        (frozenset({(1, True)}), frozenset({(1, 1)}), False),
        ({True: 1}, {1: 1}, False),
        ({1.0: 1}, {1: 1}, True),
        ({1, 2.0}, {1, 2}, True),
        ([True], [1], False),
        (3, 3.0, True),
        ({"a": {1}}, {"a": {True}}, False),
    ],
)
def test_types_count_inside_too(got: Any, expected: Any, same: bool) -> None:
    assert same_value(got, expected) is same
    assert same_value(expected, got) is same


def test_whole_numbers_are_exact_whatever_the_tolerance() -> None:
    assert not same_value(1000, 1001, 0.01)
    assert not same_value(1000.0, 1001, 0.01)
    assert same_value(1000.0, 1001.0, 0.01)
    assert not same_value(float("inf"), 1e308, 0.5)
