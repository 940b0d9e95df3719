"""Honest programs and tests in the styles in which people write them: each is paid, by calls where the test is literal."""

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


def f(a, b):
    return P(a, b)
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
    "typing NamedTuple": (
        """
from typing import NamedTuple


class P(NamedTuple):
    x: int
    y: int = 0

    def norm(self):
        return self.x + self.y

    @property
    def double(self):
        return 2 * self.x


def f(a):
    return P(a)
""",
        (
            "assert f(1) == P(1, 0)",
            "assert f(3).norm() == 3",
            "assert f(3).double == 6",
            "assert P(1).x == 1",
            "assert P(1)._replace(x=5) == P(5)",
            "assert P(1, 2) < P(2, 1)",
            "assert {f(1): 2}[P(1)] == 2",
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
            'import unittest\n\n\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertRaises(AssertionError):\n            f(-1)\n\n\nT("test").debug()',
        ),
    ),
    "big ints": (
        """
def f(n):
    return 10**n


def s(n):
    return str(7**n)


def g(n):
    return 3**n
""",
        (
            "assert f(6000) == 10**6000",
            "assert g(20000) == 3**20000",
            "assert len(str(f(5000))) == 5001",
            "assert f(9000) % 7 == pow(10, 9000, 7)",
        ),
    ),
    "str of big ints (own)": (
        """
import sys

sys.set_int_max_str_digits(0)


def s(n):
    return str(7**n)
""",
        ("assert len(s(9000)) == 7606",),
    ),
    "big sets": (
        """
def f(n):
    return set(range(n))


def d(n):
    return {i: i for i in range(n)}
""",
        (
            "assert f(50000) == set(range(50000))",
            "assert len(f(100000)) == 100000",
            "assert d(50000)[49999] == 49999",
            "assert len(d(60000)) == 60000",
        ),
    ),
    "large values": (
        """
def f(n):
    return "x" * n


def l(n):
    return list(range(n))
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
    for _ in range(n):
        r = [r]
    return r


def depth(x):
    d = 0
    while x:
        x = x[0]
        d += 1
    return d


def t(n):
    r = None
    for i in range(n):
        r = (i, r)
    return r


def dd(n):
    r = {}
    for i in range(n):
        r = {"a": r}
    return r
""",
        (
            "r = f(500)\nd = 0\nwhile r:\n    r = r[0]\n    d += 1\nassert d == 500",
            "x = []\nfor _ in range(900):\n    x = [x]\nassert depth(x) == 900",
            "assert f(300) == f(300)",
            "x = None\nfor i in range(200):\n    x = (i, x)\nassert t(200) == x",
            'r = dd(400)\nd = 0\nwhile r:\n    r = r["a"]\n    d += 1\nassert d == 400',
        ),
    ),
    "linked list": (
        """
class Node:
    def __init__(self, v, next=None):
        self.v = v
        self.next = next


def build(xs):
    head = None
    for x in reversed(xs):
        head = Node(x, head)
    return head


def rev(n):
    p = None
    while n:
        n.next, p, n = p, n, n.next
    return p
""",
        (
            "node = build([1, 2, 3])\nout = []\nwhile node:\n    out.append(node.v)\n    node = node.next\nassert out == [1, 2, 3]",
            "node = rev(build([1, 2, 3]))\nout = []\nwhile node is not None:\n    out.append(node.v)\n    node = node.next\nassert out == [3, 2, 1]",
            "def to(n):\n    return [n.v] + to(n.next) if n else []\n\n\nassert to(rev(build([1, 2]))) == [2, 1]",
            "n = build([1, 2])\nvals = []\nwhile n:\n    vals += [n.v]\n    n = n.next\nassert vals == [1, 2]",
            "assert not build([])",
            "assert build([]) is None",
        ),
    ),
    "setup tree": (
        """
def depth(root):
    if root is None:
        return 0
    return 1 + max(depth(root.left), depth(root.right))


def insert(root, v):
    if root is None:
        return TreeNode(v)
    if v < root.val:
        root.left = insert(root.left, v)
    else:
        root.right = insert(root.right, v)
    return root


class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right
""",
        (
            "assert depth(TreeNode(1, TreeNode(2))) == 2",
            "r = insert(insert(None, 5), 3)\nassert r.val == 5 and r.left.val == 3 and r.right is None",
            "def inorder(n):\n    return inorder(n.left) + [n.val] + inorder(n.right) if n else []\n\n\nr = None\nfor v in [5, 2, 8, 1]:\n    r = insert(r, v)\nassert inorder(r) == [1, 2, 5, 8]",
        ),
    ),
    "defaultdict": (
        """
from collections import defaultdict


def f(ws):
    d = defaultdict(list)
    for w in ws:
        d[len(w)].append(w)
    return d


def c(s):
    d = defaultdict(int)
    for x in s:
        d[x] += 1
    return d


def nested():
    d = defaultdict(lambda: defaultdict(int))
    d["a"]["b"] += 1
    return d
""",
        (
            'r = f(["a", "bb", "c"])\nassert r[1] == ["a", "c"] and r[7] == []',
            'assert c("aab") == {"a": 2, "b": 1}',
            'assert c("aab")["z"] == 0',
            'assert nested()["a"]["b"] == 1 and nested()["q"]["z"] == 0',
            'assert dict(c("a")) == {"a": 1}',
            'assert isinstance(c("a"), dict)',
        ),
    ),
    "int subclass": (
        """
class Money(int):
    def __add__(self, o):
        return Money(int(self) + int(o))

    def __str__(self):
        return f"${int(self)}"

    def dollars(self):
        return self


from enum import IntEnum, IntFlag, Enum, StrEnum, auto, Flag


class C(IntEnum):
    A = 1
    B = 2


class S(StrEnum):
    X = "x"


class P(IntFlag):
    R = 4
    W = 2


class F(Flag):
    R = auto()
    W = auto()


def f(x):
    return Money(x)


def g():
    return C.B


def st():
    return S.X


def p():
    return P.R | P.W


def fl():
    return F.R | F.W
""",
        (
            "assert f(3) == 3",
            "assert f(3) + f(4) == 7",
            'assert str(f(3) + f(4)) == "$7"',
            "assert isinstance(f(3), int)",
            "assert f(3) + 4 == 7",
            "assert 4 + f(3) == 7",
            "assert g() == 2 and g() == C.B and g() is C.B",
            'assert g().name == "B"',
            'assert st() == "x"',
            "assert p() == 6",
            "assert fl() == F.R | F.W",
            "assert C(1) == C.A",
            "assert [c.value for c in C] == [1, 2]",
            "assert f(3) < 4 and f(5) > f(4)",
            "assert isinstance(f(3), Money)",
            "assert f(10).bit_length() == 4",
        ),
    ),
    "slots equality": (
        """
class P:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __eq__(self, o):
        return isinstance(o, P) and (self.x, self.y) == (o.x, o.y)

    def __hash__(self):
        return hash((self.x, self.y))

    def __add__(self, o):
        return P(self.x + o.x, self.y + o.y)

    def __repr__(self):
        return f"P({self.x}, {self.y})"


def f(a, b):
    return P(a, b)
""",
        (
            "assert f(1, 2) == P(1, 2)",
            "assert P(1, 2) + P(2, 3) == P(3, 5)",
            "assert f(1, 2) != P(2, 1)",
            "assert len({P(1, 2), P(1, 2)}) == 1",
            'assert repr(f(1, 2)) == "P(1, 2)"',
            "assert P(1, 2) in [f(1, 2)]",
            'assert {f(1, 2): "a"}[P(1, 2)] == "a"',
        ),
    ),
    "context exit": (
        """
class T:
    def __init__(self):
        self.log = []
        self.open = False

    def __enter__(self):
        self.open = True
        self.log.append("in")
        return self

    def __exit__(self, *a):
        self.open = False
        self.log.append("out")


from contextlib import contextmanager


@contextmanager
def tag(out, name):
    out.append(f"<{name}>")
    yield out
    out.append(f"</{name}>")


@contextmanager
def swap(d, k, v):
    old = d[k]
    d[k] = v
    try:
        yield
    finally:
        d[k] = old


class sup:
    def __init__(self, *e):
        self.e = e

    def __enter__(self):
        return self

    def __exit__(self, t, v, tb):
        return t is not None and issubclass(t, self.e)
""",
        (
            'with T() as t:\n    assert t.open\nassert not t.open and t.log == ["in", "out"]',
            'out = []\nwith tag(out, "b"):\n    out.append("x")\nassert out == ["<b>", "x", "</b>"]',
            'd = {"a": 1}\nwith swap(d, "a", 2):\n    assert d["a"] == 2\nassert d == {"a": 1}',
            'with sup(ValueError):\n    int("x")\nok = 1\nassert ok',
            't = T()\nwith t:\n    pass\nassert t.log == ["in", "out"]',
            'd = {"a": 1}\ntry:\n    with swap(d, "a", 2):\n        raise KeyError\nexcept KeyError:\n    pass\nassert d["a"] == 1',
            "with sup(ZeroDivisionError) as s:\n    1 / 0\nassert s is not None",
        ),
    ),
    "iterators as args": (
        """
def take(it, n):
    r = []
    for _ in range(n):
        r.append(next(it))
    return r


def total(xs):
    return sum(xs)


def pairs(it):
    it = iter(it)
    return list(zip(it, it))


def mk(cls, *a):
    return cls(*a)


def conv(t, x):
    return t(x)


def name(c):
    return c.__name__


def readall(fp):
    return fp.read()
""",
        (
            "it = iter([1, 2, 3, 4])\nassert take(it, 2) == [1, 2]\nassert next(it) == 3",
            "assert total(x * x for x in range(4)) == 14",
            "assert pairs(iter([1, 2, 3, 4])) == [(1, 2), (3, 4)]",
            "import itertools\n\nassert take(itertools.count(5), 3) == [5, 6, 7]",
            "def gen():\n    yield 1\n    yield 2\n\n\nassert total(gen()) == 3",
            'assert conv(int, "5") == 5 and conv(list, "ab") == ["a", "b"]',
            "class A:\n    def __init__(self, x):\n        self.x = x\n\n\nassert mk(A, 3).x == 3",
            'class A:\n    pass\n\n\nassert name(A) == "A"',
            'import io\n\nassert readall(io.StringIO("abc")) == "abc"',
            'assert total(map(int, ["1", "2"])) == 3',
            "assert total({1: 2, 3: 4}.keys()) == 4",
            "assert total({1: 2, 3: 4}.values()) == 6",
            'assert take(enumerate("ab"), 2) == [(0, "a"), (1, "b")]',
            'assert take(zip("ab", [1, 2]), 1) == [("a", 1)]',
            "assert take(reversed([1, 2, 3]), 2) == [3, 2]",
        ),
    ),
    "stack class": (
        """
class Stack:
    def __init__(self):
        self._d = []

    def push(self, x):
        self._d.append(x)

    def pop(self):
        if not self._d:
            raise IndexError("pop from empty stack")
        return self._d.pop()

    def peek(self):
        return self._d[-1]

    def is_empty(self):
        return not self._d

    def __len__(self):
        return len(self._d)

    def __bool__(self):
        return bool(self._d)

    @property
    def size(self):
        return len(self._d)
""",
        (
            "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and len(s) == 1 and not s.is_empty() and s.size == 1",
            's = Stack()\ntry:\n    s.pop()\n    assert False\nexcept IndexError as e:\n    assert "empty" in str(e)',
            "s = Stack()\nassert not s\ns.push(0)\nassert s",
            "s = Stack()\nfor i in range(3):\n    s.push(i)\nout = []\nwhile s:\n    out.append(s.pop())\nassert out == [2, 1, 0]",
            "s = Stack()\nfor i in range(3):\n    s.push(i)\nout = []\nwhile not s.is_empty():\n    out.append(s.pop())\nassert out == [2, 1, 0]",
            "assert Stack().__len__() == 0",
        ),
    ),
    "unittest": (
        """
def add(a, b):
    return a + b


def div(a, b):
    if b == 0:
        raise ZeroDivisionError("division by zero")
    return a / b
""",
        (
            'import unittest\n\n\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.x = 1\n\n    def test_add(self):\n        self.assertEqual(add(self.x, 2), 3)\n\n    def test_div(self):\n        with self.assertRaises(ZeroDivisionError):\n            div(1, 0)\n        self.assertAlmostEqual(div(1, 3), 0.333333, places=5)\n\n    def test_m(self):\n        with self.assertRaisesRegex(ZeroDivisionError, "by zero"):\n            div(2, 0)\n\n    def test_sub(self):\n        for a in range(3):\n            with self.subTest(a=a):\n                self.assertEqual(add(a, 1), a + 1)\n\n\nsuite = unittest.defaultTestLoader.loadTestsFromTestCase(T)\nr = unittest.TextTestRunner().run(suite)\nassert r.wasSuccessful()',
            "import unittest\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n\n\nunittest.main()",
            'import unittest\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n\n\nunittest.main(argv=["x"], exit=False)\nT("test_add").debug()',
            "import unittest\n\ntc = unittest.TestCase()\ntc.assertEqual(add(1, 1), 2)\ntc.assertListEqual([add(1, 1)], [2])\ntc.assertTrue(add(1, 1) == 2)\ntc.assertIn(add(1, 1), [1, 2])\ntc.assertIsInstance(add(1, 1), int)",
        ),
    ),
    "pytest-like": (
        """
def parse(s):
    if not s.strip():
        raise ValueError("empty input")
    return [int(x) for x in s.split(",")]
""",
        (
            'def test_a():\n    assert parse("1,2") == [1, 2]\n\n\ndef test_b():\n    try:\n        parse("")\n    except ValueError as e:\n        assert "empty" in str(e)\n    else:\n        raise AssertionError("no error")\n\n\nfor t in [test_a, test_b]:\n    t()',
            'def test_a():\n    assert parse("1,2") == [1, 2]\n\n\nfor name, fn in list(globals().items()):\n    if name.startswith("test_"):\n        fn()',
            'def check(candidate):\n    assert candidate("3") == [3]\n    assert candidate("3,4") == [3, 4]\n\n\ncheck(parse)',
        ),
    ),
    "mutation": (
        """
def sort(xs):
    xs.sort()


def rot(m):
    m[:] = [list(r) for r in zip(*m[::-1])]


def addk(d, k, v):
    d[k] = v
    return d


def rem(s, x):
    s.discard(x)


def ap(xs, x=None):
    xs.append(x)
    return xs


def sw(a):
    a[0], a[-1] = a[-1], a[0]
    return a
""",
        (
            "xs = [3, 1, 2]\nsort(xs)\nassert xs == [1, 2, 3]",
            "xs = [3, 1, 2]\nassert sort(xs) is None\nassert xs == [1, 2, 3]",
            "m = [[1, 2], [3, 4]]\nrot(m)\nassert m == [[3, 1], [4, 2]]",
            'd = {}\nassert addk(d, "a", 1) == {"a": 1} and d == {"a": 1}',
            "s = {1, 2}\nrem(s, 1)\nassert s == {2}",
            "xs = [1]\nassert ap(xs, 2) is xs",
            "xs = [3, 1, 2]\nwanted = sorted(xs)\nsort(xs)\nassert xs == wanted",
            "xs = [1, 2, 3]\ncopy = xs[:]\nassert sw(copy) == [3, 2, 1]\nassert xs == [1, 2, 3]",
            "import random\n\nxs = [random.randint(0, 9) for _ in range(20)]\nys = list(xs)\nsort(ys)\nassert ys == sorted(xs)",
        ),
    ),
    "callbacks": (
        """
def memo(f):
    c = {}

    def g(x):
        if x not in c:
            c[x] = f(x)
        return c[x]

    return g


def compose(*fs):
    def h(x):
        for f in reversed(fs):
            x = f(x)
        return x

    return h


def retry(n):
    def deco(f):
        def g(*a):
            for i in range(n):
                try:
                    return f(*a)
                except ValueError:
                    if i == n - 1:
                        raise

        return g

    return deco


def mapd(f, d):
    return {k: f(v) for k, v in d.items()}


def sk(xs, key):
    return sorted(xs, key=key)
""",
        (
            "calls = []\n\n\n@memo\ndef sq(x):\n    calls.append(x)\n    return x * x\n\n\nassert sq(3) == 9 and sq(3) == 9 and calls == [3]",
            "assert compose(lambda x: x + 1, lambda x: x * 2)(5) == 11",
            'n = [0]\n\n\n@retry(3)\ndef flaky(x):\n    n[0] += 1\n    if n[0] < 3:\n        raise ValueError("x")\n    return x\n\n\nassert flaky(7) == 7 and n == [3]',
            'assert mapd(lambda v: v + 1, {"a": 1}) == {"a": 2}',
            'assert sk(["bb", "a"], key=len) == ["a", "bb"]',
            "assert sk([3, 1], key=lambda x: -x) == [3, 1]",
            '@retry(2)\ndef bad():\n    raise ValueError("always")\n\n\ntry:\n    bad()\n    assert False\nexcept ValueError as e:\n    assert str(e) == "always"',
        ),
    ),
    "functools.wraps": (
        """
import functools


def timed(f):
    @functools.wraps(f)
    def g(*a, **k):
        g.calls += 1
        return f(*a, **k)

    g.calls = 0
    return g
""",
        (
            '@timed\ndef hello(n):\n    "doc"\n    return "hi " + n\n\n\nassert hello("x") == "hi x" and hello.__name__ == "hello" and hello.__doc__ == "doc" and hello.calls == 1',
        ),
    ),
    "iter class": (
        """
class Count:
    def __init__(self, n):
        self.n = n
        self.i = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i >= self.n:
            raise StopIteration
        self.i += 1
        return self.i


def fib():
    a, b = 0, 1
    while True:
        yield a
        a, b = b, a + b


def echo():
    r = None
    while True:
        r = yield r
""",
        (
            "assert list(Count(3)) == [1, 2, 3]",
            "c = Count(1)\nassert next(c) == 1\ntry:\n    next(c)\n    assert False\nexcept StopIteration:\n    pass",
            "g = fib()\nassert [next(g) for _ in range(5)] == [0, 1, 1, 2, 3]",
            "e = echo()\nnext(e)\nassert e.send(5) == 5",
            "total = 0\nfor x in Count(4):\n    total += x\nassert total == 10",
            "import itertools\n\nassert list(itertools.takewhile(lambda x: x < 5, fib())) == [0, 1, 1, 2, 3]",
            "a, b, *c = Count(4)\nassert (a, b, c) == (1, 2, [3, 4])",
            "assert sum(Count(3)) == 6 and max(Count(3)) == 3 and sorted(Count(3), reverse=True) == [3, 2, 1]",
            "for i, x in zip(range(3), fib()):\n    pass\nassert x == 1",
            "g = fib()\ng.close()\nassert list(g) == []",
            "import types\n\nassert isinstance(fib(), types.GeneratorType)",
            "assert iter(Count(3)) is not None",
            'assert "-".join(map(str, Count(3))) == "1-2-3"',
            'assert dict(zip("ab", Count(2))) == {"a": 1, "b": 2}',
        ),
    ),
    "bank exceptions": (
        """
class InsufficientFunds(Exception):
    def __init__(self, need):
        super().__init__(f"need {need}")
        self.need = need


class NegativeError(InsufficientFunds, ValueError):
    pass


class Account:
    def __init__(self, b=0):
        self.balance = b

    def withdraw(self, x):
        if x < 0:
            raise NegativeError(x)
        if x > self.balance:
            raise InsufficientFunds(x - self.balance)
        self.balance -= x
        return self.balance
""",
        (
            'a = Account(5)\ntry:\n    a.withdraw(9)\n    assert False, "no raise"\nexcept InsufficientFunds as e:\n    assert e.need == 4 and str(e) == "need 4"\nassert a.balance == 5',
            "try:\n    Account(1).withdraw(-1)\nexcept ValueError as e:\n    assert isinstance(e, InsufficientFunds)\nelse:\n    assert False",
            "import unittest\n\nt = unittest.TestCase()\nwith t.assertRaises(InsufficientFunds) as cm:\n    Account().withdraw(1)\nt.assertEqual(cm.exception.need, 1)",
            'raised = False\ntry:\n    Account().withdraw(2)\nexcept Exception as e:\n    raised = type(e).__name__ == "InsufficientFunds"\nassert raised',
            "assert issubclass(InsufficientFunds, Exception)",
            "assert issubclass(NegativeError, ValueError)",
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


def mk(x):
    return P(x)


def q(a):
    return Q(a)


def tr():
    return Tree(1, Tree(2), Tree(3))
""",
        (
            "assert mk(1) == P(1)",
            "assert mk(1) == P(x=1, tags=[])",
            'assert q(1) == Q(1, "z")',
            'assert asdict(mk(2)) == {"x": 2, "tags": []}',
            "assert repr(q(1)) == \"Q(a=1, b='z')\"",
            "try:\n    q(1).a = 5\n    assert False\nexcept AttributeError:\n    pass",
            "import dataclasses\n\ntry:\n    q(1).a = 5\n    assert False\nexcept dataclasses.FrozenInstanceError:\n    pass",
            "assert tr() == Tree(1, Tree(2), Tree(3))",
            "assert tr().left.v == 2",
            "assert [mk(1), mk(2)] == [P(1), P(2)]",
            "assert {q(1), q(1)} == {Q(1)}",
            'p = mk(1)\np.x = 5\np.tags.append("a")\nassert p.tags == ["a"] and p == P(5, ["a"])',
            "from dataclasses import replace\n\nassert replace(q(1), a=3) == Q(3)",
            'from dataclasses import asdict as ad\n\nassert ad(tr())["left"]["v"] == 2',
            "assert mk(1) != P(2)",
            "a = [P(1), P(2)]\nassert P(2) in a and a.index(P(2)) == 1",
            'assert {"k": mk(1)} == {"k": P(1)}',
            "assert (mk(1), mk(2)) == (P(1), P(2))",
        ),
    ),
    "operators": (
        """
class V:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __add__(self, o):
        return V(self.x + o.x, self.y + o.y)

    def __sub__(self, o):
        return V(self.x - o.x, self.y - o.y)

    def __mul__(self, k):
        return V(self.x * k, self.y * k)

    __rmul__ = __mul__

    def __matmul__(self, o):
        return self.x * o.x + self.y * o.y

    def __neg__(self):
        return V(-self.x, -self.y)

    def __eq__(self, o):
        return isinstance(o, V) and self.x == o.x and self.y == o.y

    def __abs__(self):
        return (self.x**2 + self.y**2) ** 0.5

    def __getitem__(self, i):
        return (self.x, self.y)[i]

    def __iter__(self):
        yield self.x
        yield self.y

    def __len__(self):
        return 2

    def __repr__(self):
        return f"V({self.x}, {self.y})"

    def __lt__(self, o):
        return abs(self) < abs(o)

    def __bool__(self):
        return bool(self.x or self.y)

    def __call__(self, t):
        return V(self.x * t, self.y * t)

    def __contains__(self, v):
        return v in (self.x, self.y)

    def __float__(self):
        return abs(self)

    def __int__(self):
        return int(abs(self))
""",
        (
            "assert V(1, 2) + V(3, 4) == V(4, 6)",
            "assert V(1, 2) * 3 == V(3, 6)",
            "assert 3 * V(1, 2) == V(3, 6)",
            "assert V(1, 2) @ V(3, 4) == 11",
            "assert -V(1, 2) == V(-1, -2)",
            "assert abs(V(3, 4)) == 5.0",
            "assert V(1, 2)[1] == 2 and tuple(V(1, 2)) == (1, 2) and len(V(1, 2)) == 2",
            'assert repr(V(1, 2)) == "V(1, 2)" and str(V(1, 2)) == "V(1, 2)"',
            "assert V(1, 1) < V(2, 2) and min(V(3, 3), V(1, 1)) == V(1, 1)",
            "assert not V(0, 0) and V(1, 0)",
            "assert V(1, 2)(2) == V(2, 4)",
            "assert 2 in V(1, 2)",
            "assert float(V(3, 4)) == 5.0 and int(V(3, 4)) == 5",
            "v = V(1, 1)\nv += V(1, 1)\nassert v == V(2, 2)",
            "assert sorted([V(2, 2), V(1, 1)])[0].x == 1",
            "assert sum([V(1, 1), V(2, 2)], V(0, 0)) == V(3, 3)",
            "x, y = V(5, 6)\nassert x == 5 and y == 6",
            'assert f"{V(1, 2)}" == "V(1, 2)"',
            "assert V(1, 2) != V(1, 3)",
        ),
    ),
    "fraction class": (
        """
from math import gcd


class Frac:
    def __init__(self, n, d=1):
        if d == 0:
            raise ZeroDivisionError
        g = gcd(n, d)
        self.n = n // g
        self.d = d // g

    def __add__(self, o):
        if isinstance(o, int):
            o = Frac(o)
        return Frac(self.n * o.d + o.n * self.d, self.d * o.d)

    __radd__ = __add__

    def __eq__(self, o):
        if isinstance(o, int):
            o = Frac(o)
        return self.n == o.n and self.d == o.d

    def __str__(self):
        return f"{self.n}/{self.d}"
""",
        (
            'assert str(Frac(1, 2) + Frac(1, 3)) == "5/6"',
            "assert (Frac(1, 2) + Frac(1, 2)).n == 1",
            "assert Frac(2, 4) == Frac(1, 2)",
            "assert Frac(1, 2) + Frac(1, 3) == Frac(5, 6)",
            'assert str(Frac(1, 2) + 1) == "3/2"',
            "r = Frac(3, 4) + Frac(1, 4)\nassert (r.n, r.d) == (1, 1)",
            "try:\n    Frac(1, 0)\n    assert False\nexcept ZeroDivisionError:\n    pass",
        ),
    ),
    "matrix class": (
        """
class M:
    def __init__(self, rows):
        self.rows = [list(r) for r in rows]

    def __matmul__(self, o):
        return M([[sum(a * b for a, b in zip(r, c)) for c in zip(*o.rows)] for r in self.rows])

    def __eq__(self, o):
        return self.rows == o.rows

    def __getitem__(self, k):
        i, j = k
        return self.rows[i][j]

    def __setitem__(self, k, v):
        self.rows[k[0]][k[1]] = v

    @classmethod
    def eye(cls, n):
        return cls([[int(i == j) for j in range(n)] for i in range(n)])

    @staticmethod
    def zero(n):
        return M([[0] * n] * n)

    @property
    def T(self):
        return M(zip(*self.rows))
""",
        (
            "assert M([[1, 2], [3, 4]]) @ M.eye(2) == M([[1, 2], [3, 4]])",
            "assert M.eye(2).rows == [[1, 0], [0, 1]]",
            "m = M.zero(2)\nm[0, 1] = 5\nassert m[0, 1] == 5",
            "assert M([[1, 2], [3, 4]]).T == M([[1, 3], [2, 4]])",
            "assert M.eye(2) == M([[1, 0], [0, 1]])",
        ),
    ),
    "lru": (
        """
from collections import OrderedDict


class LRUCache:
    def __init__(self, capacity):
        self.c = capacity
        self.d = OrderedDict()

    def get(self, k):
        if k not in self.d:
            return -1
        self.d.move_to_end(k)
        return self.d[k]

    def put(self, k, v):
        self.d[k] = v
        self.d.move_to_end(k)
        if len(self.d) > self.c:
            self.d.popitem(last=False)
""",
        (
            "c = LRUCache(2)\nc.put(1, 1)\nc.put(2, 2)\nassert c.get(1) == 1\nc.put(3, 3)\nassert c.get(2) == -1\nassert c.get(3) == 3",
            "c = LRUCache(1)\nc.put(1, [1])\nc.get(1).append(2)\nassert c.get(1) == [1, 2]",
        ),
    ),
    "Solution": (
        """
class Solution:
    def twoSum(self, nums, target):
        s = {}
        for i, x in enumerate(nums):
            if target - x in s:
                return [s[target - x], i]
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
    "recursive structures": (
        """
def merge(a, b):
    r = dict(a)
    for k, v in b.items():
        r[k] = merge(r[k], v) if isinstance(v, dict) and isinstance(r.get(k), dict) else v
    return r


def flat(x):
    for i in x:
        if isinstance(i, (list, tuple)):
            yield from flat(i)
        else:
            yield i
""",
        (
            'assert merge({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}',
            "assert list(flat([1, [2, (3, [4])]])) == [1, 2, 3, 4]",
            "assert list(flat([])) == []",
        ),
    ),
    "types and hints": (
        """
def f(x: int) -> str:
    return str(x)


def t():
    return int


def n():
    return None


def el():
    return ...


def cx():
    return 1 + 2j


def by():
    return b"ab"


def fs():
    return frozenset([1])


def neg0():
    return -0.0


def inf():
    return float("inf")


def sl():
    return slice(1, 2)


def rng():
    return range(3)


def emp():
    return ()
""",
        (
            'assert f.__annotations__ == {"x": int, "return": str}',
            "assert t() is int",
            "assert n() is None",
            "assert cx() == 1 + 2j",
            'assert by() == b"ab"',
            "assert fs() == {1}",
            "import math\n\nassert math.copysign(1, neg0()) == -1",
            'assert inf() == float("inf")',
            "assert rng() == range(3)",
            "assert emp() == ()",
            'import inspect\n\nassert list(inspect.signature(f).parameters) == ["x"]',
            'assert f(3) == "3" and type(f(3)) is str',
            "assert isinstance(f(1), str)",
            'from typing import get_type_hints\n\nassert get_type_hints(f)["return"] is str',
        ),
    ),
    "nan honest": (
        """
import math


def mean(xs):
    return sum(xs) / len(xs) if xs else float("nan")


def clean(xs):
    return [x for x in xs if not math.isnan(x)]


def safe(a, b):
    return a / b if b else math.nan
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


async def many(xs):
    return await asyncio.gather(*(fetch(x) for x in xs))


class Res:
    async def __aenter__(self):
        self.o = True
        return self

    async def __aexit__(self, *a):
        self.o = False


async def agen(n):
    for i in range(n):
        yield i


async def callit(cb):
    return await cb(3)
""",
        (
            "import asyncio\n\nassert asyncio.run(many([1, 2])) == [2, 4]",
            "import asyncio\n\n\nasync def main():\n    a = await fetch(1)\n    b = await asyncio.gather(fetch(2), fetch(3))\n    assert a == 2 and b == [4, 6]\n\n\nasyncio.run(main())",
            "import asyncio\n\n\nasync def main():\n    async with Res() as r:\n        assert r.o\n    assert not r.o\n\n\nasyncio.run(main())",
            "import asyncio\n\n\nasync def main():\n    return [x async for x in agen(3)]\n\n\nassert asyncio.run(main()) == [0, 1, 2]",
            "import asyncio\n\n\nasync def cb(x):\n    return x + 1\n\n\nassert asyncio.run(callit(cb)) == 4",
            "import asyncio\n\nassert asyncio.get_event_loop_policy().new_event_loop().run_until_complete(fetch(4)) == 8",
            "import asyncio\n\n\nasync def main():\n    r = await asyncio.wait_for(fetch(1), timeout=5)\n    assert r == 2\n\n\nasyncio.run(main())",
            "import unittest\n\n\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test(self):\n        self.assertEqual(await fetch(2), 4)\n\n\nr = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nassert r.wasSuccessful()",
        ),
    ),
    "stdout": (
        """
def greet(n):
    print(f"Hello, {n}!")


def table():
    for i in range(3):
        print(i, end=" ")
    print()


def ask():
    return input("? ").upper()


def err():
    import sys

    print("bad", file=sys.stderr)
""",
        (
            'import io, contextlib\n\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    greet("Bob")\nassert b.getvalue() == "Hello, Bob!\\n"',
            'import io, sys\n\nold = sys.stdout\nsys.stdout = io.StringIO()\ngreet("A")\nout = sys.stdout.getvalue()\nsys.stdout = old\nassert out.strip() == "Hello, A!"',
            'from unittest.mock import patch\n\nwith patch("builtins.input", return_value="abc"):\n    assert ask() == "ABC"',
            'import io\nfrom unittest.mock import patch\n\nwith patch("sys.stdout", new_callable=io.StringIO) as m:\n    greet("Z")\n    assert m.getvalue() == "Hello, Z!\\n"',
            'import sys, io\n\nsys.stdin = io.StringIO("xy\\n")\nassert ask() == "XY"',
        ),
    ),
    "globals": (
        """
count = 0
items = []
CONFIG = {"a": 1}


def inc():
    global count
    count += 1
    return count


def add(x):
    items.append(x)
""",
        (
            "inc()\ninc()\nassert count == 2",
            "add(1)\nassert items == [1]",
            'assert CONFIG["a"] == 1',
            'CONFIG["a"] = 5\nassert CONFIG["a"] == 5',
        ),
    ),
    "inheritance": (
        """
from abc import ABC, abstractmethod


class Shape(ABC):
    @abstractmethod
    def area(self): ...
    def describe(self):
        return f"{type(self).__name__} {self.area():.2f}"


class Sq(Shape):
    def __init__(self, a):
        self.a = a

    def area(self):
        return self.a**2


class Circ(Shape):
    def __init__(self, r):
        self.r = r

    def area(self):
        return 3.14159 * self.r**2


def mk(k, x):
    return {"sq": Sq, "c": Circ}[k](x)
""",
        (
            'assert mk("sq", 2).area() == 4',
            'assert isinstance(mk("sq", 2), Shape) and isinstance(mk("sq", 2), Sq) and not isinstance(mk("c", 1), Sq)',
            "try:\n    Shape()\n    assert False\nexcept TypeError:\n    pass",
            'assert mk("sq", 2).describe() == "Sq 4.00"',
            "assert issubclass(Sq, Shape)",
            "assert sum(s.area() for s in [Sq(1), Sq(2)]) == 5",
            'assert type(mk("sq", 1)).__name__ == "Sq"',
            'assert type(mk("sq", 1)) is Sq',
            'assert mk("sq", 1).__class__ is Sq',
            'assert mk("sq", 1).__class__.__name__ == "Sq"',
            'assert hasattr(mk("sq", 1), "area") and not hasattr(mk("sq", 1), "nope")',
            'assert getattr(mk("sq", 3), "a") == 3',
            "assert Sq.__mro__[1] is Shape",
            "assert max([Sq(1), Sq(3)], key=lambda s: s.area()).a == 3",
        ),
    ),
    "graph": (
        """
from collections import deque


class Graph:
    def __init__(self):
        self.adj = {}

    def add_edge(self, a, b):
        self.adj.setdefault(a, set()).add(b)
        self.adj.setdefault(b, set()).add(a)

    def bfs(self, s):
        seen, q, o = {s}, deque([s]), []
        while q:
            u = q.popleft()
            o.append(u)
            for v in sorted(self.adj[u]):
                if v not in seen:
                    seen.add(v)
                    q.append(v)
        return o


def dij(g, s):
    import heapq

    d = {s: 0}
    h = [(0, s)]
    while h:
        c, u = heapq.heappop(h)
        for v, w in g.get(u, {}).items():
            if c + w < d.get(v, float("inf")):
                d[v] = c + w
                heapq.heappush(h, (c + w, v))
    return d
""",
        (
            "g = Graph()\nfor a, b in [(1, 2), (1, 3), (2, 4)]:\n    g.add_edge(a, b)\nassert g.bfs(1) == [1, 2, 3, 4]\nassert g.adj[1] == {2, 3}",
            'assert dij({"a": {"b": 1, "c": 4}, "b": {"c": 2}}, "a") == {"a": 0, "b": 1, "c": 3}',
        ),
    ),
    "list subclass": (
        """
class Sl(list):
    def insert(self, x):
        import bisect

        i = bisect.bisect(self, x)
        list.insert(self, i, x)


class D(dict):
    def __getattr__(self, k):
        return self[k]


class St(str):
    def shout(self):
        return self.upper() + "!"


class Fl(float):
    def half(self):
        return self / 2


class Tp(tuple):
    def first(self):
        return self[0]


class Bag(set):
    pass


from collections import UserDict, UserList, Counter


class U(UserDict):
    pass


class UL(UserList):
    pass


class Cn(Counter):
    pass


def mk():
    s = Sl()
    s.insert(3)
    s.insert(1)
    return s


def d():
    return D(a=1)


def u():
    return U(a=1)


def ul():
    return UL([1, 2])


def bag():
    return Bag([1, 2])
""",
        (
            "assert mk() == [1, 3]",
            "s = mk()\ns.insert(2)\nassert s == [1, 2, 3] and len(s) == 3 and s[0] == 1",
            'assert d().a == 1 and d()["a"] == 1 and d() == {"a": 1}',
            'assert St("a").shout() == "A!" and St("a") == "a"',
            "assert Fl(3).half() == 1.5 and Fl(3) == 3.0",
            "assert Tp([1, 2]).first() == 1 and Tp([1, 2]) == (1, 2)",
            'assert u()["a"] == 1 and "a" in u() and len(u()) == 1',
            "assert list(ul()) == [1, 2] and ul() == [1, 2]",
            "assert bag() == {1, 2}",
            'assert Cn("aab")["a"] == 2 and Cn("aab").most_common(1) == [("a", 2)]',
            "assert isinstance(mk(), list)",
            "assert [x * 2 for x in mk()] == [2, 6]",
            "assert sorted(mk(), reverse=True) == [3, 1]",
            "s = mk()\ns.append(9)\nassert s == [1, 3, 9]",
            "assert mk() + [5] == [1, 3, 5]",
            "assert mk()[-1] == 3 and mk()[:1] == [1]",
        ),
    ),
    "linked list eq": (
        """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

    def __eq__(self, o):
        return isinstance(o, ListNode) and self.val == o.val and self.next == o.next


def add(a, b):
    c = 0
    h = t = ListNode()
    while a or b or c:
        s = c + (a.val if a else 0) + (b.val if b else 0)
        c, s = divmod(s, 10)
        t.next = ListNode(s)
        t = t.next
        a = a.next if a else None
        b = b.next if b else None
    return h.next
""",
        (
            "assert add(ListNode(2, ListNode(4)), ListNode(5)) == ListNode(7, ListNode(4))",
            "def build(xs):\n    h = None\n    for x in reversed(xs):\n        h = ListNode(x, h)\n    return h\n\n\ndef to(n):\n    r = []\n    while n:\n        r.append(n.val)\n        n = n.next\n    return r\n\n\nassert to(add(build([9, 9]), build([1]))) == [0, 0, 1]",
        ),
    ),
    "random property": (
        """
def qs(xs):
    return sorted(xs)


def isp(n):
    return n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))


def sh(xs, seed):
    import random

    r = random.Random(seed)
    ys = list(xs)
    r.shuffle(ys)
    return ys
""",
        (
            "import random\n\nrandom.seed(0)\nfor _ in range(30):\n    xs = [random.randint(-9, 9) for _ in range(random.randint(0, 9))]\n    assert qs(xs) == sorted(xs)",
            "assert [n for n in range(20) if isp(n)] == [2, 3, 5, 7, 11, 13, 17, 19]",
            "from collections import Counter\n\nxs = [1, 2, 3, 3]\nassert Counter(sh(xs, 1)) == Counter(xs)",
            "r = qs([3, 1, 2])\nassert all(a <= b for a, b in zip(r, r[1:])) and len(r) == 3",
            "assert sh([1, 2, 3], 5) == sh([1, 2, 3], 5)",
        ),
    ),
    "float tolerance": (
        """
import math


def area(r):
    return math.pi * r * r


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


def d():
    return Decimal("1.10")


def day(s):
    return dt.date.fromisoformat(s)


def tz():
    return dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)


def fr():
    return [Fraction(1, 2)]


def rx(s):
    return re.match(r"(\\d+)-(\\d+)", s)


def p():
    return pathlib.Path("a/b.txt")
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
    "match and walrus": (
        """
def f(x):
    return {"k": [x, (1, 2)]}
""",
        (
            'match f(3):\n    case {"k": [n, (a, b)]}:\n        assert n == 3 and a == 1\n    case _:\n        assert False',
            'if r := f(2):\n    assert r["k"][0] == 2',
            'assert (y := f(1)["k"])[0] == 1 and len(y) == 2',
        ),
    ),
    "match class": (
        """
from dataclasses import dataclass


@dataclass
class Pt:
    x: int
    y: int


def f():
    return Pt(1, 2)
""",
        (
            "match f():\n    case Pt(x=1, y=b):\n        assert b == 2\n    case _:\n        assert False",
            "match f():\n    case Pt(a, b):\n        assert (a, b) == (1, 2)\n    case _:\n        assert False",
        ),
    ),
    "singleton/identity": (
        """
class S:
    _i = None

    def __new__(cls):
        if cls._i is None:
            cls._i = super().__new__(cls)
        return cls._i


SENT = object()


def get(d, k, default=SENT):
    return d.get(k, default)


def same(x):
    return x
""",
        (
            "assert S() is S()",
            "assert get({}, 1) is SENT",
            "x = [1]\nassert same(x) is x",
        ),
    ),
    "observer": (
        """
class Emitter:
    def __init__(self):
        self.h = {}

    def on(self, e, f):
        self.h.setdefault(e, []).append(f)

    def off(self, e, f):
        self.h[e].remove(f)

    def emit(self, e, *a):
        for f in self.h.get(e, []):
            f(*a)
""",
        (
            'log = []\ne = Emitter()\ne.on("x", log.append)\ne.emit("x", 3)\nassert log == [3]',
            'log = []\n\n\ndef f(a):\n    log.append(a)\n\n\ne = Emitter()\ne.on("x", f)\ne.emit("x", 1)\ne.off("x", f)\ne.emit("x", 2)\nassert log == [1]',
            'class L:\n    def __init__(self):\n        self.got = []\n\n    def hear(self, x):\n        self.got.append(x)\n\n\nl = L()\ne = Emitter()\ne.on("a", l.hear)\ne.emit("a", 5)\nassert l.got == [5]',
            'from unittest.mock import Mock\n\nm = Mock()\ne = Emitter()\ne.on("x", m)\ne.emit("x", 1, 2)\nm.assert_called_once_with(1, 2)',
        ),
    ),
    "misc truth": (
        """
def f(x):
    return x > 0


def g(x):
    return [] if x == 0 else [x]


def opt(x):
    return None if x < 0 else x


def find(xs, p):
    return next((x for x in xs if p(x)), None)
""",
        (
            "assert f(1)",
            "assert not f(-1)",
            "assert f(1) is True",
            "assert f(1) == True",
            "assert not g(0)",
            "assert g(1)",
            "assert opt(-1) is None and opt(0) == 0",
            "assert find([1, 2, 3], lambda x: x > 1) == 2",
            'if not f(1):\n    raise Exception("x")',
            "assert (f(1), f(-1)) == (True, False)",
            "assert f(1) != f(-1)",
            "assert all(f(x) for x in range(1, 4)) and not any(f(-x) for x in range(3))",
            'exec("assert f(2)")',
            'for e, w in [("f(1)", True), ("f(-1)", False)]:\n    assert eval(e) == w',
        ),
    ),
    "generators coop": (
        """
def chunks(xs, n):
    for i in range(0, len(xs), n):
        yield xs[i : i + n]


def windows(it, n):
    from collections import deque

    d = deque(maxlen=n)
    for x in it:
        d.append(x)
        if len(d) == n:
            yield tuple(d)


def avg():
    t = c = 0
    a = None
    while True:
        x = yield a
        t += x
        c += 1
        a = t / c


def ret():
    yield 1
    return "done"
""",
        (
            "assert list(chunks([1, 2, 3], 2)) == [[1, 2], [3]]",
            "assert list(windows(iter(range(4)), 2)) == [(0, 1), (1, 2), (2, 3)]",
            "a = avg()\nnext(a)\nassert a.send(10) == 10 and a.send(20) == 15",
            'def outer():\n    r = yield from ret()\n    yield r\n\n\nassert list(outer()) == [1, "done"]',
            'g = ret()\nnext(g)\ntry:\n    next(g)\nexcept StopIteration as e:\n    assert e.value == "done"\nelse:\n    assert False',
            'r = chunks("abc", 2)\nassert next(r) == "ab"\nassert next(r) == "c"\nassert next(r, None) is None',
            "assert tuple(chunks((1, 2, 3), 2)) == ((1, 2), (3,))",
            "first, *rest = chunks([1, 2, 3, 4], 2)\nassert first == [1, 2] and rest == [[3, 4]]",
            "count = 0\nfor c in chunks(list(range(100)), 7):\n    count += len(c)\nassert count == 100",
        ),
    ),
    "closures/currying": (
        """
def counter():
    n = 0

    def inc(by=1):
        nonlocal n
        n += by
        return n

    return inc


def curry(f):
    return lambda a: lambda b: f(a, b)


def adder(n):
    return lambda x: x + n


def parts():
    return adder(1), adder(2)


def table():
    return {"add": lambda a, b: a + b}
""",
        (
            "c = counter()\nassert c() == 1 and c(by=5) == 6",
            "assert curry(lambda a, b: a * b)(3)(4) == 12",
            "a, b = parts()\nassert a(1) == 2 and b(1) == 3",
            'assert table()["add"](1, 2) == 3',
            "assert list(map(adder(1), [1, 2])) == [2, 3]",
            "assert [f(1) for f in parts()] == [2, 3]",
            'from functools import reduce\n\nassert reduce(table()["add"], [1, 2, 3]) == 6',
            "assert callable(adder(1))",
            "assert sorted([3, 1, 2], key=lambda x: adder(0)(-x)) == [3, 2, 1]",
            "assert list(filter(lambda x: adder(1)(x) > 2, [1, 2, 3])) == [2, 3]",
        ),
    ),
    "inventory scenario": (
        """
class Item:
    def __init__(self, name, price, qty=1):
        self.name = name
        self.price = price
        self.qty = qty

    def total(self):
        return self.price * self.qty

    def __repr__(self):
        return f"Item({self.name!r})"


class Cart:
    def __init__(self):
        self.items = []

    def add(self, item):
        self.items.append(item)
        return self

    def total(self):
        return round(sum(i.total() for i in self.items), 2)

    def find(self, name):
        return next((i for i in self.items if i.name == name), None)

    def remove(self, item):
        self.items.remove(item)

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)

    def __contains__(self, name):
        return any(i.name == name for i in self.items)

    def by_price(self):
        return sorted(self.items, key=lambda i: i.price)
""",
        (
            'c = Cart()\nc.add(Item("a", 1.5, 2)).add(Item("b", 0.25))\nassert c.total() == 3.25 and len(c) == 2 and "a" in c and "z" not in c',
            'c = Cart()\ni = Item("a", 1)\nc.add(i)\nassert c.find("a") is i\nassert c.find("b") is None\nc.remove(i)\nassert len(c) == 0 and list(c) == []',
            'c = Cart().add(Item("x", 3)).add(Item("y", 1))\nassert [i.name for i in c.by_price()] == ["y", "x"]',
            'c = Cart().add(Item("x", 3))\nfor it in c:\n    assert it.name == "x"\nassert c.items[0].price == 3\nassert str(c.items) == "[Item(\'x\')]"',
            'i = Item("q", 2)\ni.qty += 3\nassert i.total() == 8',
            'c = Cart()\nassert c.items == []\nc.items.append(Item("a", 1))\nassert len(c.items) == 1',
        ),
    ),
    "json/str": (
        """
import json


def dump(d):
    return json.dumps(d, sort_keys=True)


def enc(s):
    return "".join(chr((ord(c) - 97 + 1) % 26 + 97) for c in s)


def surr():
    return "\\ud800"


def nul():
    return "a\\0b"


def ln():
    return "a\\nb\\r\\n"


def uni():
    return "ä€😀"
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
    def __init__(self, x, y=0):
        self.x, self.y = x, y

    def __eq__(self, o):
        return isinstance(o, P) and (self.x, self.y) == (o.x, o.y)

    def __hash__(self):
        return hash((self.x, self.y))

    def __repr__(self):
        return f"P({self.x}, {self.y})"

    def __lt__(self, o):
        return self.x < o.x


def f(a, b=0):
    return P(a, b)


def many(n):
    return [P(i) for i in range(n)]


def same(x):
    return x


def d(n):
    return {i: P(i) for i in range(n)}


def t(n):
    return tuple(P(i) for i in range(n))
""",
        (
            "assert P(1, 2) == f(1, 2)",
            "w = P(1, 2)\nr = f(1, 2)\nassert r == w",
            "expected = [P(0), P(1)]\nassert many(2) == expected",
            "import unittest\n\nunittest.TestCase().assertEqual(P(1), f(1))",
            "for a, w in [(1, P(1)), (2, P(2))]:\n    assert f(a) == w",
            'for a, w in [(1, P(1)), (2, P(2))]:\n    r = f(a)\n    assert r == w, f"{a}"',
            "assert P(1, 2) in [f(1, 2)]",
            "assert P(1) in many(3) and P(7) not in many(3)",
            "assert P(3) != f(1)",
            "assert [P(0)] == many(1)",
            "assert {0: P(0)} == d(1)",
            "assert t(2) == (P(0), P(1))",
            "assert (P(0), P(1)) == t(2)",
            "import unittest\n\n\nclass T(unittest.TestCase):\n    def test(self):\n        expected = P(1, 2)\n        self.assertEqual(f(1, 2), expected)\n\n    def test2(self):\n        self.assertEqual(many(1), [P(0)])\n\n\nr = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nassert r.wasSuccessful()",
            "assert f(1) in {P(1)}",
            "assert {f(1)} == {P(1)}",
            "assert sorted(many(3)) == [P(0), P(1), P(2)]",
            "assert max(many(3)) == P(2)",
            "assert same(P(3)) == P(3)",
            "p = P(3)\nassert same(p) == p and same(p) is p",
            "cases = [(1, P(1)), (2, P(2))]\nfor a, w in cases:\n    assert f(a) == w",
            "assert set(many(2)) == {P(0), P(1)}",
            "assert many(3).index(P(2)) == 2",
            "assert many(3).count(P(1)) == 1",
            "assert all(a == b for a, b in zip(many(2), [P(0), P(1)]))",
            'result = f(1, 2)\nexpected = P(1, 2)\nassert result == expected, f"{result} != {expected}"',
        ),
    ),
    "namedtuple expected first": (
        """
from collections import namedtuple

P = namedtuple("P", "x y")


def f(a, b):
    return P(a, b)
""",
        (
            "w = P(1, 2)\nassert f(1, 2) == w",
            "assert P(1, 2) == f(1, 2)",
            "for a, w in [(1, P(1, 1)), (2, P(2, 2))]:\n    assert f(a, a) == w",
            "cases = [(1, P(1, 1)), (2, P(2, 2))]\nfor a, w in cases:\n    assert f(a, a) == w",
        ),
    ),
    "enum": (
        """
from enum import Enum


class C(Enum):
    RED = "r"
    BLUE = "b"

    @classmethod
    def parse(cls, s):
        return cls(s)

    @property
    def upper(self):
        return self.name.lower()


def nxt(c):
    return C.BLUE if c is C.RED else C.RED


def by(s):
    return C[s]
""",
        (
            "assert nxt(C.RED) == C.BLUE",
            "assert nxt(C.RED) is C.BLUE",
            'assert by("RED") is C.RED',
            'assert C.parse("r") == C.RED',
            'assert [c.name for c in C] == ["RED", "BLUE"]',
            'assert C.RED.value == "r" and C("b").name == "BLUE"',
            "assert len(C) == 2",
            'assert C.RED in [by("RED")]',
            "assert C.RED != C.BLUE",
            "assert isinstance(C.RED, C)",
            'try:\n    C("z")\n    assert False\nexcept ValueError:\n    pass',
            'expected = C.RED\nassert by("RED") == expected',
            'for a, w in [("RED", C.RED), ("BLUE", C.BLUE)]:\n    assert by(a) == w',
            'assert C.RED.upper == "red"',
            'assert C.__members__["RED"] == C.RED',
            'assert str(C.RED) == "C.RED"',
        ),
    ),
    "trie": (
        """
class Trie:
    def __init__(self):
        self.root = {}

    def insert(self, w):
        n = self.root
        for c in w:
            n = n.setdefault(c, {})
        n["$"] = True

    def search(self, w):
        n = self.root
        for c in w:
            if c not in n:
                return False
            n = n[c]
        return "$" in n

    def words(self):
        def go(n, p):
            for k, v in sorted(n.items()):
                if k == "$":
                    yield p
                else:
                    yield from go(v, p + k)

        return list(go(self.root, ""))
""",
        (
            't = Trie()\nfor w in ["a", "ab"]:\n    t.insert(w)\nassert t.search("a") and not t.search("b") and t.words() == ["a", "ab"]',
            't = Trie()\nassert t.root == {}\nt.insert("x")\nassert t.root == {"x": {"$": True}}',
        ),
    ),
    "lists of nodes": (
        """
class Node:
    def __init__(self, v):
        self.v = v
        self.children = []
        self.parent = None

    def add(self, c):
        self.children.append(c)
        c.parent = self
        return c

    def depth(self):
        return 0 if self.parent is None else 1 + self.parent.depth()

    def __iter__(self):
        yield self.v
        for c in self.children:
            yield from c


def build():
    r = Node(1)
    r.add(Node(2)).add(Node(3))
    return r
""",
        (
            "r = build()\nassert list(r) == [1, 2, 3]",
            "r = build()\nassert r.children[0].children[0].v == 3",
            "r = Node(1)\nc = r.add(Node(2))\nassert c.parent is r and c.depth() == 1 and len(r.children) == 1",
            "r = build()\nassert r.children[0].parent is r",
            "r = build()\nstack = [r]\nseen = []\nwhile stack:\n    n = stack.pop()\n    seen.append(n.v)\n    stack.extend(n.children)\nassert seen == [1, 2, 3]",
            "n = build().children[0].children[0]\nd = 0\nwhile n.parent:\n    n = n.parent\n    d += 1\nassert d == 2",
            "r = build()\nr.children.append(Node(9))\nassert [c.v for c in r.children] == [2, 9]",
            "r = build()\nr.children = []\nassert list(r) == [1]",
        ),
    ),
    "heap/queue": (
        """
import heapq


class PQ:
    def __init__(self):
        self.h = []
        self.n = 0

    def push(self, p, x):
        heapq.heappush(self.h, (p, self.n, x))
        self.n += 1

    def pop(self):
        if not self.h:
            raise IndexError("empty")
        return heapq.heappop(self.h)[-1]

    def __len__(self):
        return len(self.h)


class Q:
    def __init__(self, cap):
        self.cap = cap
        self.q = []

    def put(self, x):
        if len(self.q) >= self.cap:
            raise OverflowError
        self.q.append(x)

    def get(self):
        return self.q.pop(0)

    @property
    def full(self):
        return len(self.q) == self.cap
""",
        (
            'q = PQ()\nq.push(2, "b")\nq.push(1, "a")\nassert q.pop() == "a" and len(q) == 1',
            'q = Q(1)\nq.put(1)\nassert q.full\ntry:\n    q.put(2)\n    raise AssertionError("no")\nexcept OverflowError:\n    pass\nassert q.get() == 1 and not q.full',
            'q = PQ()\nq.push(1, {"a": [1]})\nassert q.pop() == {"a": [1]}',
            "q = PQ()\nf = lambda: 1\nq.push(1, f)\nassert q.pop() is f",
            'q = PQ()\nq.push(1, len)\nassert q.pop()("abc") == 3',
        ),
    ),
    "errors": (
        """
class ValidationError(ValueError):
    def __init__(self, field, msg):
        self.field = field
        self.msg = msg
        super().__init__(field, msg)

    def __str__(self):
        return f"{self.field}: {self.msg}"


def val(d):
    if "a" not in d:
        raise ValidationError("a", "missing")
    return True


def chain():
    try:
        1 / 0
    except ZeroDivisionError as e:
        raise RuntimeError("wrapped") from e


def key():
    return {}["k"]


def idx():
    return [][1]


def typ():
    return 1 + "a"


def att():
    return (1).foo


def ni():
    raise NotImplementedError


def stop():
    raise StopIteration


def unic():
    return b"\\xff".decode()


def os_():
    open("/nonexistent")


def js():
    import json

    json.loads("{")


def dec():
    from decimal import Decimal

    Decimal("x")


def rec():
    return rec()


def ae():
    assert 1 == 2, "boom"


def sysx():
    raise SystemExit(3)


def kb():
    raise KeyboardInterrupt


def grp():
    raise ExceptionGroup("g", [ValueError("a")])
""",
        (
            'try:\n    val({})\n    assert False\nexcept ValidationError as e:\n    assert e.field == "a" and str(e) == "a: missing" and e.args == ("a", "missing")',
            "try:\n    chain()\nexcept RuntimeError as e:\n    assert isinstance(e.__cause__, ZeroDivisionError)\nelse:\n    assert False",
            "try:\n    key()\n    ok = False\nexcept KeyError:\n    ok = True\nassert ok",
            "try:\n    idx()\n    ok = False\nexcept IndexError:\n    ok = True\nassert ok",
            "try:\n    typ()\n    ok = False\nexcept TypeError:\n    ok = True\nassert ok",
            "try:\n    att()\n    ok = False\nexcept AttributeError:\n    ok = True\nassert ok",
            "try:\n    ni()\n    ok = False\nexcept NotImplementedError:\n    ok = True\nassert ok",
            "try:\n    unic()\n    ok = False\nexcept UnicodeDecodeError:\n    ok = True\nassert ok",
            "try:\n    os_()\n    ok = False\nexcept FileNotFoundError:\n    ok = True\nassert ok",
            "try:\n    os_()\n    ok = False\nexcept OSError:\n    ok = True\nassert ok",
            "try:\n    rec()\n    ok = False\nexcept RecursionError:\n    ok = True\nassert ok",
            "try:\n    ae()\n    ok = False\nexcept AssertionError:\n    ok = True\nassert ok",
            "try:\n    key()\n    ok = False\nexcept LookupError:\n    ok = True\nassert ok",
            "try:\n    sysx()\n    ok = False\nexcept SystemExit:\n    ok = True\nassert ok",
            "try:\n    kb()\n    ok = False\nexcept KeyboardInterrupt:\n    ok = True\nassert ok",
            "import json\n\ntry:\n    js()\n    ok = False\nexcept json.JSONDecodeError:\n    ok = True\nassert ok",
            "import decimal\n\ntry:\n    dec()\n    ok = False\nexcept decimal.InvalidOperation:\n    ok = True\nassert ok",
            'try:\n    key()\nexcept KeyError as e:\n    assert e.args[0] == "k" and str(e) == "\'k\'"\nelse:\n    assert False',
            'def raises(exc, f, *a):\n    try:\n        f(*a)\n    except exc:\n        return True\n    return False\n\n\nassert raises(IndexError, idx) and not raises(ValueError, lambda: val({"a": 1}))',
            'import unittest\n\nt = unittest.TestCase()\nt.assertRaises(KeyError, key)\nt.assertRaisesRegex(AssertionError, "boom", ae)',
            "from contextlib import suppress\n\nok = True\nwith suppress(KeyError):\n    key()\n    ok = False\nassert ok",
            'try:\n    typ()\nexcept (ValueError, TypeError) as e:\n    assert "unsupported" in str(e)\nelse:\n    raise AssertionError',
            'import traceback\n\ntry:\n    key()\nexcept Exception as e:\n    s = traceback.format_exc()\n    assert "KeyError" in s\nelse:\n    assert False',
            "e = None\ntry:\n    idx()\nexcept Exception as x:\n    e = x\nassert isinstance(e, IndexError)",
        ),
    ),
    "check fn styles": (
        """
def add(a, b):
    return a + b
""",
        (
            'METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0, "neg"\n    assert True, "always"\n\n\ncheck(add)',
            'def run_tests():\n    tests = [((1, 2), 3), ((0, 0), 0)]\n    for args, exp in tests:\n        assert add(*args) == exp, f"{args}"\n    print("ok")\n\n\nrun_tests()',
            'def test(got, expected):\n    if got != expected:\n        raise AssertionError(f"{got}!={expected}")\n\n\ntest(add(1, 2), 3)',
            "inputs = [[1, 2], [3, 4]]\nresults = [3, 7]\nfor i, (inp, exp) in enumerate(zip(inputs, results)):\n    assert add(*inp) == exp",
            "passed = 0\nfor a, b, c in [(1, 2, 3), (2, 2, 4)]:\n    if add(a, b) == c:\n        passed += 1\nassert passed == 2",
            "import sys\n\nfailures = []\nfor a, b, c in [(1, 2, 3)]:\n    try:\n        assert add(a, b) == c\n    except AssertionError:\n        failures.append(a)\nif failures:\n    sys.exit(1)",
            "def assertion(out, exp, tol):\n    if tol == 0:\n        assert out == exp\n    else:\n        assert abs(out - exp) <= tol\n\n\nassertion(add(0.1, 0.2), 0.3, 1e-6)",
            'assert add(*[1, 2]) == 3 and add(**{"a": 1, "b": 2}) == 3',
            "candidate = add\nassert candidate(1, 1) == 2",
            "from types import FunctionType\n\nassert add(1, 2) == 3",
            'assert add("a", "b") == "ab" and add([1], [2]) == [1, 2]',
            'class TestAdd:\n    def test_ints(self):\n        assert add(1, 2) == 3\n\n    def test_str(self):\n        assert add("a", "") == "a"\n\n\nt = TestAdd()\nt.test_ints()\nt.test_str()',
            'class TestAdd:\n    def test_ints(self):\n        assert add(1, 2) == 3\n\n\nfor n in dir(TestAdd):\n    if n.startswith("test"):\n        getattr(TestAdd(), n)()',
            'import unittest\n\n\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls):\n        cls.k = 3\n\n    def test(self):\n        self.assertEqual(add(self.k, 1), 4)\n\n\nif __name__ in ("__main__", "test"):\n    unittest.main()',
            'import doctest\n\n\ndef ex():\n    """\n    >>> add(1,2)\n    3\n    """\n\n\nr = doctest.run_docstring_examples\nassert add(2, 2) == 4',
            "assert add(1, 2) == 3\nassert add(2, 2) == 4",
            "print(add(1, 2))\nassert add(1, 2) == 3",
            "try:\n    assert add(1, 2) == 3\nexcept AssertionError as e:\n    raise e",
            'try:\n    assert add(1, 2) == 3\n    print("passed")\nexcept AssertionError:\n    print("failed")\n    raise',
            "result = add(1, 2)\nassert isinstance(result, int), type(result)\nassert result == 3",
            "assert (lambda r: r == 3)(add(1, 2))",
            "import functools\n\np = functools.partial(add, 1)\nassert p(2) == 3",
            "assert list(map(add, [1, 2], [3, 4])) == [4, 6]",
            "from concurrent.futures import ThreadPoolExecutor\n\nwith ThreadPoolExecutor(2) as ex:\n    assert list(ex.map(lambda x: add(x, 1), range(3))) == [1, 2, 3]",
            "import threading\n\nout = []\nts = [threading.Thread(target=lambda i=i: out.append(add(i, i))) for i in range(3)]\nfor t in ts:\n    t.start()\nfor t in ts:\n    t.join()\nassert sorted(out) == [0, 2, 4]",
            "import timeit\n\nassert timeit.timeit(lambda: add(1, 2), number=3) >= 0\nassert add(1, 2) == 3",
            "import time\n\nt = time.time()\nassert add(1, 2) == 3\nassert time.time() - t < 5",
            "global_ok = add(1, 2) == 3\nassert global_ok",
            "from itertools import product\n\nfor a, b in product(range(3), repeat=2):\n    assert add(a, b) == a + b",
            "assert sum(add(i, 1) for i in range(3)) == 6",
            "assert not add(1, -1)",
            "assert add(2, 3) in (5, 6)",
            "assert 4 < add(2, 3) < 6",
            'assert str(add(1, 2)) == "3" and f"{add(1, 2):03d}" == "003"',
            "assert add(True, True) == 2",
            "r = [add(i, i) for i in range(3)]\nassert r == [0, 2, 4], r",
            "import inspect\n\nassert inspect.isfunction(add) and add(1, 2) == 3",
            "import inspect\n\nassert len(inspect.signature(add).parameters) == 2",
            'assert add.__name__ == "add" and add(0, 1) == 1',
        ),
    ),
    "threads/class": (
        """
import threading


class Tally:
    def __init__(self):
        self.v = 0
        self.l = threading.Lock()

    def inc(self):
        with self.l:
            self.v += 1


def par(n):
    c = Tally()
    ts = [threading.Thread(target=c.inc) for _ in range(n)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    return c.v
""",
        (
            "assert par(20) == 20",
            "import threading\n\nc = Tally()\nts = [threading.Thread(target=c.inc) for _ in range(5)]\nfor t in ts:\n    t.start()\nfor t in ts:\n    t.join()\nassert c.v == 5",
        ),
    ),
    "properties/descriptors": (
        """
class Temp:
    def __init__(self, c=0):
        self._c = c

    @property
    def f(self):
        return self._c * 9 / 5 + 32

    @f.setter
    def f(self, v):
        if v < -459:
            raise ValueError("cold")
        self._c = (v - 32) * 5 / 9

    @f.deleter
    def f(self):
        self._c = None

    @staticmethod
    def conv(x):
        return x + 273

    @classmethod
    def boil(cls):
        return cls(100)


class D(dict):
    def __missing__(self, k):
        return k * 2
""",
        (
            't = Temp()\nassert t.f == 32\nt.f = 212\nassert t._c == 100\ntry:\n    t.f = -500\n    assert False\nexcept ValueError as e:\n    assert "cold" in str(e)',
            "assert Temp.boil().f == 212 and Temp.conv(0) == 273",
            "t = Temp(5)\ndel t.f\nassert t._c is None",
            'assert D()["ab"] == "abab"',
            'd = D(a=1)\nassert d["a"] == 1 and d["z"] == "zz" and len(d) == 1',
            'assert vars(Temp(3)) == {"_c": 3}',
            'assert Temp(3).__dict__ == {"_c": 3}',
            't = Temp()\nsetattr(t, "x", 5)\nassert t.x == 5 and getattr(t, "y", None) is None',
            "import copy\n\nt = Temp(1)\nu = copy.deepcopy(t)\nu._c = 9\nassert t._c == 1 and u._c == 9",
            'assert isinstance(Temp.boil(), Temp) and Temp.__name__ == "Temp"',
            "assert issubclass(D, dict)",
            "t = Temp()\nt._c += 5\nassert t._c == 5",
            "import pickle\n\nassert pickle.loads(pickle.dumps(Temp(7)))._c == 7",
        ),
    ),
    "numbers": (
        """
def f(x):
    return x


def fact(n):
    return 1 if n < 2 else n * fact(n - 1)


def fib(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def pw(a, b):
    return a**b


def fl():
    return 0.1 + 0.2


def neg():
    return -5


def cplx():
    return complex(1, -2)


def tiny():
    return 5e-324


def digits(n):
    return str(2**n)
""",
        (
            'assert fact(1000) % 1000003 == __import__("math").factorial(1000) % 1000003',
            'assert fact(900) == __import__("math").factorial(900)',
            "assert fib(30000) % 10**9 == fib(30000) % 10**9 and fib(10) == 55",
            "assert pw(2, 100000).bit_length() == 100001",
            "assert fl() != 0.3 and abs(fl() - 0.3) < 1e-9",
            "assert neg() // 2 == -3 and neg() % 3 == 1",
            "assert cplx().imag == -2 and abs(cplx()) == 5**0.5",
            "assert tiny() > 0",
            "assert f(10**5000) == 10**5000",
            'assert f(float("inf")) == float("inf")',
            "assert f(-0.0) == 0",
            "assert divmod(f(7), 2) == (3, 1)",
            "assert f(True) is True",
            "assert len(digits(10000)) == 3011",
            "import math\n\nassert math.fabs(f(-2.5)) == 2.5 and math.floor(f(2.7)) == 2 and math.gcd(f(4), 6) == 2",
            "assert round(f(2.567), 2) == 2.57 and int(f(3.9)) == 3 and float(f(2)) == 2.0",
            "import statistics\n\nassert statistics.fmean([f(1), f(2)]) == 1.5 and statistics.median([f(3), f(1), f(2)]) == 2",
            "assert f(1.5).is_integer() is False and f(5).bit_length() == 3",
            'assert (\n    max(f(1), f(2)) == 2\n    and min([f(3), f(1)]) == 1\n    and max([f("a"), f("bb")], key=len) == "bb"\n    and max([], default=0) == 0\n)',
            "assert pow(f(2), 10, 1000) == 24",
            'assert max(f(1), float("-inf")) == 1',
            "assert min(f(x) for x in [3, 2]) == 2",
        ),
    ),
    "apis": (
        """
class Matrix:
    def __init__(self, r):
        self.r = r

    def __add__(self, o):
        if not isinstance(o, Matrix):
            return NotImplemented
        return Matrix([[a + b for a, b in zip(x, y)] for x, y in zip(self.r, o.r)])

    def __eq__(self, o):
        return isinstance(o, Matrix) and self.r == o.r

    def __hash__(self):
        return 1

    def __str__(self):
        return "\\n".join(" ".join(map(str, x)) for x in self.r)

    def shape(self):
        return len(self.r), len(self.r[0])

    def transpose(self):
        return Matrix([list(x) for x in zip(*self.r)])

    def __iter__(self):
        return iter(self.r)


def ident(n):
    return Matrix([[int(i == j) for j in range(n)] for i in range(n)])
""",
        (
            "assert ident(2) == Matrix([[1, 0], [0, 1]])",
            "assert (Matrix([[1]]) + Matrix([[2]])).r == [[3]]",
            "try:\n    Matrix([[1]]) + 3\n    assert False\nexcept TypeError:\n    pass",
            "assert Matrix([[1, 2]]).transpose() == Matrix([[1], [2]])",
            'assert str(ident(2)) == "1 0\\n0 1"',
            "assert [row for row in ident(2)] == [[1, 0], [0, 1]]",
            "m = ident(2)\nn = Matrix([[1, 0], [0, 1]])\nassert m == n and m is not n",
            "m = Matrix([[1, 2], [3, 4]])\nassert m.shape() == (2, 2) and m.transpose().transpose() == m",
            "a = Matrix([[1]])\nb = Matrix([[1]])\nassert a == b\nassert hash(a) == hash(b)",
            "class TestM:\n    def setup_method(self):\n        self.m = ident(2)\n\n    def test_eq(self):\n        assert self.m == Matrix([[1, 0], [0, 1]])\n\n\nt = TestM()\nt.setup_method()\nt.test_eq()",
        ),
    ),
    "lcb functional": (
        """
class Solution:
    def minOps(self, nums, k):
        return sum(1 for x in nums if x < k)

    def words(self, ws):
        return sorted(ws)

    def grid(self, g):
        return [r[::-1] for r in g]
""",
        (
            'import json\n\ncases = [("[2,11,10,1,3]\\n10", "3"), ("[1]\\n1", "0")]\nfor i, o in cases:\n    args = [json.loads(x) for x in i.split("\\n")]\n    assert Solution().minOps(*args) == json.loads(o)',
            "assert Solution().grid(g=[[1, 2], [3, 4]]) == [[2, 1], [4, 3]]",
            's = Solution\nassert s().words(["b", "a"]) == ["a", "b"]',
            "f = Solution().minOps\nassert f([1, 2], 2) == 1",
            'assert getattr(Solution(), "minOps")([1], 5) == 1',
        ),
    ),
    "pytest-ish params": (
        """
def add(a, b):
    return a + b


def parse(s):
    if not s:
        raise ValueError("bad: %r" % s)
    return s.split(",")
""",
        (
            "params = [(1, 2, 3), (0, 0, 0)]\n\n\ndef test_add(a, b, c):\n    assert add(a, b) == c\n\n\nfor p in params:\n    test_add(*p)",
            'import re\n\ntry:\n    parse("")\nexcept ValueError as e:\n    assert re.match(r"bad: \'\'", str(e))\nelse:\n    raise AssertionError("DID NOT RAISE")',
            'class raises:\n    def __init__(self, e):\n        self.e = e\n\n    def __enter__(self):\n        return self\n\n    def __exit__(self, t, v, tb):\n        assert t is not None and issubclass(t, self.e)\n        self.value = v\n        return True\n\n\nwith raises(ValueError) as info:\n    parse("")\nassert "bad" in str(info.value)',
            'from unittest import mock\n\nwith mock.patch("builtins.print") as p:\n    assert add(1, 1) == 2',
            "def approx(a, b):\n    return abs(a - b) < 1e-9\n\n\nassert approx(add(0.1, 0.2), 0.3)",
            'import unittest\n\n\nclass T(unittest.TestCase):\n    def test_a(self):\n        cases = {"x": (1, 2, 3)}\n        for n, (a, b, c) in cases.items():\n            with self.subTest(n):\n                self.assertEqual(add(a, b), c)\n\n    @unittest.skip("x")\n    def test_b(self):\n        self.fail()\n\n    def test_c(self):\n        self.assertRaises(ValueError, parse, "")\n        self.assertCountEqual(parse("b,a"), ["a", "b"])\n        self.assertDictEqual({"a": add(1, 0)}, {"a": 1})\n        self.assertGreater(add(1, 1), 1)\n        self.assertIsNone(None)\n        self.assertAlmostEqual(add(0.1, 0.2), 0.3)\n        self.assertTupleEqual((add(1, 1),), (2,))\n        self.assertNotIn(5, [add(1, 1)])\n        self.assertRegex(parse("ab")[0], "a.")\n\n\nif True:\n    unittest.main(verbosity=2)',
            'import unittest\n\nsuite = unittest.TestSuite()\n\n\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 1), 2)\n\n\nsuite.addTest(T("test_a"))\nr = unittest.TextTestRunner(verbosity=0).run(suite)\nassert not r.failures and not r.errors',
            'import unittest\n\n\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 1), 2)\n\n\nr = unittest.TestResult()\nT("test_a").run(r)\nassert r.wasSuccessful(), r.errors',
            "import unittest, sys\n\n\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 1), 2)\n\n\np = unittest.main(exit=False)\nsys.exit(not p.result.wasSuccessful())",
        ),
    ),
    "iter protocols": (
        """
class Range2:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        i = 0
        while i < self.n:
            yield i
            i += 1

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if isinstance(i, slice):
            return list(range(self.n))[i]
        if not -self.n <= i < self.n:
            raise IndexError("out")
        return range(self.n)[i]

    def __contains__(self, x):
        return 0 <= x < self.n

    def __reversed__(self):
        return iter(range(self.n - 1, -1, -1))

    def __bool__(self):
        return self.n > 0


class Bag:
    def __init__(self, *a):
        self.d = list(a)

    def __or__(self, o):
        return Bag(*self.d, *o.d)

    def __le__(self, o):
        return set(self.d) <= set(o.d)

    def __iadd__(self, x):
        self.d.append(x)
        return self

    def __delitem__(self, i):
        del self.d[i]

    def __setitem__(self, i, v):
        self.d[i] = v

    def __getitem__(self, i):
        return self.d[i]

    def __call__(self):
        return len(self.d)

    def __invert__(self):
        return Bag(*self.d[::-1])

    def __divmod__(self, n):
        return Bag(*self.d[:n]), Bag(*self.d[n:])

    def __index__(self):
        return len(self.d)

    def __format__(self, s):
        return s + str(len(self.d))

    def __enter__(self):
        return self.d

    def __exit__(self, *a):
        self.d.clear()
""",
        (
            "r = Range2(3)\nassert (\n    list(r) == [0, 1, 2]\n    and len(r) == 3\n    and r[1] == 1\n    and r[-1] == 2\n    and r[0:2] == [0, 1]\n    and 2 in r\n    and 5 not in r\n)",
            "assert list(reversed(Range2(3))) == [2, 1, 0]",
            "try:\n    Range2(2)[5]\n    assert False\nexcept IndexError:\n    pass",
            "assert (\n    [*Range2(2)] == [0, 1]\n    and max(Range2(4)) == 3\n    and sum(Range2(4)) == 6\n    and tuple(Range2(1)) == (0,)\n    and set(Range2(2)) == {0, 1}\n    and sorted(Range2(3), key=lambda x: -x) == [2, 1, 0]\n)",
            "a, *b = Range2(3)\nassert a == 0 and b == [1, 2]",
            "assert dict(enumerate(Range2(2))) == {0: 0, 1: 1}",
            "assert (Bag(1) | Bag(2)).d == [1, 2] and Bag(1) <= Bag(1, 2)",
            "b = Bag(1)\nb += 5\nassert b.d == [1, 5]\ndel b[0]\nb[0] = 7\nassert b[0] == 7 and b() == 1",
            "assert (~Bag(1, 2)).d == [2, 1]",
            "x, y = divmod(Bag(1, 2, 3), 1)\nassert x.d == [1] and y.d == [2, 3]",
            "assert [10, 20, 30][Bag(1)] == 20",
            'assert f"{Bag(1, 2):n=}" == "n=2"',
            "b = Bag(1, 2)\nwith b as d:\n    assert d == [1, 2]\nassert b.d == []",
            "assert any(x == 1 for x in Range2(3)) and all(x < 3 for x in Range2(3))",
            'it = iter(Range2(2))\nassert next(it) == 0 and next(it) == 1 and next(it, "end") == "end"',
            "import itertools\n\nassert list(itertools.chain(Range2(1), Range2(2))) == [0, 0, 1]",
            "assert list(zip(Range2(2), Range2(2))) == [(0, 0), (1, 1)]",
            'assert list(map(str, Range2(2))) == ["0", "1"]',
            "x = Range2(0)\nassert not x and Range2(1)",
        ),
    ),
    "state machines": (
        """
from enum import Enum, auto


class S(Enum):
    IDLE = auto()
    RUN = auto()


class M:
    def __init__(self):
        self.state = S.IDLE
        self.hist = [self.state]
        self.cbs = {}

    def go(self):
        if self.state is S.RUN:
            raise RuntimeError("already")
        self.state = S.RUN
        self.hist.append(self.state)
        for c in self.cbs.get(self.state, []):
            c(self)

    def on(self, s, c):
        self.cbs.setdefault(s, []).append(c)
""",
        (
            'm = M()\nassert m.state == S.IDLE\nm.go()\nassert m.state is S.RUN and m.hist == [S.IDLE, S.RUN]\ntry:\n    m.go()\nexcept RuntimeError as e:\n    assert str(e) == "already"\nelse:\n    assert False',
            'm = M()\nlog = []\nm.on(S.RUN, lambda x: log.append(x.state.name))\nm.go()\nassert log == ["RUN"]',
            "assert [s.value for s in S] == [1, 2]",
            "assert list(S) == [S.IDLE, S.RUN]",
            "assert M().state in (S.IDLE, S.RUN)",
            'assert M().state.name == "IDLE"',
            "expected = [S.IDLE, S.RUN]\nm = M()\nm.go()\nassert m.hist == expected",
        ),
    ),
    "json roundtrip": (
        """
import json
from dataclasses import dataclass, asdict, field
from typing import Optional, List


@dataclass
class Item:
    name: str
    price: float = 0.0
    tags: List[str] = field(default_factory=list)
    parent: Optional["Item"] = None

    def to_json(self):
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, s):
        return cls(**json.loads(s))

    def __post_init__(self):
        if self.price < 0:
            raise ValueError("neg")


def top(items, n):
    return sorted(items, key=lambda i: -i.price)[:n]


def total(items):
    return sum(i.price for i in items)


def index(items):
    return {i.name: i for i in items}
""",
        (
            'assert Item.from_json(Item("a", 1.5, ["x"]).to_json()) == Item("a", 1.5, ["x"])',
            'try:\n    Item("a", -1)\n    assert False\nexcept ValueError:\n    pass',
            'items = [Item("a", 1), Item("b", 3), Item("c", 2)]\nassert top(items, 2) == [items[1], items[2]]\nassert [i.name for i in top(items, 2)] == ["b", "c"]',
            'items = [Item("a", 1), Item("b", 3)]\nassert top(items, 1)[0] is items[1]',
            'assert total([Item("a", 1), Item("b", 2)]) == 3',
            'items = [Item("a", 1)]\nassert index(items) == {"a": items[0]} and index(items)["a"] is items[0]',
            'items = [Item("a", 1), Item("b", 3)]\nassert top(items, 1) == [Item("b", 3)]',
            'assert Item("a") == Item("a") and Item("a") != Item("b")',
            'i = Item("a")\ni.tags.append("z")\nassert Item("b").tags == [] and i.tags == ["z"]',
            'assert Item("a", parent=Item("p")).parent.name == "p"',
            'assert Item("a") == Item(name="a", price=0.0, tags=[], parent=None)',
        ),
    ),
    "big io": (
        """
def rot(s):
    return s[::-1]


def sq(xs):
    return [x * x for x in xs]


def mat(n):
    return [[i * j for j in range(n)] for i in range(n)]


def cnt(ws):
    d = {}
    for w in ws:
        d[w] = d.get(w, 0) + 1
    return d


def perms(s):
    from itertools import permutations

    return {"".join(p) for p in permutations(s)}


def primes(n):
    s = bytearray([1]) * (n + 1)
    s[:2] = b"\\0\\0"
    for i in range(2, int(n**0.5) + 1):
        if s[i]:
            s[i * i :: i] = bytes(len(s[i * i :: i]))
    return [i for i in range(n + 1) if s[i]]


def gen(n):
    for i in range(n):
        yield i
""",
        (
            's = "ab" * 500000\nassert rot(s) == s[::-1]',
            "xs = list(range(200000))\nassert sq(xs)[-1] == 199999**2",
            "assert sum(map(sum, mat(300))) == sum(i * j for i in range(300) for j in range(300))",
            'ws = [str(i % 1000) for i in range(50000)]\nassert cnt(ws)["7"] == 50',
            'assert len(perms("abcdefgh")) == 40320',
            "assert len(primes(1000000)) == 78498",
            "assert sum(gen(100000)) == 4999950000",
            "import random\n\nrandom.seed(1)\nfor _ in range(300):\n    xs = [random.randint(0, 99) for _ in range(10)]\n    assert sq(xs) == [x**2 for x in xs]",
        ),
    ),
    "round trips": (
        """
class V:
    def __init__(self, x):
        self.x = x

    def __neg__(self):
        return V(-self.x)

    def __add__(self, o):
        return V(self.x + o.x)

    def __eq__(self, o):
        return isinstance(o, V) and self.x == o.x

    def copy(self):
        return V(self.x)

    def scale(self, k):
        return V(self.x * k)


def enc(v):
    return v.x


def dec(x):
    return V(x)


def ident(v):
    return V(v.x)
""",
        (
            "a = V(1)\nassert -(-a) == a",
            "a = V(1)\nassert a + V(0) == a",
            "a = V(2)\nassert a.copy() == a and a.copy() is not a",
            "a = V(2)\nassert a.scale(1) == a",
            "a = V(3)\nassert ident(a) == a",
            "a = V(2)\nb = V(3)\nassert a + b == b + a",
            "a = V(2)\nassert a == a.copy().copy()",
            "a, b = V(1), V(2)\na.x, b.x = b.x, a.x\nassert a.x == 2",
            "for k in range(3):\n    v = V(k)\n    assert v.copy() == v",
        ),
    ),
}
"""By what they show: a solution, and tests that it passes."""


def is_literal(test: str) -> bool:
    try:
        return bool(read_literal(ProgramTests((test,))))
    except NotLiteral:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_an_honest_program_is_paid_in_any_style(sandbox: Bubblewrap, style: str) -> None:
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
