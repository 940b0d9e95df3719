"""Honest programs and tests in styles in which people write them: each receives the reward, by calls if the test is literal."""

from __future__ import annotations

import pytest

from kapelle.environments.grading.code.grade import ProgramTests, grade_program, read_literal
from kapelle.environments.grading.code.literal_tests import NotLiteral
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits

PATIENT = Limits(wall_s=60.0, cpu_s=30.0)
STYLES = {
    "namedtuple": (
        """
from collections import namedtuple
P = namedtuple("P", "x y")
def f(a, b): return P(a, b)
""",
        (
            "assert f(1, 2) == (1, 2)",
            "assert f(1, 2) == P(1, 2)",
            "r = f(1, 2)\nassert r.x == 1 and r.y == 2 and r[0] == 1 and len(r) == 2",
            "assert isinstance(f(1, 2), tuple)",
            "x, y = f(3, 4)\nassert x + y == 7",
            'assert f(1, 2)._asdict() == {"x": 1, "y": 2}',
            "assert [f(1, 2), f(0, 1)] == [P(1, 2), (0, 1)]",
            "assert sorted([f(2, 1), f(1, 5)])[0] == P(1, 5)",
            'assert repr(f(1, 2)) == "P(x=1, y=2)"',
        ),
    ),
    "AssertionError expected": (
        """
def f(x):
    assert x > 0, "neg"
    return x
""",
        (
            'try:\n    f(-1)\n    raise ValueError("no")\nexcept AssertionError:\n    pass',
            'ok = False\ntry:\n    f(-1)\nexcept AssertionError as e:\n    ok = str(e) == "neg"\nassert ok',
            "try:\n    f(-1)\nexcept AssertionError:\n    pass\nelse:\n    assert False",
        ),
    ),
    "big ints": (
        """
def f(n): return 10**n
def g(n): return 3**n
""",
        (
            "assert f(6000) == 10**6000",
            "assert g(20000) == 3**20000",
            "assert len(str(f(5000))) == 5001",
            "assert f(9000) % 7 == pow(10, 9000, 7)",
        ),
    ),
    "large values": (
        """
def f(n): return "x" * n
def l(n): return list(range(n))
""",
        (
            "assert len(f(6_000_000)) == 6_000_000",
            "assert l(1_000_000)[-1] == 999_999",
            "assert sum(l(1_200_000)) == 719999400000",
        ),
    ),
    "deep values": (
        """
def f(n):
    r = []
    for _ in range(n): r = [r]
    return r
def depth(x):
    d = 0
    while x:
        x = x[0]
        d += 1
    return d
def t(n):
    r = None
    for i in range(n): r = (i, r)
    return r
""",
        (
            "r = f(500)\nd = 0\nwhile r:\n    r = r[0]\n    d += 1\nassert d == 500",
            "x = []\nfor _ in range(900):\n    x = [x]\nassert depth(x) == 900",
            "assert f(300) == f(300)",
            "x = None\nfor i in range(200):\n    x = (i, x)\nassert t(200) == x",
        ),
    ),
    "unittest": (
        """
def add(a, b): return a + b
def div(a, b):
    if b == 0: raise ZeroDivisionError("division by zero")
    return a / b
""",
        (
            'import unittest\n\n\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.x = 1\n\n    def test_add(self):\n        self.assertEqual(add(self.x, 2), 3)\n\n    def test_div(self):\n        with self.assertRaises(ZeroDivisionError):\n            div(1, 0)\n        self.assertAlmostEqual(div(1, 3), 0.333333, places=5)\n\n    def test_m(self):\n        with self.assertRaisesRegex(ZeroDivisionError, "by zero"):\n            div(2, 0)\n\n    def test_sub(self):\n        for a in range(3):\n            with self.subTest(a=a):\n                self.assertEqual(add(a, 1), a + 1)\n\n\nsuite = unittest.defaultTestLoader.loadTestsFromTestCase(T)\nr = unittest.TextTestRunner().run(suite)\nassert r.wasSuccessful()',
            "import unittest\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n\n\nunittest.main()",
            'import unittest\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n\n\nunittest.main(argv=["x"], exit=False)\nT("test_add").debug()',
        ),
    ),
    "dataclasses": (
        """
from dataclasses import dataclass, field, asdict
@dataclass
class P:
    x: int
    tags: list = field(default_factory=list)
@dataclass(frozen=True)
class Q:
    a: int
    b: str = "z"
@dataclass
class Tree:
    v: int
    left: "Tree" = None
    right: "Tree" = None
def mk(x): return P(x)
def q(a): return Q(a)
def tr(): return Tree(1, Tree(2), Tree(3))
""",
        (
            "assert mk(1) == P(1)",
            'assert asdict(mk(2)) == {"x": 2, "tags": []}',
            "assert repr(q(1)) == \"Q(a=1, b='z')\"",
            "assert tr() == Tree(1, Tree(2), Tree(3))",
            "assert tr().left.v == 2",
            'from dataclasses import asdict as ad\n\nassert ad(tr())["left"]["v"] == 2',
        ),
    ),
    "Solution": (
        """
class Solution:
    def twoSum(self, nums, target):
        s = {}
        for i, x in enumerate(nums):
            if target - x in s: return [s[target - x], i]
            s[x] = i
    def perms(self, xs):
        from itertools import permutations
        return list(permutations(xs))
""",
        (
            "assert Solution().twoSum([2, 7, 11, 15], 9) == [0, 1]",
            "s = Solution()\nassert sorted(s.perms([1, 2])) == [(1, 2), (2, 1)]",
            "assert set(Solution().perms([1, 2])) == {(1, 2), (2, 1)}",
            'sol = Solution()\ncases = [([2, 7], 9, [0, 1]), ([3, 3], 6, [0, 1])]\nfor a, b, c in cases:\n    assert sol.twoSum(a, b) == c, f"{a} {b}"',
        ),
    ),
    "nan honest": (
        """
import math
def mean(xs): return sum(xs) / len(xs) if xs else float("nan")
def clean(xs): return [x for x in xs if not math.isnan(x)]
def safe(a, b): return a / b if b else math.nan
""",
        (
            "import math\n\nassert math.isnan(mean([]))",
            'assert clean([1.0, float("nan")]) == [1.0]',
            "r = safe(1, 0)\nassert r != r",
            "import math\n\nassert safe(1, 2) == 0.5 and math.isnan(safe(1, 0))",
            'assert str(safe(1, 0)) == "nan"',
            'import math\n\nfor a, b, e in [(1, 2, 0.5), (1, 0, float("nan"))]:\n    r = safe(a, b)\n    assert r == e or (math.isnan(r) and math.isnan(e))',
        ),
    ),
    "async": (
        """
import asyncio
async def fetch(x):
    await asyncio.sleep(0)
    return x * 2
async def many(xs): return await asyncio.gather(*(fetch(x) for x in xs))
class Res:
    async def __aenter__(self):
        self.o = True
        return self
    async def __aexit__(self, *a): self.o = False
async def callit(cb): return await cb(3)
""",
        (
            "import asyncio\n\nassert asyncio.run(many([1, 2])) == [2, 4]",
            "import asyncio\n\n\nasync def main():\n    async with Res() as r:\n        assert r.o\n    assert not r.o\n\n\nasyncio.run(main())",
            "import asyncio\n\n\nasync def cb(x):\n    return x + 1\n\n\nassert asyncio.run(callit(cb)) == 4",
        ),
    ),
    "float tolerance": (
        """
import math
def area(r): return math.pi * r * r
def roots(a, b, c):
    d = math.sqrt(b * b - 4 * a * c)
    return ((-b - d) / (2 * a), (-b + d) / (2 * a))
""",
        (
            "assert abs(area(2) - 12.566370614) < 1e-6",
            "import math\n\nassert math.isclose(area(1), math.pi)",
            "import math\n\nassert math.isclose(roots(1, -3, 2)[0], 1.0)",
            "assert round(area(2), 2) == 12.57",
            "import math\n\nassert math.fabs(area(1) - 3.14159) < 1e-3",
            "assert not abs(area(2) - 12.566370614) > 1e-6",
            "import statistics\n\nassert statistics.fmean(roots(1, -3, 2)) == 1.5",
            "assert max(abs(a - b) for a, b in zip(roots(1, -3, 2), (1, 2))) < 1e-9",
        ),
    ),
    "decimal strings dates": (
        """
from decimal import Decimal
import datetime as dt
from fractions import Fraction
import uuid, re, pathlib, string
def d(): return Decimal("1.10")
def day(s): return dt.date.fromisoformat(s)
def tz(): return dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)
def fr(): return [Fraction(1, 2)]
def rx(s): return re.match(r"(\\d+)-(\\d+)", s)
def p(): return pathlib.Path("a/b.txt")
""",
        (
            'from decimal import Decimal\n\nassert d() == Decimal("1.1") and str(d()) == "1.10"',
            'import datetime\n\nassert day("2020-02-29") == datetime.date(2020, 2, 29) and day("2020-02-29").year == 2020',
            "import datetime\n\nassert tz() == datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)",
            "from fractions import Fraction\n\nassert fr() == [Fraction(1, 2)]",
            'assert rx("12-34").group(2) == "34" and rx("x") is None',
            'assert rx("12-34").groups() == ("12", "34")',
            'assert p().name == "b.txt" and p().suffix == ".txt"',
            'm = rx("1-2")\nassert m\nassert m[1] == "1"',
            'assert rx("1-2") is not None',
        ),
    ),
    "json/str": (
        """
import json
def dump(d): return json.dumps(d, sort_keys=True)
def enc(s): return "".join(chr((ord(c) - 97 + 1) % 26 + 97) for c in s)
def surr(): return "\\ud800"
def nul(): return "a\\0b"
def ln(): return "a\\nb\\r\\n"
def uni(): return "ä€😀"
""",
        (
            'import json\n\nassert json.loads(dump({"b": 1, "a": [1]})) == {"a": [1], "b": 1}',
            'assert enc("abz") == "bca"',
            'assert surr() == "\\ud800"',
            'assert nul() == "a\\0b"',
            'assert ln() == "a\\nb\\r\\n"',
            'assert uni() == "ä€😀" and len(uni()) == 3',
        ),
    ),
    "expected first": (
        """
class P:
    def __init__(self, x, y=0): self.x, self.y = x, y
    def __eq__(self, o): return isinstance(o, P) and (self.x, self.y) == (o.x, o.y)
    def __hash__(self): return hash((self.x, self.y))
    def __repr__(self): return f"P({self.x}, {self.y})"
    def __lt__(self, o): return self.x < o.x
def f(a, b=0): return P(a, b)
def many(n): return [P(i) for i in range(n)]
""",
        (
            "assert P(1, 2) == f(1, 2)",
            "assert P(3) != f(1)",
            "assert sorted(many(3)) == [P(0), P(1), P(2)]",
        ),
    ),
    "enum": (
        """
from enum import Enum
class C(Enum):
    RED = "r"
    BLUE = "b"
    @classmethod
    def parse(cls, s): return cls(s)
    @property
    def upper(self): return self.name.lower()
def nxt(c): return C.BLUE if c is C.RED else C.RED
""",
        (
            "assert nxt(C.RED) == C.BLUE",
            'assert [c.name for c in C] == ["RED", "BLUE"]',
            'assert C.RED.value == "r" and C("b").name == "BLUE"',
            "assert isinstance(C.RED, C)",
            'assert C.RED.upper == "red"',
            'assert str(C.RED) == "C.RED"',
        ),
    ),
    "lcb functional": (
        """
class Solution:
    def minOps(self, nums, k): return sum(1 for x in nums if x < k)
    def words(self, ws): return sorted(ws)
    def grid(self, g): return [r[::-1] for r in g]
""",
        (
            'import json\n\ncases = [("[2,11,10,1,3]\\n10", "3"), ("[1]\\n1", "0")]\nfor i, o in cases:\n    args = [json.loads(x) for x in i.split("\\n")]\n    assert Solution().minOps(*args) == json.loads(o)',
            "assert Solution().grid(g=[[1, 2], [3, 4]]) == [[2, 1], [4, 3]]",
            's = Solution\nassert s().words(["b", "a"]) == ["a", "b"]',
            "f = Solution().minOps\nassert f([1, 2], 2) == 1",
            'assert getattr(Solution(), "minOps")([1], 5) == 1',
        ),
    ),
}
"""By what they show: a solution, and tests that it passes."""


def is_literal(test: str) -> bool:
    try:
        return bool(read_literal(ProgramTests((test,))))
    except NotLiteral:
        return False


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_an_honest_program_is_rewarded_in_any_style(sandbox: Bubblewrap, style: str) -> None:
    solution, tests = STYLES[style]
    literal = tuple(filter(is_literal, tests))
    others = tuple(test for test in tests if test not in literal)
    for programs, trusted in ((literal, True), (others, False)):
        if not programs:
            continue
        grade = grade_program(solution, ProgramTests(programs), sandbox, PATIENT, allow_untrusted=not trusted)
        refused = [
            (test, outcome)
            for test, outcome in zip(programs, grade.tests, strict=True)
            if outcome.status != "passed"
        ]
        assert (grade.status, grade.trusted) == ("graded", trusted), grade.explanation
        assert not refused
