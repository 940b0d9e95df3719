"""What only looks honest: objects, exceptions and changes in place that stand where a value belongs."""

from __future__ import annotations

import pytest

from kapelle.grading.code.grade import CodeGrade, ProgramTests, grade_program
from kapelle.sandbox.bubblewrap import Bubblewrap

TRICKS = """
class Own: pass
def stop(x): raise StopIteration
async def astop(x): raise StopAsyncIteration
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
def none(*_): return iter([])
def emptied(xs): xs.clear()
class guard:
    def __enter__(self): return self
    def __exit__(self, *args): return True
class Same:
    def __init__(self, *args): pass
    def __eq__(self, other): return True
class Nothing:
    def __new__(cls, *args): return 7
class Sorted:
    def __init__(self, *args): self.values = sorted(args)
class Everything:
    def __init__(self, *args): self.values = list(range(9))
LOG = []
class Logged:
    def __init__(self, *args): LOG.extend(args); self.log = LOG
def same(*_): return Same()
def seven(*_): return 7
def back(given): return given
def everything(*_): return Everything()
def logged(*_): return Logged()
def cleared(xs):
    xs.clear()
    return []
def kind(*_):
    class AssertionError(Exception): pass
    raise AssertionError("passed")
"""
UNPAID = (
    "assert all(map(stop, [1, 2])) and list(map(stop, [1])) == []",
    "for _ in map(stop, [1]):\n    assert False",
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
    "g = none()\nassert all(map(lambda wanted: next(g) == wanted, [2, 3, 5]))",
    "def largest(xs):\n    return max(xs) if xs else None\nxs = [1, 3]\nassert emptied(xs) == largest(xs)",
    "for last in none():\n    pass\nassert last == 9",
    "try:\n    got = stop(1)\nexcept Exception:\n    pass\nassert got == 1",
    "try:\n    gone()\nexcept Exception:\n    pass",
    "try:\n    gone()\nexcept:\n    pass",
    "assert kind()",
    "with guard():\n    assert nan() == 5",
    "with guard():\n    assert seven(1) == 5",
    "with guard():\n    if nan() is not None:\n        raise AssertionError",
    "with guard():\n    got = own()[0]\n    assert got == 5",
    "assert same(1) == Same(1)",
    "assert Same(1) == same(1)",
    "assert seven(Nothing(1)) == Nothing(2)",
    "assert back(Sorted(2, 1)) == Sorted(1, 2)",
    "assert everything(1) == Everything(4, 6)",
    "assert logged(1) == Logged(4, 6)",
    "xs = [2, 1]\ngot = cleared(xs)\nassert got == sorted(xs)",
    "xs = [2, 1]\ngot = cleared(xs)\nassert got == xs[:]",
    "def expected(v):\n    return sorted(v)\nxs = [2, 1]\ngot = cleared(xs)\nassert got == expected(xs)",
)  # fmt: skip


@pytest.fixture(scope="module")
def tricks(sandbox: Bubblewrap) -> CodeGrade:
    return grade_program(TRICKS, ProgramTests(UNPAID), sandbox)


@pytest.mark.slow
@pytest.mark.parametrize("test", range(len(UNPAID)), ids=[test[:50] for test in UNPAID])
def test_what_is_no_value_passes_no_comparison(tricks: CodeGrade, test: int) -> None:
    assert tricks.tests[test].status in {"failed", "error"}, tricks.tests[test]


FORGER = """
import sys
driver = sys.modules["kapelle.grading.code.candidate_driver"]
said = driver.Conversation._say
driver.Conversation._say = lambda self, *reply: said(self, *((*reply[:2], {0: []}) if reply[0] == "value" else reply))
driver.Solution.keep = lambda self, value: (self._kept.append(value), 0)[1]
class P:
    def __init__(self, x): pass
    def __add__(self, other): return self
def order(xs): return []
"""


@pytest.mark.slow
def test_a_forged_reply_changes_no_argument_and_makes_no_two_objects_one(sandbox: Bubblewrap) -> None:
    forged = ProgramTests(("xs = [3, 1]\nassert order(xs) == sorted(xs)", "assert P(1) + P(2) == P(3)"))
    assert grade_program(FORGER, forged, sandbox).passed == 0
