from __future__ import annotations

import re
import sys

import pytest
from tests.cli.conftest import Kapelle


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Name what to serve and a run directory"),
        (["policy"], "Name what to serve and a run directory"),
        (["polcy", "run"], "Did you mean 'policy'"),
        (["policy", "nowhere"], "nowhere"),
        (["policy", "run", "--host", "0.0.0.0"], "that needs TLS .* and a token"),  # noqa: S104
        (["policy", "run", "--port", "99999"], "port 99999"),
        (["policy", "run", "--calls", "0"], "--calls"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    kapelle: Kapelle, no_model: None, words: list[str], said: str
) -> None:
    done = kapelle("serve", *words)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert re.search(said, done.err)


def test_the_extra_is_named_where_it_is_missing(
    kapelle: Kapelle, no_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = kapelle("serve", "policy", "run")
    assert done.code == 2
    assert done.err == "kapelle: Serving needs an extra: pip install 'kapelle[serve]'.\n"
