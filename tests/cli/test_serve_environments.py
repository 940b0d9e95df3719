from __future__ import annotations

import pytest

pytest.importorskip("starlette")

from kapelle.cli.serve import named


def test_environments_are_named_with_their_settings() -> None:
    found = named(
        "sums=arithmetic,matrix,debate,recipes.demo=demo", ["sums.digits=3", "debate.sides=[A,B,C]"]
    )
    assert {name: each.name for name, each in found.items()} == {
        "sums": "arithmetic",
        "matrix": "matrix",
        "debate": "debate_topics",
        "recipes.demo": "arithmetic",
    }
    assert found["sums"].digits == 3  # type: ignore[attr-defined]
    assert found["debate"].sides == ("A", "B", "C")  # type: ignore[attr-defined]
