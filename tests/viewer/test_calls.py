"""Tool calls are shown as calls: name, arguments and result, and never as markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.episode_lines import change_rows
from tests.support.viewed_runs import client_of, write_run

from kapelle.viewer.calls import shown_calls

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1.5, "note": "<b>x</b>"}}</tool_call>'
ARGUMENTS = [("a", "1.5"), ("note", "<b>x</b>")]


@pytest.mark.parametrize(
    ("text", "form", "words"),
    [
        (f"I add.\n{ADD}", None, "I add."),
        ('[add(a=1.5, note="<b>x</b>")]', "pythonic", ""),
        ('{"name": "add", "parameters": {"a": 1.5, "note": "<b>x</b>"}}', None, ""),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1.5, "note": "<b>x</b>"}}]', "hermes", ""),
        ("<tool_call>add<arg_key>a</arg_key><arg_value>1.5</arg_value><arg_key>note</arg_key><arg_value><b>x</b></arg_value></tool_call>", None, ""),
    ],
)  # fmt: skip
def test_calls_of_every_form_are_read(text: str, form: object, words: str) -> None:
    found = shown_calls(text, form, ["3"])
    assert found is not None
    assert found["rows"] == [{"name": "add", "arguments": ARGUMENTS, "result": "3", "rows": 1}]
    assert found["words"] == words


def test_the_page_of_an_episode_shows_a_call_beside_its_result(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)

    def change(line: int, row: dict[str, Any]) -> None:
        row["turns"][0]["text"] = f"{ADD}{ADD}"
        again = {**row["turns"][0], "index": 2, "completed_before": 2, "text": "done"}
        results = [f"<img src=x> of call {k}" for k in range(2 - line % 2)]
        called = {"role": "assistant", "content": ADD.replace("add", "earlier")}
        again["new_messages"] = [called, *({"role": "tool", "content": text} for text in results)]
        row["turns"].append(again)

    change_rows(run / "episodes" / "train", change)
    with client_of(tmp_path) as web:
        for line in range(2):
            page = web.get(f"/run/run/episode/train/1/{line}").text
            assert page.count("<b>add</b>") == 2
            assert page.count("<b>earlier</b>") == 1
            assert page.count("&lt;b&gt;x&lt;/b&gt;</pre></dd>") == 3
            assert "<pre>&lt;img src=x&gt; of call 0</pre></td>" in page
            assert ('rowspan="2"' in page) == bool(line), "one result of both calls"
            assert json.dumps("<b>x</b>") not in page
