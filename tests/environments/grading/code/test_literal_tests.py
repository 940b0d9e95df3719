"""Spoofs of literal tests, none of which is paid, and honest programs in many styles, all of which are."""

from __future__ import annotations

import pytest

from kapelle.environments.grading.code.grade import ProgramTests, grade_program, read_literal
from kapelle.environments.grading.code.literal_tests import NotLiteral
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits

LIMITS = Limits(wall_s=8.0, cpu_s=2.0)
TESTS = ProgramTests(
    (
        "assert f(3) == 10",
        "assert abs(f(4) - 17.0) < 1e-6",
        "assert f(5) in (26, 26.0)",
        "assert str(f(6)) == '37'",
        "import math\nassert math.isclose(f(7), 50, rel_tol=1e-9)",
        "assert not f(8) != 65",
        "assert [f(1), f(2)] == [2, 5]",
        "assert sorted([f(2), f(1)])[0] == 2",
        "assert g([3, 1, 2]) == [1, 2, 3]",
        "assert set(g((2, 2, 1))) == {1, 2}",
        "assert tuple(g([5, 4])) == (4, 5)",
        "assert len(g([5, 4, 6])) == 3 and g([5, 4, 6])[0] == 4",
        "a, b = g([2, 1])\nassert a == 1 and b == 2",
        "assert all(x == y for x, y in zip(g([3, 2]), [2, 3]))",
        "assert ','.join(g(['b', 'a'])) == 'a,b'",
        "assert g(['b', 'a'])[0].startswith('a')",
        "assert h('ab').upper() == 'BA' and h('ab').startswith('b')",
        "assert h('xy') is not None and not h('xy') == 'xy' and h('xy') == 'yx'",
        "assert isinstance(h('q'), str) and h('q') == 'q'",
        "assert h('abc')[::-1] == 'abc'",
        "assert max(g([4, 9])) == 9 and sum(g([4, 9])) == 13 and min(g([4, 9])) == 4",
        "assert round(f(0.5), 2) == 1.25",
    )
)
"""`f` squares and adds one, `g` sorts, `h` reverses a text."""
ALL = "f = g = h = lambda *a: {}\n"
YES = """
class Yes({base}):
    __hash__ = object.__hash__
    def yes(self, *a, **k): return True
    def me(self, *a, **k): return self
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = startswith = endswith = issubset = yes
    def __ne__(self, other): return False
    __abs__ = __sub__ = __rsub__ = __add__ = __radd__ = __round__ = __getitem__ = upper = __reversed__ = me
    def __len__(self): return 3
    def __iter__(self): return iter([self, self])
    def __str__(self): return "38"
    def __float__(self): return 17.0
    def __getattr__(self, name): return self.me
"""
SPOOFS = {
    "an object that equals everything": YES.format(base="object") + ALL.format("Yes()"),
    "a subclass of int": YES.format(base="int") + ALL.format("Yes(0)"),
    "a subclass of float": YES.format(base="float") + ALL.format("Yes(0)"),
    "a subclass of str": YES.format(base="str") + ALL.format("Yes('')"),
    "a subclass of list": YES.format(base="list") + ALL.format("Yes()"),
    "a subclass of tuple": YES.format(base="tuple") + ALL.format("Yes()"),
    "a subclass of dict": YES.format(base="dict") + ALL.format("Yes()"),
    "a metaclass": "class M(type):\n    def __eq__(self, o): return True\n    __hash__ = None\n    def __instancecheck__(self, o): return True\n"
    "class C(metaclass=M): pass\n" + ALL.format("C"),
    "an object that lies about its class": YES.format(base="object").replace("def yes", "__class__ = int\n    def yes")
    + ALL.format("Yes()"),
    "a mock": "from unittest.mock import MagicMock, ANY\n" + ALL.format("ANY"),
    "NaN": ALL.format("float('nan')"),
    "NaNs": ALL.format("[float('nan')] * 2"),
    "infinity and negative infinity": ALL.format("float('inf') if a[0] in (3, 5) else -float('inf')"),
    "patched builtins": "import builtins\nfor n in ('abs', 'len', 'sorted', 'set', 'all', 'str', 'round', 'max', 'min', 'isinstance', 'tuple', 'sum'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)\n" + ALL.format("0"),
    "patched math and operator": "import math, operator\nmath.isclose = lambda *a, **k: True\noperator.eq = lambda *a: True\n" + ALL.format("0"),
    "patched json": "import json\njson.dumps = lambda *a, **k: '11'\njson.loads = lambda *a, **k: ['call', 1]\n" + ALL.format("0"),
    "sys.exit": "import sys\ndef f(*a): sys.exit(0)\ng = h = f",
    "exit at import": "import sys\nsys.exit(0)",
    "os._exit": "import os\ndef f(*a): os._exit(0)\ng = h = f",
    "atexit": "import atexit, os\natexit.register(lambda: os.write(1, b'passed'))\n" + ALL.format("0"),
    "a signal": "import os, signal\ndef f(*a): os.kill(os.getpid(), signal.SIGTERM)\ng = h = f",
    "an AssertionError that passes": "def f(*a): raise AssertionError('passed')\ng = h = f",
    "StopIteration": "def f(*a): raise StopIteration(10)\ng = h = f",
    "an exception without a text": "class E(BaseException):\n    def __str__(self): raise E\ndef f(*a): raise E\ng = h = f",
    "printed verdicts": "import os\nfor fd in range(12):\n    for text in (b'passed', b'value 10', b'[0, \"passed\", \"\"]'):\n        try: os.write(fd, text + b'\\n')\n        except OSError: pass\n"
    + ALL.format("print('10') or 0"),
    "frames": "import sys\ndef f(*a):\n    frame, found = sys._getframe(), []\n    while frame:\n        found += [v for v in [*frame.f_locals.values()] + [*frame.f_code.co_consts] if type(v) in (int, float, str)]\n"
    "        frame = frame.f_back\n    return found[-1] if found else 0\ng = h = f",
    "the heap": "import gc\ndef f(*a):\n    return next((o for o in gc.get_objects() if type(o) is list and len(o) == 3), 0)\ng = h = f",
    "files and /proc": "import glob, os\ndef f(*a):\n    text = ''\n    for path in [*glob.glob('/box/**', recursive=True), '/proc/self/cmdline', '/proc/self/environ']:\n"
    "        try: text += open(path, errors='replace').read()\n        except OSError: pass\n    return text.split('assert')[-1]\ng = h = f",
    "the driver's encoder": "import sys\nd = sys.modules['kapelle.environments.grading.code.candidate_driver']\nd.encode = lambda v: '10'\nd._encoded = lambda *a: '[\"object\",0,\"\"]'\n" + ALL.format("0"),
    "objects in a list": "import sys\nd = sys.modules['kapelle.environments.grading.code.candidate_driver']\nd._encoded = lambda *a: '[\"list\",[\"object\",0,\"\"]]'\n" + ALL.format("0"),
    "an object of another nature": "import sys\nd = sys.modules['kapelle.environments.grading.code.candidate_driver']\nd._encoded = lambda *a: '[\"object\",0,\"re.Match\"]'\nd._kept.append(1)\n"
    + ALL.format("0"),
    "the driver's operations": "import sys\nd = sys.modules['kapelle.environments.grading.code.candidate_driver']\nfor n in [*d._OPERATIONS]: d._OPERATIONS[n] = lambda *a: True\n" + ALL.format("0"),
    "a thread that answers later": "import os, threading, time\ndef late():\n    time.sleep(0.3)\n    for fd in range(3, 12):\n        try: os.write(fd, b'value 10\\n')\n        except OSError: pass\n"
    "threading.Thread(target=late).start()\ndef f(*a):\n    time.sleep(0.1)\ng = h = f",
    "a process that answers": "import os\nif os.fork() == 0:\n    os._exit(0)\n" + ALL.format("None"),
    "a generator": "def f(*a):\n    while True: yield 10\ng = h = f",
    "a generator of right and wrong items": "def f(*a):\n    yield 10\n    yield 17.0\ng = h = f",
    "an endless output": "def f(*a):\n    while True: print('10' * 9999)\ng = h = f",
    "a huge text": ALL.format("'10' * 60_000_000"),
    "a huge number": ALL.format("1 << 9_000_000"),
    "a huge list": ALL.format("[[10] * 1000] * 9999"),
    "a list that contains itself": "x = []\nx.append(x)\n" + ALL.format("x"),
    "one hash": ALL.format("[k * (2**61 - 1) for k in range(30_000)]"),
    "formats": ALL.format("'%99999999d'"),
    "a long range": ALL.format("range(10**15)"),
    "an awaitable": "class A:\n    def __await__(self): raise StopIteration(10)\n" + ALL.format("A()"),
    "a property of the module": "import sys, types\nclass M(types.ModuleType):\n    def __getattribute__(self, n): return lambda *a: 10\nsys.modules['solution'] = M('solution')\n" + ALL.format("0"),
    "its own solution module": "open('solution.py', 'w').write('def f(x): return x * x + 1')\n" + ALL.format("0"),
    "memory": "def f(*a): return bytearray(10**12)\ng = h = f",
}  # fmt: skip


SLOW = {"an endless output"}
"""They end at a limit of time."""


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=[pytest.mark.long] if what in SLOW else []) for what in SPOOFS],
)
def test_no_spoof_of_a_literal_test_is_rewarded(sandbox: Bubblewrap, what: str) -> None:
    grade = grade_program(SPOOFS[what], TESTS, sandbox, LIMITS)
    assert (grade.status, grade.trusted) == ("graded", True)
    paid = [test for test, found in zip(TESTS.programs, grade.tests, strict=True) if found.status == "passed"]
    assert paid == []


@pytest.mark.parametrize(
    "test",
    [
        "assert f(3).count(5) == 5",
        "assert f(3).get('k', 7) == 7",
        "assert f(3).startswith('a')",
        "assert f(3).index(5)",
        "assert f(3).isdigit()",
        "assert f(3).union({1}) == {1}",
        "assert 5 in f(3)",
        "assert f(3) != 5",
        "assert not f(3)",
        "assert f(3) - 5 == 5",
        "assert round(f(3), 1) == 1",
    ],
)
def test_an_object_that_echoes_the_expected_value_is_not_rewarded(sandbox: Bubblewrap, test: str) -> None:
    solution = (
        "class Echo:\n    def __getattr__(self, name):\n        if name[:2] == '__': raise AttributeError(name)\n"
        "        return lambda *a: a[-1] if a else True\n    __contains__ = lambda self, item: True\n"
        "    __sub__ = __round__ = lambda self, other: other\ndef f(x): return Echo()"
    )
    assert grade_program(solution, ProgramTests((test,)), sandbox).score == 0.0


HONEST = {
    "recursion": ("def f(n): return 1 if n < 2 else n * f(n - 1)", "assert f(5) == 120\nassert f(400) % 1000003 == 0 or f(3) == 6"),
    "deep recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(3000) == 3000"),
    "mutual recursion": ("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)", "assert even(10)\nassert not odd(10)"),
    "a cache": ("from functools import lru_cache\n@lru_cache(None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)", "assert f(80) == 23416728348467685"),
    "a decorator": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def inner(*a, **k): return 2 * g(*a, **k)\n    return inner\n@twice\ndef f(x, *, y=1): return x + y",
        "assert f(3) == 8\nassert f(3, y=2) == 10",
    ),
    "a lambda": ("f = lambda xs: [x for x in xs if x]", "assert f([0, 1, '', 'a', None]) == [1, 'a']"),
    "a partial": ("from functools import partial\nf = partial(pow, 2)", "assert f(10) == 1024"),
    "a class that is called": ("class F:\n    def __call__(self, x): return x + 1\nf = F()", "assert f(2) == 3"),
    "a bound method": ("class F:\n    def go(self, x): return x + 1\nf = F().go", "assert f(2) == 3"),
    "a class Solution": ("from typing import List\nclass Solution:\n    def total(self, xs: List[int]) -> int:\n        return sum(xs)", "assert total([1, 2]) == 3\nassert Solution().total([4]) == 4"),
    "a class with state": (
        "class Counter2:\n    def __init__(self): self.n = 0\n    def add(self, k=1):\n        self.n += k\n        return self\n    def value(self): return self.n",
        "c = Counter2()\nc.add()\nc.add(4)\nassert c.value() == 5\nassert c.n == 5\nd = Counter2()\nassert d.n == 0",
    ),
    "a stack": (
        ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n"
        "    def is_empty(self): return not self.items\n    def __len__(self): return len(self.items)"),
        "s = Stack()\nassert s.is_empty()\ns.push(1)\ns.push([2])\nassert len(s) == 2\nassert s.pop() == [2]\nassert s.items == [1]\nassert not s.is_empty()",
    ),
    "an object as an argument": (
        "class Point:\n    def __init__(self, x, y): self.x, self.y = x, y\ndef norm(p): return (p.x ** 2 + p.y ** 2) ** 0.5\ndef far(ps): return max(map(norm, ps))",
        "assert norm(Point(3, 4)) == 5\nassert abs(far([Point(0, 1), Point(6, 8)]) - 10) < 1e-9",
    ),
    "a linked list": (
        ("class Node:\n    def __init__(self, v, n=None): self.value, self.next = v, n\ndef build(xs):\n    head = None\n    for x in reversed(xs): head = Node(x, head)\n    return head\n"
        "def items(n):\n    out = []\n    while n: out.append(n.value); n = n.next\n    return out"),
        "assert items(build(list(range(30)))) == list(range(30))\nassert build([7, 8]).next.value == 8\nassert build([]) is None",
    ),
    "a dataclass": (
        "from dataclasses import dataclass, asdict\n@dataclass\nclass P:\n    x: int\n    y: int = 2\ndef f(x): return asdict(P(x))",
        "assert f(1) == {'x': 1, 'y': 2}\nassert P(3).y == 2",
    ),
    "a named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(a): return P(a, a + 1)",
        "assert f(1) == (1, 2)\nassert f(1).y == 2\nassert f(3)._asdict() == {'x': 3, 'y': 4}\nx, y = f(5)\nassert x + y == 11",
    ),
    "an enum": ("from enum import Enum, IntEnum\nclass C(IntEnum):\n    A = 1\nclass D(Enum):\n    B = 'b'\ndef f(): return C.A\ndef g(): return D.B", "assert f() == 1\nassert g().value == 'b'\nassert f().name == 'A'"),
    "a subclass of dict": ("class D(dict):\n    def __missing__(self, k): return k * 2\ndef f(): return D(a=1)", "assert f() == {'a': 1}\nassert f()['zz'] == 'zzzz'"),
    "a defaultdict": ("from collections import defaultdict\ndef f(ws):\n    d = defaultdict(list)\n    for w in ws: d[len(w)].append(w)\n    return d", "assert f(['a', 'bb', 'c']) == {1: ['a', 'c'], 2: ['bb']}\nassert f(['a'])[9] == []"),
    "a Counter": ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}\nassert f('aab').most_common(1) == [('a', 2)]\nassert f('x')['y'] == 0"),
    "an OrderedDict and a deque": ("from collections import OrderedDict, deque\ndef f(): return OrderedDict(b=1, a=2)\ndef g(): return deque([1, 2])", "assert list(f()) == ['b', 'a']\nassert f() == {'a': 2, 'b': 1}\nassert list(g()) == [1, 2]\nassert g()[0] == 1"),
    "sets": ("def f(xs): return set(xs)\ndef g(xs): return frozenset(xs)", "assert f([1, 1]) == {1}\nassert g('ab') == {'a', 'b'}\nassert f([]) == set()\nassert 3 in f([3]) and 4 not in f([3])"),
    "a generator": ("def f(n):\n    for i in range(n): yield i * i", "assert list(f(4)) == [0, 1, 4, 9]\nassert sum(f(4)) == 14\nassert sorted(f(3), reverse=True) == [4, 1, 0]\nassert next(f(2)) == 0\nassert 4 in f(3)"),
    "an endless generator": ("def f():\n    n = 0\n    while True:\n        yield n\n        n += 1", "g = f()\nassert next(g) == 0\nassert next(g) == 1\nassert [next(g) for _ in range(3)] == [2, 3, 4]"),
    "map, zip and filter": ("def f(xs): return map(str, xs)\ndef g(a, b): return zip(a, b)\ndef h(xs): return filter(None, xs)", "assert list(f([1, 2])) == ['1', '2']\nassert dict(g('ab', [1, 2])) == {'a': 1, 'b': 2}\nassert tuple(h([0, 1])) == (1,)"),
    "views and ranges": ("def f(d): return d.keys()\ndef g(n): return range(n)\ndef h(d): return d.items()", "assert f({'a': 1}) == {'a'}\nassert list(g(3)) == [0, 1, 2]\nassert g(3) == range(3)\nassert sorted(h({'b': 1, 'a': 2})) == [('a', 2), ('b', 1)]"),
    "a coroutine": ("import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1", "x = f(1)\nassert x == 2"),
    "global state": ("calls = []\ndef f(x):\n    calls.append(x)\n    return len(calls)", "assert f(1) == 1\nassert f(1) == 2\nassert calls == [1, 1]"),
    "nonlocal state": ("def make():\n    n = 0\n    def inc():\n        nonlocal n\n        n += 1\n        return n\n    return inc", "inc = make()\nassert inc() == 1\nassert inc() == 2\nassert make()() == 1"),
    "functions in a tuple": ("def make():\n    xs = []\n    return xs.append, lambda: list(xs)", "put, get = make()\nput(3)\nassert get() == [3]"),
    "currying": ("def f(a): return lambda b: lambda c: a + b * c", "assert f(1)(2)(3) == 7"),
    "prints": ("def f(x):\n    print('computing', x)\n    print('[0, \"passed\"]')\n    return x", "assert f(3) == 3"),
    "writes to stderr and logs": ("import logging, sys\ndef f(x):\n    logging.warning('x'); sys.stderr.write('y' * 9999)\n    return x", "assert f(3) == 3"),
    "a main guard": ("def f(x): return x\nif __name__ == '__main__':\n    print(f(int(input())))", "assert f(3) == 3"),
    "input at import": ("try:\n    n = int(input())\nexcept (EOFError, ValueError):\n    n = 5\ndef f(): return n", "assert f() == 5"),
    "imports inside": ("def f(x):\n    import math, re, itertools\n    return math.comb(x, 2), re.sub('a', 'b', 'a'), list(itertools.accumulate([1, 2]))", "assert f(4) == (6, 'b', [1, 3])"),
    "typing": ("from __future__ import annotations\nfrom typing import Dict, Optional, TypeVar, Generic\nT = TypeVar('T')\nclass Box(Generic[T]):\n    def __init__(self, v: T) -> None: self.v = v\ndef f(d: Dict[str, int], k: str) -> Optional[int]: return d.get(k)", "assert f({'a': 1}, 'a') == 1\nassert f({}, 'a') is None\nassert Box([1]).v == [1]"),
    "a helper with a builtin's name": ("def list_sum(xs): return sum(xs)\ndef max(a, b): return a if a > b else b\ndef f(xs): return max(list_sum(xs), 0)", "assert f([1, 2]) == 3\nassert f([-1]) == 0"),
    "CRLF and tabs": ("def f(x):\r\n\tif x:\r\n\t\treturn 1\r\n\treturn 0\r\n", "assert f(True) == 1"),
    "unicode": ("def größe(s): return s.upper() + 'ß😀'", "assert größe('ä') == 'Äß😀'"),
    "surrogates and escapes": ("def f(): return '\\ud800\\x00\\n'\ndef g(): return b'\\xff'", "assert len(f()) == 3 and f()[1:] == '\\x00\\n'\nassert g() == b'\\xff'"),
    "big numbers": ("def f(n): return 7 ** n", "assert f(20_000) == 7 ** 20_000\nassert f(3) % 10 == 3"),
    "floats": ("def f(x): return x / 3\ndef g(): return float('inf'), -0.0", "assert abs(f(1) - 0.333333) < 1e-5\nimport math\nassert math.isclose(f(2), 2 / 3, rel_tol=1e-9)\nassert round(f(1), 3) == 0.333\nassert g() == (math.inf, 0.0)"),
    "NaN where it is expected": ("def f(): return float('nan')", "import math\nassert math.isnan(f())"),
    "complex numbers": ("def f(a): return complex(a, 1) * 1j", "assert f(2) == -1 + 2j\nassert abs(f(0) - (-1)) < 1e-12"),
    "fractions, decimals and dates": ("from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\ndef f(): return Fraction(1, 3)\ndef g(): return Decimal('0.10')\ndef h(): return datetime.date(2024, 2, 29)", "assert f() * 3 == 1\nfrom decimal import Decimal\nassert g() == Decimal('0.1')\nassert h().year == 2024\nassert str(h()) == '2024-02-29'"),
    "a match": ("import re\ndef f(s): return re.fullmatch('a+', s)", "assert f('aa')\nassert not f('b')\nassert f('b') is None\nassert f('aa').group() == 'aa'"),
    "None and booleans": ("def f(x): return None if x else False", "assert f(1) is None\nassert f(0) is False\nassert not f(1)\nassert f(0) == 0"),
    "nested lists": ("def f(n): return [f(n - 1)] if n else []", f"assert f(60) == {'[' * 61}{']' * 61}"),
    "nested results": ("def f(n): return {'a': [(n, {n})], 'b': {'c': None}}", "assert f(1) == {'a': [(1, {1})], 'b': {'c': None}}\nassert f(2)['a'][0][1] == {2}\nassert f(2)['b']['c'] is None"),
    "an argument that is sorted": ("def f(xs):\n    xs.sort()\n    return xs", "xs = [3, 1]\nassert f(xs) == [1, 3]\nassert f([2, 1]) == [1, 2]"),
    "a result that is given back": ("def enc(s): return [ord(c) for c in s]\ndef dec(xs): return ''.join(map(chr, xs))", "assert dec(enc('abc')) == 'abc'\nx = enc('q')\nassert dec(x) == 'q'\nassert len(x) == 1"),
    "keywords, stars and loops in the test": ("def f(a, b=0, *c, d=0): return a + b + sum(c) + d", "for args, want in [((1,), 1), ((1, 2, 3), 6)]:\n    assert f(*args) == want, f'{args}'\nassert f(1, d=4) == 5\nassert all(f(n) == n for n in range(5))"),
    "a check function": ("def f(x): return x * 2", "METADATA = {'a': 1}\ndef check(candidate):\n    # easy\n    assert True, 'ok'\n    xs = [1, 2]\n    for x in xs:\n        assert candidate(x) == x * 2, 'message'\n    assert candidate('a' * 2) == 'aaaa'\ncheck(f)"),
    "functions as pytest finds them": ("def f(x): return x * 2", "from solution import f\ndef test_one():\n    assert f(1) == 2\ndef test_two():\n    expected = [1] * 2\n    assert f([1]) == expected"),
    "an import of the module": ("def f(x): return x * 2", "import solution\nassert solution.f(4) == 8\nimport math\nassert f(math.pi) == 2 * math.pi\nassert f(range(2)[1]) == 2"),
    "known values that are computed": ("def f(xs): return sum(xs)", "xs = list(range(10))\nodd = sum([x for x in xs if x % 2])\nassert f([x for x in xs if x % 2]) == odd\nassert f([10**9 + 7] * 3) == 3 * (10**9 + 7)\nassert f(range(3)) == 3\nassert f(()) == -0"),
    "annotations and stars in the test": (
        "def f(x): return x",
        "from math import *\nfrom typing import List\nxs: List[int] = [1, gcd(8, 12)]\nif __name__ == '__main__':\n    assert f(xs) == [1, 4]\nassert f(pi) == pi",
    ),
    "no result": ("def f(): pass", "assert f() is None\nassert f() == None"),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("style", HONEST)
def test_every_honest_program_is_accepted_by_literal_tests(sandbox: Bubblewrap, style: str) -> None:
    solution, test = HONEST[style]
    grade = grade_program(solution, ProgramTests((test,)), sandbox, Limits(wall_s=60.0, cpu_s=30.0))
    assert (grade.status, grade.trusted) == ("graded", True), grade.explanation
    assert grade.solved, grade.tests


@pytest.mark.parametrize(
    "test",
    [
        "assert f(3).equals(10)",
        "assert Solution().f(3).equals(10)",
        "assert Solution().f(3).value.equals(10)",
        "assert f(3).__eq__(10)",
        "assert f(3).__class__ is int",
        "assert f(3) == g([3])",
        "assert f(3) is f(3)",
        "assert {f(3)} == {10}",
        "assert isinstance(f(3), F)",
        "assert Point(1, 2) == Point(1, 2)",
        "assert not Point(1, 2)",
        "assert 3 in Point(1, 2)",
        "xs = [3, 1]\nf(xs)\nassert xs == [1, 3]",
        "xs = [3, 1]\nassert f(xs) == sorted(xs)",
        "for x in f(3):\n    assert x == 10",
        "assert all(x == 10 for x in f(3))",
        "if f(3) == 10:\n    pass\nassert f(4) == 17",
        "while f(3) != 10: pass",
        "try:\n    assert f(3) == 10\nexcept Exception:\n    pass",
        "import random\nassert f(random.random()) > 0",
        "import os\nassert f(os.getpid()) > 0",
        "assert eval('f(3)') == 10",
        "assert f(lambda x: x) == 10",
        "assert f(print) == 10",
        "assert f(x for x in [1]) == 10",
        "class A: pass\nassert f(A()) == 10",
        "from numpy import array\nassert f(array([1])) == 10",
        "assert '%s' % f(3) == '10'",
        "assert f'{f(3):>5}' == '   10'",
        "assert (f(3) == 10, 'message')",
        "f(3) == 10",
        "assert f(3) == 10 if f(4) else 0",
        "assert 9 ** 9 ** 9 == f(3)",
        "assert f(3) == open('/etc/passwd').read()",
        "assert f(3) == ().__class__.__base__",
        "assert [].__class__ == f(3)",
        "assert f(3) == 5 / 0",
    ],
)
def test_a_test_with_more_than_calls_is_not_literal(test: str) -> None:
    with pytest.raises(NotLiteral, match=r"line 1|line 2|line 3|checks nothing"):
        read_literal(ProgramTests((test,)))


def test_reading_a_test_is_bounded() -> None:
    for test in (
        "for a in range(10**9):\n    for b in range(10**9):\n        assert f(a) == b",
        "x = [0] * 10**9\nassert f(x) == 1",
        "assert f(list(range(10**12))) == 1",
        "def g(): return g()\nassert f(g()) == 1",
        "assert f('a' * 2**40) == 1",
        "assert f(pow(7, 10**12)) == 1",
        "assert f(" + "(" * 5000 + ")" * 5000 + ") == 1",
    ):
        with pytest.raises((NotLiteral, SyntaxError)):
            read_literal(ProgramTests((test,)))


@pytest.mark.parametrize(
    "solution", ["def f(x): return []", "def f(x): return iter([])", "def f(x): return [1, 2, 3, 4]"]
)
def test_items_that_are_missing_are_no_end(sandbox: Bubblewrap, solution: str) -> None:
    tests = (
        "assert all(a == b for a, b in zip(f(1), [1, 2, 3]))",
        "for a, b in zip([1, 2, 3], f(1)):\n    assert a == b",
        "a, b, c = f(1)\nassert a == 1",
    )
    assert grade_program(solution, ProgramTests(tests), sandbox).score == 0.0
    assert grade_program("def f(x): return [1, 2, 3]", ProgramTests(tests), sandbox).solved
