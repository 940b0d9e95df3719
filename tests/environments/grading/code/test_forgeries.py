"""Values, objects and exceptions that say what suits them, for tests that leave the saying to them: none is paid."""

from __future__ import annotations

import pytest
from tests.environments.grading.code.test_styles import is_literal

from kapelle.environments.grading.code.grade import ProgramTests, grade_program
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits

PATIENT = Limits(wall_s=60.0, cpu_s=30.0)
FORGERIES = {
    "nan": (
        """
nan = float("nan")
def f(*a): return nan
def l(*a): return [nan, nan]
def t(*a): return "nan"
def inf(*a): return float("inf")
def c(*a): return complex(nan, 0)
def tt(*a): return ["nan", "nan"]
def big(*a): return "1e999"
""",
        (
            "import math\n\nassert not math.fabs(f(3) - 5) > 1e-6",
            "import math\n\nassert not math.fabs(t(3) and float(t(3)) - 5) > 1e-6",
            "assert not float(t(3)) - 5 > 1e-6",
            "assert not abs(float(f(3)) - 5) > 1e-6",
            "assert not divmod(f(3), 2)[1] > 5",
            "assert not f(3).real > 5",
            "assert not c(3).real - 5 > 1e-6",
            "from statistics import fmean\n\nassert not abs(fmean(l(3)) - 5) > 1e-6",
            "assert max(0, abs(float(t(1)) - 5)) < 1e-6",
            "assert sorted([float(t(1)), 5])[0] != 5",
            'd = inf(1) - float("inf")\nassert not abs(d) > 1e-6',
            "assert not abs(float(big(1)) - float(big(2))) > 1e-6",
            "bad = [x for x in map(float, tt(3)) if abs(x - 5) > 1e-6]\nassert not bad",
            "import math\n\nassert min(1e-9, abs(float(t(1)) - 5)) < 1e-6",
            "import operator\n\nassert not operator.gt(abs(f(1) - 5), 1e-6)",
            "def close(a, b, tol=1e-6):\n    return not abs(a - b) > tol\n\n\nassert close(float(t(1)), 5)",
            "from fractions import Fraction\n\nassert not abs(float(t(1)) - Fraction(5)) > 1e-6",
        ),
    ),
    "dataclass fields": (
        """
class Meta(type):
    looks = 0
    def __getattribute__(cls, n):
        if n == "__dataclass_fields__":
            Meta.looks += 1
            return {"x": 1, "y": 1} if Meta.looks > 1 else {}
        return super().__getattribute__(n)
class P(metaclass=Meta):
    def __init__(self, x=0, y=0):
        self.x, self.y = x, y
        LAST.append((x, y))
    def __eq__(self, o): return True
    def __hash__(self): return 1
LAST = []
class D:
    def __init__(self, x, y): D.last = (x, y)
    def __getattribute__(self, n):
        if n == "__dict__": return dict(zip("xy", D.last))
        if n in "xy": return D.last["xy".index(n)]
        return object.__getattribute__(self, n)
    def __eq__(self, o): return True
    def __add__(self, o): return self
    def __hash__(self): return 7
def f(*a): return P(0, 0)
def d(*a): return D(0, 0)
""",
        (
            "assert f(1) == P(4, 6)",
            "r = d(1)\nw = D(4, 6)\nassert r == w",
            "assert {D(4, 6): 1}[d(1)] == 1",
        ),
    ),
    "inconsistent": (
        """
class L(list):
    n = 0
    def __len__(self):
        L.n += 1
        return 3
    def __iter__(self): return iter(())
    def __eq__(self, o): return True
    def __getitem__(self, i): return 0
    def __contains__(self, x): return True
class N:
    k = 0
    def __bool__(self):
        N.k += 1
        return N.k % 2 == 1
    def __lt__(self, o): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __hash__(self): return hash(5)
    def __len__(self): return 3
    def __iter__(self): return iter([])
    def __getitem__(self, i): raise IndexError
    def __contains__(self, x): return True
    def __call__(self, *a): return self
    def __getattr__(self, n):
        if n.startswith("__"): raise AttributeError(n)
        return self
    def __add__(self, o): return o
    __radd__ = __sub__ = __rsub__ = __mul__ = __mod__ = __and__ = __xor__ = __add__
    def __abs__(self): return 0
    def __int__(self): return 0
    def __index__(self): return 0
    def __float__(self): return 0.0
    def __round__(self, n=0): return 5
    def __str__(self): return "5"
    __repr__ = __str__
    def __format__(self, s): return "5"
class I(int):
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __lt__(self, o): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, o): return 0
    def __rsub__(self, o): return 0
    def __mod__(self, o): return 0
    def __hash__(self): return 5
    def __bool__(self): return True
    def __abs__(self): return 0
class St(str):
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __hash__(self): return 0
    def __contains__(self, o): return True
    def startswith(self, *a): return True
    def lower(self): return self
    def strip(self): return self
    def __len__(self): return 5
    def __add__(self, o): return o
class Tu(tuple):
    def __eq__(self, o): return True
    def __len__(self): return 2
    def __getitem__(self, i): return 5
    def __iter__(self): return iter((5, 5))
class Di(dict):
    def __eq__(self, o): return True
    def __getitem__(self, k): return 5
    def __contains__(self, k): return True
    def get(self, k, d=None): return 5
    def __missing__(self, k): return 5
    def __len__(self): return 1
    def keys(self): return [1]
    def items(self): return []
from collections import defaultdict, UserDict, UserList
class Fl(float):
    def __eq__(self, o): return True
    def __sub__(self, o): return 0.0
    def __rsub__(self, o): return 0.0
    def __lt__(self, o): return True
    def __round__(self, n=None): return 5.0
    def __abs__(self): return 0.0
class UL(UserList):
    def __eq__(self, o): return True
class Se(set):
    def __eq__(self, o): return True
    def __sub__(self, o): return set()
    __xor__ = __rsub__ = __sub__
    def issubset(self, o): return True
    def issuperset(self, o): return True
    def __le__(self, o): return True
def ll(*a): return L()
def n(*a): return N()
def i(*a): return I(3)
def st(*a): return St("x")
def tu(*a): return Tu((1,))
def di(*a): return Di()
def fl(*a): return Fl(1.0)
def ul(*a): return UL([])
def se(*a): return Se()
def dd(*a): return defaultdict(lambda: 5)
def ln(*a): return [N(), N()]
""",
        (
            "assert ll() == [1, 2, 3]",
            "r = ll()\nassert len(r) == 3 and all(a == b for a, b in zip(r, [1, 2, 3]))",
            "assert [1, 2, 3] == ll()",
            "assert 5 in ll()",
            "assert n()",
            "assert not n()",
            "assert n() == 5",
            "assert 5 == n()",
            "assert n() > 4 and n() < 6",
            "assert 4 < n() < 6",
            "assert n() >= 5",
            "assert abs(n() - 5) < 1e-6",
            "assert sum(n() + [5]) == 5",
            "assert 5 in n()",
            "assert n().value == 5",
            "assert n() in [5]",
            "assert n() in {5}",
            "assert n() in {5: 1}",
            "assert {n()} == {5}",
            "assert [n()] == [5]",
            "assert (n(),) == (5,)",
            "assert n() + 5 == 5",
            "assert int(n()) == 0 and n() + 3 == 3",
            "assert not n() != 5",
            "r = n()\nassert r >= 5 and r <= 5",
            "assert i() == 5",
            "assert 5 == i()",
            "assert i() > 4",
            "assert i() - 5 == 0",
            "assert 5 - i() == 0",
            "assert i() in [5]",
            "assert i() in {5}",
            "assert abs(i() - 5) == 0",
            "assert not i() % 5",
            "assert {5: 1}[i()] == 1",
            'assert st() == "hello"',
            'assert "hello" == st()',
            'assert st().lower() == "hello"',
            'assert "hello" in st()',
            'assert st().startswith("hello")',
            "assert len(st()) == 5",
            'assert st() + "hello" == "hello"',
            "assert tu() == (5, 5)",
            "a, b = tu()\nassert a == 5 and b == 5",
            "assert len(tu()) == 2 and tu()[1] == 5",
            "assert list(tu()) == [5, 5]",
            'assert di() == {"a": 5}',
            'assert "a" in di() and di().get("a") == 5',
            "assert fl() == 5.0",
            "assert abs(fl() - 5) < 1e-6",
            "assert fl() - 5 == 0",
            "assert round(fl(), 2) == 5.0",
            "assert fl() < 0",
            "assert ul() == [1]",
            "assert se() == {1, 2}",
            "assert not se() - {1} and not {1, 2} - se()",
            "assert not se() ^ {1, 2}",
            "assert se() >= {1, 2}",
            "assert {1, 2} <= se()",
            "assert all(dd()[k] == 5 for k in range(3)) and len(dd()) == 3",
            "assert ln() == [5, 5]",
            "assert sorted(ln()) == [5, 5]",
            "assert max(ln()) == 5",
            "assert sum(ln()) == 5",
            "import unittest\n\nt = unittest.TestCase()\nt.assertIn(5, n())",
            "import math\n\nassert math.isclose(n(), 5)",
            "import math\n\nassert math.isclose(fl(), 5)",
            "import operator\n\nassert operator.eq(n(), 5)",
            "assert bool(n())",
            "assert any(ln())",
        ),
    ),
    "exceptions": (
        """
def b(*a): raise BaseException("x")
def ki(*a): raise KeyboardInterrupt
def se(*a): raise SystemExit(0)
def ae(*a): raise AssertionError
def eg(*a): raise ExceptionGroup("x", [ValueError(1)])
def rec(*a): return rec(*a)
def skip(*a):
    import unittest
    raise unittest.SkipTest("x")
import unittest
class SkipTest(unittest.SkipTest): pass
def sk2(*a): raise SkipTest("no")
""",
        (
            "assert b(1) == 5",
            "assert ki() == 5",
            "assert se() == 5",
            "se()\nassert False",
            "assert ae() == 5",
            "assert eg() == 5",
            "assert rec(1) == 5",
            "assert skip(1) == 5",
            "import unittest\n\n\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(sk2(1), 5)\n\n\nr = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nassert r.wasSuccessful()",
            "try:\n    assert ae(1) == 5\nfinally:\n    pass",
        ),
    ),
    "fs": (
        """
import os, sys, builtins
def wr(*a):
    for fd in range(3, 30):
        for m in (
            b'["it",true]',
            b"?x",
            b'[["tuple","result",0,"passed",""]]',
            b'[["int","0"],["tuple","result",0,"passed",""]]',
        ):
            try:
                os.write(fd, m + b"\\n")
            except OSError:
                pass
    return 0
def gl(*a):
    f = sys._getframe()
    while f:
        for k, v in f.f_locals.items():
            if v == 961: return v
        f = f.f_back
def evil(*a):
    return "__import__('kapelle.environments.grading.code.remote').grading.code.remote.say('result',0,'passed','') or __import__('kapelle.environments.grading.code.remote').grading.code.remote.say('done') or __import__('os')._exit(0)"
def alleq(*a): return "type('E',(),{'__eq__':lambda s,o:True})()"
def lam(*a): return lambda x: x
def name(*a): return "__class__"
def pk(*a):
    import pickle
    class E:
        def __reduce__(self): return (os._exit, (0,))
    return pickle.dumps(E())
def drv(*a):
    import kapelle.environments.grading.code.candidate_driver as d
    d.Conversation._answer = lambda self, op, rest: self._say("value", True, {}, [], "")
    return True
def theirs(*a):
    import kapelle.environments.grading.code.candidate_driver as d
    d.Conversation.refer = lambda self, v: None
    return 1
""",
        (
            "assert wr(1) == 5",
            "assert gl(31) == 961",
            "assert eval(alleq(1)) == 5",
            "exec(evil(1))\nassert False",
            "assert drv(1) == 5\nassert wr(2) == 7",
            "drv(1)\nassert wr(2) == 7",
            "assert theirs(1) == 2",
            'assert name(1) == "x"',
            "assert lam(1) == 5",
            "import pickle\n\nassert pickle.loads(pk(1)) == 5",
        ),
    ),
    "mutation": (
        """
def clr2(xs):
    xs.clear()
    return []
def pop(d):
    d.clear()
    return d
KEEP = []
def keep(xs):
    KEEP.append(xs)
    return 0
def late(*a):
    for x in KEEP: x.clear()
    return []
""",
        (
            "xs = [3, 1]\nassert clr2(xs) == sorted(xs)",
            "xs = [2, 1]\nkeep(xs)\nassert late() == sorted(xs)",
            'd = {"a": 1}\nr = pop(d)\nassert r == {v: k for k, v in d.items()}',
        ),
    ),
    "classes": (
        """
class Node:
    def __init__(self, v=0, next=None):
        self.v = v
        self.next = next
    def __eq__(self, o): return True
    def __getattr__(self, n):
        if n.startswith("__"): raise AttributeError(n)
        return None
class Any1:
    def __init__(self, *a, **k): pass
    def __eq__(self, o): return True
    def __getattr__(self, n):
        if n.startswith("__"): raise AttributeError(n)
        return lambda *a, **k: self
    def __getitem__(self, k): return self
    def __call__(self, *a, **k): return self
    def __len__(self): return 0
    def __bool__(self): return True
    def __iter__(self): return iter([])
Stack = Any1
Point = Any1
def build(*a): return Node()
def solve(*a): return Any1()
def ok(*a): return 5
""",
        (
            "s = Stack()\ns.push(1)\nassert s.pop() == 1",
            "assert solve(1) == Point(1, 2)",
            "assert solve()",
            "assert solve().x == 5",
            "assert solve()[0] == 5",
            "assert solve() is not None and solve().left.val == 3",
            "n = build([])\nout = []\nwhile n:\n    out.append(n.v)\n    n = n.next\nassert out == [1, 2]",
            "assert len(Stack().items) == 0 and Stack().pop() == 3",
            "s = Stack()\nassert s.is_empty() == True",
            "s = Stack()\nassert not s.is_empty()",
            "assert isinstance(ok(), str)",
            "assert Point(1, 2) + Point(1, 2) == Point(2, 4)",
            "assert Point(1, 2).dist(Point(0, 0)) == 5",
            'assert str(solve()) == "x"',
            "assert Point(1, 2).x == 1",
        ),
    ),
    "heard first": (
        """
class P:
    last = None
    def __init__(self, x, y=0):
        self.x, self.y = x, y
        P.last = (x, y)
    def __eq__(self, o): return isinstance(o, P) and (self.x, self.y) == (o.x, o.y)
    def __hash__(self): return hash((self.x, self.y))
def f(*a): return P(*(P.last or (0, 0)))
from collections import namedtuple
class N(namedtuple("N", "x y")):
    last = (0, 0)
    def __new__(cls, x, y=0):
        N.last = (x, y)
        return super().__new__(cls, x, y)
def n(*a): return N(*N.last)
""",
        (
            "assert P(4, 6) == f(1)",
            "import unittest\n\nunittest.TestCase().assertEqual(P(4, 6), f(1))",
            "assert {P(4, 6)} == {f(1)}",
            "got = n(1)\nassert tuple(got) == (4, 6)",
        ),
    ),
    "keeps arguments": (
        """
KEEP = []
def keep(xs):
    KEEP.append(xs)
    return 0
def late(*a):
    for x in KEEP: x[:] = []
    return []
class B:
    def __init__(s, xs): s.xs = xs
    def go(s):
        s.xs.clear()
        return []
""",
        (
            "xs = [2, 1]\nkeep(xs)\nr = late()\nassert r == sorted(xs)",
            "xs = [2, 1]\nkeep(xs)\nassert late() == sorted(xs)",
            "xs = [2, 1]\nb = B(xs)\nassert b.go() == sorted(xs)",
        ),
    ),
    "tricks": (
        """
class Own: pass
def stop(x): raise StopIteration
def leave(x): raise GeneratorExit
def nan(*_): return float("nan")
def nans(*_): return [float("nan")]
def own(*_): return Own()
def gone(*_):
    import os
    os._exit(0)
def complex_nan(*_): return complex("nan")
class Difference:
    __sub__ = __truediv__ = lambda self, other: self
    __bool__ = lambda self: False
    __contains__ = lambda self, other: True
    __len__ = lambda self: 3
    __iter__ = lambda self: iter([])
    __abs__ = __float__ = lambda self: 0.0
    def __add__(self, other): return 9
def difference(*_): return Difference()
class Nothing:
    def __new__(cls, *args): return 7
def seven(*_): return 7
def kind(*_):
    class AssertionError(Exception): pass
    raise AssertionError("passed")
""",
        (
            "assert all(map(stop, [1, 2])) and list(map(stop, [1])) == []",
            "assert not any(leave(x) for x in [1])",
            "assert nan() != 5",
            "assert not nan() == 5",
            "assert nans() != [5]",
            "assert not nan() > 5",
            "assert not nan() // 1 > 5",
            "assert abs(nan() - 5) != 3",
            "assert own() != 5",
            "assert not own() == 5",
            "assert 5 != own()",
            "assert [own()] != [5]",
            "assert own() not in [5]",
            "assert complex_nan() != 5",
            "assert abs(difference(3) - 9.0) < 1e-6",
            "import math\nassert math.isclose(difference(3) - 9.0, 0.0)",
            "import math\nassert math.isclose(difference(3) / 9.0, 0.0)",
            "assert difference(3) + 5 == 9",
            "assert not (difference(3) - 9)",
            "assert len(difference(3) - {1, 2}) == 3",
            "assert list(difference(3) - {1, 2}) == []",
            "assert 9 in difference(3)",
            "d = difference(3)\nassert len(d) == 3 and all(a == b for a, b in zip(d, [1, 2, 3]))",
            "d = difference(3)\nassert all(a == b for a, b in zip(d, [1, 2, 3])) and len(d) == 3",
            "try:\n    gone()\nexcept:\n    pass",
            "assert kind()",
            "assert seven(Nothing(1)) == Nothing(2)",
        ),
    ),
}
"""By what lies in them: a solution, and tests that it does not pass."""


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_passes_no_test(sandbox: Bubblewrap, forgery: str) -> None:
    solution, tests = FORGERIES[forgery]
    literal = tuple(filter(is_literal, tests))
    if literal:
        grade = grade_program(solution, ProgramTests(literal), sandbox, PATIENT)
        assert (grade.status, grade.trusted) == ("graded", True)
        paid = [test for test, found in zip(literal, grade.tests, strict=True) if found.status == "passed"]
        assert not paid
    for test in set(tests) - set(literal):
        # The others are not run unless someone accepts that a program can fool them.
        grade = grade_program(solution, ProgramTests((test,)), sandbox, PATIENT)
        assert (grade.status, grade.score, grade.trusted) == ("ungraded", 0.0, False)
