from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from kapelle.cli.train import annotated_yaml

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30)
KEYS = st.text(min_size=1, max_size=8)
SETTINGS = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS | st.lists(SCALARS, max_size=3),
        lambda inner: (
            st.dictionaries(KEYS, inner, max_size=3)
            | st.lists(st.dictionaries(KEYS, inner, min_size=1, max_size=2), min_size=1, max_size=2)
        ),
        max_leaves=8,
    ),
    min_size=1,
    max_size=3,
)


@given(SETTINGS, st.data())
def test_comments_change_nothing_that_yaml_reads(values: dict[str, Any], data: st.DataObject) -> None:
    origin = dict.fromkeys(leaves(values), data.draw(st.text(max_size=20)))
    assert yaml.safe_load(annotated_yaml(values, origin)) == values


def leaves(value: Any, at: str = "") -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{at}.{key}" if at else key)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [leaf for k, item in enumerate(value) for leaf in leaves(item, f"{at}.{k}")]
    return [at]


def test_values_that_are_set_have_their_origin_as_a_comment() -> None:
    values = {"a": 1, "team": {"agents": [{"name": "x", "prompt": None}], "stop": ["#"]}, "text": "1\n2"}
    origin = {"a": "command line", "team.agents.0.name": "mine.yaml", "team.stop": "default"}
    assert annotated_yaml(values, origin).splitlines() == [
        "a: 1   # command line",
        "team:",
        "  agents:",
        "    - name: x   # mine.yaml",
        "      prompt: null",
        "  stop: ['#']",
        r'text: "1\n2"',
    ]
