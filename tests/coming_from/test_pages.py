"""Run the recipes of the pages on other libraries with tiny models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support.ports import Port, chatml
from tests.support.qwen import save_qwen
from tools.docs_site.links import ROOT

from kapelle.cli import main

pytestmark = pytest.mark.slow

ROWS = [{"question": f"{k}+{k}", "answer": f"#### {2 * k}"} for k in range(4)]


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of one language on a page."""
    text = (ROOT / "docs" / "coming_from" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def train_page(tmp_path: Path, page: str, family: str, *smaller: str) -> Port:
    """Train two steps with the page's recipe, a tiny model and these settings."""
    [recipe] = blocks(page, "yaml")
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    save_qwen(tmp_path / "model", family)
    settings = [f"model.path={tmp_path}/model", "team.sampling.max_tokens=6", *smaller]
    assert main(["train", str(tmp_path / "recipe.yaml"), *settings, "--run-dir", str(tmp_path / "run")]) == 0
    return Port(tmp_path / "run", tmp_path / "model")


def test_open_r1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [rewards] = blocks("trl", "python")
    (tmp_path / "my_rewards.py").write_text(rewards, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    rows = [
        {"problem": f"{k}+{k}", "solution": f"$\\boxed{{{2 * k}}}$", "answer": f"{2 * k}"} for k in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    smaller = (
        "per_device_train_batch_size=1",
        "num_generations=2",
        f"environment.path={tmp_path}/rows.jsonl",
    )
    port = train_page(tmp_path, "trl", "qwen2", *smaller)
    assert port.batches == [(2, 2), (2, 2)]
    system = "First think, then answer: <think>\n...\n</think>\n<answer>\n...\n</answer>"
    assert set(port.prompts.values()) == {
        chatml(("system", system), ("user", row["problem"])) for row in rows
    }
    right = "<think>\nZero.\n</think>\n<answer>\n0\n</answer>"
    earned = [
        port.earned({"agent_0": text}).rewards["agent_0"]
        for text in (right, "<answer>0</answer>", "It is 0.")
    ]
    assert earned == [2.0, 1.0, 0.0]


@pytest.mark.long
def test_pettingllms(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    for split in ("train", "test"):
        lines = [json.dumps({**row, "question": f"{split}: {row['question']}"}) for row in ROWS]
        (rows / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    local = (
        f"environment.path={rows}",
        "environment.config=null",
        "training.steps=2",
        "training.tasks_per_step=2",
    )
    port = train_page(tmp_path, "pettingllms", "qwen3", *local, "tasks.max_prompt_tokens=400")
    # The template closes the thinking block before the answer.
    first = next(text for (_, agent), text in port.prompts.items() if agent == "tool_generator")
    assert first.startswith("<|im_start|>user\nWrite Python that prints the answer.\n")
    assert first.endswith(chatml(end="<think>\n\n</think>\n\n"))
    assert port.trained == dict.fromkeys(("reasoning_generator", "tool_generator"), "rank 16, alpha 32")
    assert port.rates == [5e-6, 5e-6]


def test_agent_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    program, reward = blocks("agent_lightning", "python")
    (tmp_path / "my_agent.py").write_text(program, encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(reward, encoding="utf-8")
    rows = tmp_path / "gsm8k.jsonl"
    rows.write_text(
        "".join(json.dumps({**row, "answer": row["answer"][5:]}) + "\n" for row in ROWS), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    smaller = ("training.steps=2", "training.tasks_per_step=1", "algorithm.group_size=2")
    port = train_page(tmp_path, "agent_lightning", "qwen2", *smaller)
    assert port.batches == [(1, 2), (1, 2)]
    assert all(episode.error is None for episode in port.episodes)
    assert all("+" in text and "### ANSWER: <answer> ###" in text for text in port.prompts.values())
