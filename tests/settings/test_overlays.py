"""YAML reads equally with and without libyaml; short texts that would take very long are errors at once."""

from __future__ import annotations

import pytest
import yaml

from kapelle.settings.overlays import MOST_DIGITS, MOST_OTHER_KEYS, parse_yaml
from kapelle.setup.recipe import builtin_recipes

ONE_HASH = 2**61 - 1
"""Whole numbers that differ by this have one hash."""


@pytest.mark.parametrize("number", ["1" + ":1" * 30_000, "1" + ":1" * 30_000 + ".5", "0x" + "f" * 6000])
def test_a_number_of_very_many_digits(number: str) -> None:
    with pytest.raises(ValueError, match=f"more than {MOST_DIGITS:,} digits"):
        parse_yaml(f"a: [{number}]")


@pytest.mark.parametrize("line", ["{}: 1", "? {}"])
def test_keys_of_one_hash(line: str) -> None:
    text = "\n".join(line.format(k * ONE_HASH) for k in range(1, MOST_OTHER_KEYS + 2))
    with pytest.raises(ValueError, match="keys that are not strings"):
        parse_yaml(text)


def test_what_people_write_stays() -> None:
    text = "1: a\n2.5: b\ntime: 1:30:00\nlong: " + "x" * 10_000
    assert parse_yaml(text) == {1: "a", 2.5: "b", "time": 5400, "long": "x" * 10_000}
    assert len(parse_yaml("\n".join(f"k{number}: 1" for number in range(2000)))) == 2000


ODD = [
    "a:\t1", "\ta: 1", "a: b: c", "a: b\n c: d", "'a':1", "a: @x", "...", "", "a: 1\n---\nb: 2", "x: [1,\n2", '"\\x"', '"\\ud800"', "\ud800",
    "a: \x00b", "{a:1}", "[http://x, a:b, {c:d}]", "? a\n: b", "a: &x 1\nb: *x", "a: *b", "<<: {a: 1}\nb: 2", "a: !x 1", "a: \u2028b", "\ufeffa: 1",
    "a: 2024-13-45", "a: 1e-3", "a: yes", "a: 0o7", "a: |\n  x\n   y\n", "a: >-\n\n  x\n", "a: {b: [c, {d: e}]}", "a: [b", "a: 1\na: 2", "[" * 3000, "- " * 100_000,
]  # fmt: skip
"""What the two readers of the library see with other eyes, what is not YAML, and what is nested deeply."""


def outcome(text: str) -> object:
    try:
        return parse_yaml(text)
    except ValueError as refused:
        return f"refused: {refused}"


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="this PyYAML was built without libyaml")
@pytest.mark.parametrize("text", [builtin_recipes()["demo"], *ODD], ids=["demo", *map(repr, map(len, ODD))])
def test_libyaml_changes_neither_values_nor_errors(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = outcome(text)
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    assert outcome(text) == quick
