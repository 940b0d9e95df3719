"""Port TRL's agent example: questions on genes, a database tool, three rewards. From f2cd57710."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import Port
from tests.support.qwen import save_qwen

import kapelle

pytestmark = pytest.mark.slow

GENES = [("ABC1", "XYZ2", "yes"), ("ABC1", "QRS3", "no"), ("XYZ2", "QRS3", "no"), ("XYZ2", "ABC1", "yes")]
PREAMBLE = "You can query a SQLite database, whose table is `interactions`.\nWrite the answer between stars, such as *Yes* or *No*.\n"
QUESTIONS = [f"{PREAMBLE}\nQuestion: Does the gene {a} interact with {b}?" for a, b, _ in GENES]
ROWS = [
    {"prompt": [{"role": "user", "content": question}], "answer": answer}
    for question, (_, _, answer) in zip(QUESTIONS, GENES, strict=True)
]


def query_genes(sql_command: str) -> list[tuple[Any, ...]]:
    """Execute a read-only SQL command on the database of gene interactions.

    Args:
        sql_command: The SQL command to execute.

    Returns:
        A list of tuples containing the query results.
    """
    with sqlite3.connect("file:genes.db?mode=ro", uri=True) as connection:
        return connection.execute(sql_command).fetchall()


def correctness(completions: Any, answer: list[str], **kwargs: Any) -> list[float]:
    """Score the word between stars in the last message."""
    scores = []
    for messages, right in zip(completions, answer, strict=True):
        found = re.search(r"\*(yes|no)\*", messages[-1]["content"].lower())
        scores.append(-0.5 if found is None else 0.6 if found[1] == right else -1.0)
    return scores


def structure(completions: Any, **kwargs: Any) -> list[float]:
    """Score an answered call, and text beside it."""
    scores = []
    for messages in completions:
        called = any(each["role"] == "assistant" and each.get("tool_calls") for each in messages)
        answered = any(each["role"] == "tool" for each in messages)
        words = any(
            each["role"] == "assistant" and not each.get("tool_calls") and each["content"].strip()
            for each in messages
        )
        scores.append((0.1 if words else 0.05) if called and answered else -0.15 if called else 0.0)
    return scores


def queries(completions: Any, **kwargs: Any) -> list[float]:
    """Score conditions in the commands. No command costs 1.5."""
    scores = []
    for messages in completions:
        calls = [call["function"] for each in messages for call in each.get("tool_calls") or []]
        commands = [call["arguments"]["sql_command"].lower() for call in calls]
        scores.append(sum(0.4 if " where " in each else -0.5 for each in commands) if commands else -1.5)
    return scores


def call(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'query_genes', 'arguments': {'sql_command': command}})}\n</tool_call>"


GIVEN = [
    (["*Yes*"], 0.6 + 0.0 - 1.5),
    ([call("SELECT * FROM interactions WHERE a = 'ABC1'"), "They do: *Yes*"], 0.6 + 0.1 + 0.4),
    ([call("SELECT * FROM interactions"), "They do not: *No*"], -1.0 + 0.1 - 0.5),
    ([call("SELECT * FROM interactions WHERE a = 'ABC1'"), "They do."], -0.5 + 0.1 + 0.4),
]
"""Turns on the first question → sum of the three functions."""


def test_run_matches_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("genes.db") as connection:
        connection.execute("CREATE TABLE interactions (a TEXT, b TEXT)")
        connection.execute("INSERT INTO interactions VALUES ('ABC1', 'XYZ2')")
    save_qwen(tmp_path / "model", "qwen3")
    quiet: Any = {"log_completions": True}
    kapelle.train(
        str(tmp_path / "model"),
        train_dataset=ROWS,
        tools=[query_genes],
        reward_funcs=[correctness, structure, queries],
        chat_template_kwargs={"enable_thinking": False},
        output_dir=str(tmp_path / "run"),
        max_completion_length=6,
        max_steps=2,
        # TRL's defaults, which its script does not change.
        learning_rate=1e-6,
        lr_scheduler_type="linear",
        num_generations=8,
        per_device_train_batch_size=8,
        beta=0.0,
        team={"sharing": "shared"},
        report_to="none",
        **quiet,
    ).trainer.close()
    port = Port(tmp_path / "run", tmp_path / "model")
    assert port.batches == [(1, 8), (1, 8)]
    assert list(port.trained.values()) == ["all weights"]
    assert port.rates == pytest.approx([1e-6, 0.5e-6])
    for (question, _), prompt in port.prompts.items():
        # Tools come before the question. The template closes the thinking block.
        assert '"name": "query_genes"' in prompt
        assert '"sql_command": {"type": "string", "description": "The SQL command to execute."}' in prompt
        assert question in QUESTIONS
        assert prompt.endswith(f"{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    for turns, reward in GIVEN:
        episode = port.earned({"agent_0": turns})
        assert len(episode.turns) == len(turns)
        assert episode.rewards["agent_0"] == pytest.approx(reward), turns
