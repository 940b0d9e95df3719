"""Calls of tools as the interfaces of different vendors write them."""

from __future__ import annotations

import pytest

from kapelle.environments.grading.text.tool_call import AcceptedCall, grade_tool_call

WEATHER: AcceptedCall = {"weather": {"city": ["Bern"], "days": [3]}}
BOTH: list[AcceptedCall] = [WEATHER, {"sqrt": {"x": [2]}}]
ARGUMENTS = '{"city": "Bern", "days": 3}'
IN_TEXT = '"{\\"city\\": \\"Bern\\", \\"days\\": 3}"'


@pytest.mark.parametrize(
    "text",
    [
        f'{{"tool_calls": [{{"id": "a", "type": "function", "function": {{"name": "weather", "arguments": {IN_TEXT}}}}}]}}',
        f'[{{"id": "a", "type": "function", "function": {{"name": "weather", "arguments": {ARGUMENTS}}}}}]',
        f'{{"type": "tool_use", "id": "t", "name": "weather", "input": {ARGUMENTS}}}',
        f'<tool_call>[{{"name": "weather", "arguments": {ARGUMENTS}}}]</tool_call>',
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
        f"[TOOL_CALLS]weather{ARGUMENTS}",
    ],
)
def test_a_call_in_a_vendors_form(text: str) -> None:
    assert grade_tool_call(text, [WEATHER]).score == 1.0


def test_two_calls_after_marks() -> None:
    text = f'[TOOL_CALLS]sqrt[ARGS]{{"x": 2}}[TOOL_CALLS]weather[ARGS]{ARGUMENTS}'
    assert grade_tool_call(text, BOTH).score == 1.0
    assert grade_tool_call(text, [WEATHER]).score == 0.0


@pytest.mark.parametrize(
    "text",
    [
        '{"tool_calls": []}',
        '{"tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Basel", "days": 3}}}]}',
        f'{{"function": {{"name": "weather", "arguments": {ARGUMENTS}}}, "name": "sqrt"}}',
        f'[TOOL_CALLS]weather{ARGUMENTS}{{"city": "Basel"}}',
        "[TOOL_CALLS]weather",
        '{"tool_calls":' * 50 + "[]" + "}" * 50,
    ],
)
def test_what_is_another_call_or_none(text: str) -> None:
    assert grade_tool_call(text, [WEATHER]).score == 0.0
