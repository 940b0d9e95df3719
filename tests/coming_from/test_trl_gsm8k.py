"""The most copied GRPO script for TRL: GSM8K, a system prompt that asks for XML, and five rewards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.coming_from.test_verl_gsm8k import SOLVED
from tests.support.ports import Port, chatml
from tests.support.qwen import save_qwen

import kapelle

pytestmark = pytest.mark.slow

SYSTEM = "\nRespond in the following format:\n\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
ROWS = [
    # `datasets.map` adds its columns and keeps `question`.
    {
        "question": question,
        "answer": solution.split("####")[1].strip().replace(",", ""),
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
    }
    for question, solution in SOLVED
]
OPENED, CLOSED = "<reasoning>\n", "\n</answer>\n"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]


def inside(text: str) -> str:
    """Return the content of the last answer tag, or the whole text."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def texts(completions: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
    """Return the text of each completion. TRL passes lists of messages."""
    return [messages[0]["content"] for messages in completions]


def correct(prompts: Any, completions: Any, answer: list[str], **kwargs: Any) -> list[float]:
    assert prompts[0][-1]["role"] == "user"
    return [2.0 * (inside(text) == gold) for text, gold in zip(texts(completions), answer, strict=True)]


def digits(completions: Any, **kwargs: Any) -> list[float]:
    return [0.5 * inside(text).isdigit() for text in texts(completions)]


def strict(completions: Any, **kwargs: Any) -> list[float]:
    form = r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n\Z"
    return [0.5 * bool(re.match(form, text, re.DOTALL)) for text in texts(completions)]


def soft(completions: Any, **kwargs: Any) -> list[float]:
    form = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    return [0.5 * bool(re.match(form, text, re.DOTALL)) for text in texts(completions)]


def tags(completions: Any, **kwargs: Any) -> list[float]:
    return [tags_in(text) for text in texts(completions)]


def tags_in(text: str) -> float:
    """Return an eighth per tag that is alone on its line, minus a thousandth per character after the last tag."""
    score = 0.125 * sum(text.count(tag) == 1 for tag in (OPENED, "\n</reasoning>\n"))
    if text.count("\n<answer>\n") == 1:
        score += 0.125 - 0.001 * len(text.rpartition(CLOSED)[2])
    if text.count("\n</answer>") == 1:
        score += 0.125 - 0.001 * (len(text.rpartition("\n</answer>")[2]) - 1)
    return score


GIVEN = {
    "<reasoning>\n3 + 4 = 7\n</reasoning>\n<answer>\n7\n</answer>\n": 4.0,
    "<reasoning>\n3 + 4 = 7\n</reasoning>\n<answer>\n7\n</answer>\nDone.": 3.49,
    "<reasoning>\n3 + 4 = 8\n</reasoning>\n<answer>\n8\n</answer>\n": 2.0,
    "7": 2.5,
    "It is seven.": 0.0,
}
"""Completion of the first question → sum of the script's five functions."""


def ported(tmp_path: Path, **more: Any) -> Port:
    """Train two steps with the script's arguments, a tiny model and short completions."""
    model = tmp_path / "model"
    save_qwen(model, "qwen2")
    quiet: Any = {"logging_steps": 1, "log_on_each_node": False}
    kapelle.train(
        str(model),
        train_dataset=ROWS,
        reward_funcs=[tags, soft, strict, digits, correct],
        output_dir=str(tmp_path / "run"),
        learning_rate=5e-6,
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.1,
        warmup_ratio=0.1,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        num_generations=4,
        max_prompt_length=400,
        max_completion_length=6,
        num_train_epochs=1,
        save_steps=100,
        max_grad_norm=0.1,
        report_to="none",
        run_name="Qwen-1.5B-GRPO-gsm8k",
        **quiet,
        **more,
    ).trainer.close()
    return Port(tmp_path / "run", model)


LORA = {"r": 16, "lora_alpha": 64, "target_modules": TARGETS, "task_type": "CAUSAL_LM", "lora_dropout": 0.05}


@pytest.mark.parametrize(
    ("peft", "trained"),
    [pytest.param(None, "all weights", marks=pytest.mark.long), (LORA, "rank 16, alpha 64")],
)
def test_run_matches_script(tmp_path: Path, peft: Any, trained: str) -> None:
    port = ported(tmp_path, peft_config=peft)
    # 8 completions per step, 4 of each prompt: 4 rows give two steps.
    assert port.batches == [(2, 4), (2, 4)]
    # The prompt has the row's system message in place of the template's.
    assert set(port.prompts.values()) == {
        chatml(("system", SYSTEM), ("user", question)) for question, _ in SOLVED
    }
    assert list(port.trained.values()) == [trained]
    loss, optimizer = port.setting("algorithm.loss"), port.setting("optimizer")
    assert (loss["kl_coefficient"], loss["clip_low"], loss["clip_high"]) == (0.0, 0.2, 0.2)
    assert (port.setting("algorithm.scale"), port.setting("algorithm.truncated")) == ("std", "keep")
    assert (optimizer["lr"], optimizer["schedule"], optimizer["warmup_share"]) == (5e-6, "cosine", 0.1)
    # A tenth of two steps rounds up to one warm-up step. It starts at 0 as in transformers.
    assert port.rates == [0.0, 5e-6]
    assert (optimizer["betas"], optimizer["weight_decay"], optimizer["max_grad_norm"]) == (
        [0.9, 0.99],
        0.1,
        0.1,
    )
    assert port.setting("team.sampling.temperature") == 1.0
    for completion, reward in GIVEN.items():
        assert port.earned({"agent_0": completion}).rewards["agent_0"] == pytest.approx(reward), completion
