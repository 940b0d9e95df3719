from __future__ import annotations

import re

import pytest
from tests.cli.conftest import Kapelle

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Name the environments to serve"),
        (["--environments", "arithmetik"], "Environment 'arithmetik': .*Did you mean 'arithmetic'"),
        (["--environments", "sums=arithmetic", "sum.digits=3"], "Did you mean 'sums'"),
        (["--environments", "arithmetic", "--host", "0.0.0.0"], "TLS .* and a token"),  # noqa: S104
        (["--replace", "arithmetic"], "--at localhost:50051"),
        (["--replace", "arithmetic", "--at", "127.0.0.1:1"], "No environment server has answered"),
    ],
)
def test_what_cannot_be_served_is_one_line(kapelle: Kapelle, words: list[str], said: str) -> None:
    done = kapelle("serve", "environments", *words)
    assert done.code in (1, 2)
    assert len(done.err.splitlines()) == 1
    assert re.search(said, done.err)
