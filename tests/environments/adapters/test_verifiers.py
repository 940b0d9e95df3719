"""The adapter without its package; tests/apps/test_verifiers.py has it with the package."""

from __future__ import annotations

import sys

import pytest

from kapelle.environments.adapters import verifiers as adapter
from kapelle.environments.adapters.verifiers import Verifiers, read_calls
from kapelle.errors import ConfigError


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    adapter._load.cache_clear()
    with pytest.raises(ConfigError, match=r"kapelle\[verifiers\]"):
        Verifiers(id="anything").check(["a"])


def test_calls_are_parsed_and_the_text_beside_them_stays() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n</tool_call>'
    assert read_calls(f"I add.\n{call}", "hermes") == (
        "I add.",
        [{"name": "add", "arguments": '{"a": 1, "b": 2.5}'}],
    )
    schema = {"name": "add", "parameters": {"properties": {"a": {"type": "string"}}}}
    pairs = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert read_calls(f"I add.\n{pairs}", "qwen_coder", [schema]) == (
        "I add.",
        [{"name": "add", "arguments": '{"a": "1"}'}],
    )
    broken = '<tool_call>{"name": </tool_call>'
    assert read_calls(broken, "hermes") == (broken, [])
    assert read_calls("7", "hermes") == ("7", [])
