from __future__ import annotations

import pytest

from kapelle.environments.adapters.openenv import ActionForm, to_action


@pytest.mark.parametrize("kind", ["integer", "number", "boolean", "object"])
@pytest.mark.parametrize(
    "text", ["", "nan", "NaN", "1e999", "9" * 5000, "[" * 5000, '{"a": NaN}', '{"a": 1e999}']
)
def test_invalid_json_is_no_action(kind: str, text: str) -> None:
    assert to_action(text, ActionForm(None if kind == "object" else "field", kind, "")) is None


def test_a_whole_number_may_exceed_any_float() -> None:
    assert to_action("9" * 400, ActionForm("field", "number", "")) == {"field": int("9" * 400)}
