"""The table of mutants is true of the sources, and mutants are found by syntax tree wherever code moves in its function.

`python -m tests.mutations` makes the mistakes and runs the tests; here they are only looked up.
"""

from __future__ import annotations

import ast
import dataclasses
import shutil
from pathlib import Path

import pytest
from tests.mutations import ROOT, MisplacedError, Mutant, complaints, main, mutated, read_mutants, survivors

MUTANTS = read_mutants()


def test_every_mutant_is_found_exactly_once() -> None:
    assert list(complaints(MUTANTS, ROOT / "src")) == []


def test_what_must_go_red_exists() -> None:
    texts = {file: (ROOT / "tests" / file).read_text(encoding="utf-8") for file in _files(MUTANTS)}
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, *parts = test.split("::")
            lost = [
                part
                for part in parts
                if f"def {part}(" not in texts[file] and f"class {part}:" not in texts[file]
            ]
            assert lost == [], mutant.name


def _files(mutants: list[Mutant]) -> set[str]:
    return {test.partition("::")[0] for mutant in mutants for test in mutant.tests}


# -------- Finding and editing


def _mutated(folder: Path, code: str, original: str, broken: str, function: str = "f") -> str:
    """Return the text of a module `room/one.py` after one mistake."""
    file = folder / "kapelle" / "room" / "one.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code, encoding="utf-8")
    path, text = mutated(Mutant("m", "room", function, original, broken, ()), folder)
    assert path == file
    ast.parse(text)
    return text


SUM = '''\
# Kept.
def f(rows: list[int], *, scale: int = 2) -> int:
    """Add up."""
    total = 0
    for row in rows:  # kept
        total += (
            row  # a comment inside
            * scale
        )
    return total
'''


@pytest.mark.parametrize(
    ("original", "broken", "line"),
    [
        pytest.param("row * scale", "row", "            (row)", id="layout and comments are of no account"),
        pytest.param(
            "value * factor", "value / factor", "            (row / scale)", id="locals by other names"
        ),
        pytest.param("return total", "return -total", "    return -total", id="a statement"),
        pytest.param(
            "total = 0\nfor row in rows: ...", "total = 1\nfor row in rows: ...", "    total = 1", id="two"
        ),
        pytest.param(
            "for row in rows: ...", "for row in rows[1:]: ...", "    for row in rows[1:]:", id="any body"
        ),
        pytest.param(
            "for row in rows: ...", "...", "    total += row * scale", id="a body without its header"
        ),
        pytest.param("total += row * scale", "", "        pass", id="a deleted statement"),
        pytest.param(
            "def f(rows: list[int], *, scale: int = 2) -> int: ...",
            "def f(rows: list[int], *, scale: int = 3) -> int: ...",
            "def f(rows: list[int], *, scale: int=3) -> int:",
            id="a header",
        ),
    ],
)
def test_code_is_matched_as_a_tree(tmp_path: Path, original: str, broken: str, line: str) -> None:
    text = _mutated(tmp_path, SUM, original, broken)
    assert line in text.splitlines()
    assert text.startswith("# Kept.\n")


def test_only_the_text_of_what_matched_changes(tmp_path: Path) -> None:
    assert _mutated(tmp_path, SUM, "total = 0", "total = 1") == SUM.replace("total = 0", "total = 1")


@pytest.mark.parametrize(
    ("code", "original", "broken", "expected"),
    [
        ("def f(x):\n    return g(x, k=1, n=2)\n", "k=1", "k=3", "return g(x, k=3, n=2)"),
        ("def f(x):\n    return g(x, k=1, n=2)\n", "k=1", "", "return g(x, n=2)"),
        ("def f(x):\n    return f'{x:.2f} of {len(x)}'\n", "len(x)", "id(x)", "return f'{x:.2f} of {id(x)}'"),
        ("def f(x):\n    return sum(a for a in x)\n", "(a for a in x)", "x", "return sum(x)"),
        ("def f(x):\n    if x: a()\n    elif g(): b()\n", "if g(): ...", "if h(): ...", "    elif h():"),
        ("def f(x):\n    'é'; return x[1:2]\n", "x[1:2]", "x[1:]", "return x[1:]"),
    ],
)
def test_parts_without_text_of_their_own_are_written_with_what_holds_them(
    tmp_path: Path, code: str, original: str, broken: str, expected: str
) -> None:
    names = "g = h = a = b = len\n"
    text = _mutated(tmp_path, names + code, original, broken)
    assert expected in ast.unparse(ast.parse(text))


def test_a_name_keeps_its_meaning(tmp_path: Path) -> None:
    """`a - b` does not stand for `b - a`, nor `len(x)` for a call of a parameter; two names are never one."""
    for code, original in [
        ("def f(a, b):\n    return b - a\n", "a - b"),
        ("def f(g, x):\n    return g(x)\n", "len(x)"),
        ("def f(a):\n    return a - a\n", "p - q"),
        ("def f(a):\n    return other\nother = 1\n", "mine"),
    ]:
        with pytest.raises(MisplacedError, match="stands 0 times in f of room"):
            _mutated(tmp_path, code, original, "0")


def test_one_place_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(MisplacedError, match="stands 2 times in f of room"):
        _mutated(tmp_path, "def f(a, b):\n    return g(a + b, a + b)\n", "a + b", "a - b")
    with pytest.raises(MisplacedError, match=r"no f in room; found in h of room/one\.py"):
        _mutated(tmp_path, "def h(a, b):\n    return a + b\n", "a + b", "a - b")
    with pytest.raises(MisplacedError, match=r"gone in the broken code: no such name in one\.py"):
        _mutated(tmp_path, "def f(a, b):\n    return a + b\n", "a + b", "gone - b")


def test_methods_nested_functions_and_assigned_names_can_be_named(tmp_path: Path) -> None:
    code = "LIMIT = {'a': 1}\nclass A:\n    size: int = 1\n    def f(self):\n        def g(x):\n            return x + 1\n        return g\n"
    assert "return (x - 1)" in _mutated(tmp_path, code, "y + 1", "y - 1", "A.f")
    assert "return (x - 1)" in _mutated(tmp_path, code, "x + 1", "x - 1", "A.f.g")
    assert "size: int = (2)" in _mutated(tmp_path, code, "1", "2", "A.size")
    assert "LIMIT = {'a': (2)}" in _mutated(tmp_path, code, "1", "2", "LIMIT")


def test_a_useless_row_is_named(tmp_path: Path) -> None:
    mutant = Mutant("same", "room", "f", "a + b", "(a+b)", ())
    _mutated(tmp_path, "def f(a, b):\n    return a + b\n", "a + b", "a - b")
    assert list(complaints([mutant, mutant], tmp_path)) == [
        "same: nothing is broken",
        "same: nothing is broken",
        "same: a name used 2 times",
    ]


# -------- Trying


@pytest.mark.slow
def test_a_survivor_is_named_and_the_source_put_right(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    test = "metrics/test_statistics.py::test_quartiles_by_hand"
    seen = "metrics/test_statistics.py::test_area_under_curve_by_hand"
    ties = "won += tied * (below + level / 2)"
    mutant = Mutant("ties", "metrics", "area_under_curve", ties, "won += tied * below", (test, seen))
    file, _ = mutated(mutant, tmp_path)
    before = file.read_bytes()
    assert survivors(mutant, tmp_path) == [f"tests/{test}"]
    assert file.read_bytes() == before
    lost = dataclasses.replace(mutant, tests=("metrics/test_statistics.py::test_of_nothing",))
    with pytest.raises(RuntimeError, match="pytest ended with"):
        survivors(lost, tmp_path)


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "gspo-ratio-summed"]) == 0
    assert capsys.readouterr().out == "gspo-ratio-summed\n"
    with pytest.raises(SystemExit):
        main(["--only", "no-such-mutant"])
