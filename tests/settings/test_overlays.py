"""Short texts of YAML that would take very long are refused at once."""

from __future__ import annotations

import pytest

from kapelle.settings.overlays import MOST_DIGITS, MOST_OTHER_KEYS, parse_yaml

ONE_HASH = 2**61 - 1
"""Whole numbers that differ by this have one hash."""


@pytest.mark.parametrize("number", ["1" + ":1" * 30_000, "1" + ":1" * 30_000 + ".5", "0x" + "f" * 6000])
def test_a_number_of_very_many_digits(number: str) -> None:
    with pytest.raises(ValueError, match=f"more than {MOST_DIGITS:,} digits"):
        parse_yaml(f"a: [{number}]")


@pytest.mark.parametrize("line", ["{}: 1", "? {}"])
def test_keys_of_one_hash(line: str) -> None:
    text = "\n".join(line.format(k * ONE_HASH) for k in range(1, MOST_OTHER_KEYS + 2))
    with pytest.raises(ValueError, match="keys that are no texts"):
        parse_yaml(text)


def test_what_people_write_stays() -> None:
    text = "1: a\n2.5: b\ntime: 1:30:00\nlong: " + "x" * 10_000
    assert parse_yaml(text) == {1: "a", 2.5: "b", "time": 5400, "long": "x" * 10_000}
    assert len(parse_yaml("\n".join(f"k{number}: 1" for number in range(2000)))) == 2000
