"""The most copied GRPO script for TRL: GSM8K with a system prompt that wants XML, and five rewards. Read in November 2026."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import Port, chatml
from tests.support.qwen import save_qwen

import kapelle

pytestmark = pytest.mark.slow

SYSTEM = "\nRespond in the following format:\n\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
SOLVED = [
    (
        "Ann has 3 apples and buys 4 more. How many are hers now?",
        "She has 3 + 4 = <<3+4=7>>7 apples.\n#### 7",
    ),
    (
        "A shop sold 1,200 pens on each of 2 days. How many in all?",
        "2 x 1,200 = <<2*1200=2400>>2,400.\n#### 2,400",
    ),
    ("Bo runs 5 miles a day. How far in 6 days?", "5 x 6 = <<5*6=30>>30 miles.\n#### 30"),
    ("Half of 48 clips are sold. How many are left?", "48 / 2 = <<48/2=24>>24.\n#### 24"),
]
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
    """Return what stands in the last answer tag, or the whole text."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def texts(completions: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
    """Return the text of each completion, which TRL gives as a list of messages."""
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
    """An eighth for each tag that stands alone on its line once, less a thousandth for each character behind the last."""
    paid = 0.125 * sum(text.count(tag) == 1 for tag in (OPENED, "\n</reasoning>\n"))
    if text.count("\n<answer>\n") == 1:
        paid += 0.125 - 0.001 * len(text.rpartition(CLOSED)[2])
    if text.count("\n</answer>") == 1:
        paid += 0.125 - 0.001 * (len(text.rpartition("\n</answer>")[2]) - 1)
    return paid


GIVEN = {
    "<reasoning>\n3 + 4 = 7\n</reasoning>\n<answer>\n7\n</answer>\n": 4.0,
    "<reasoning>\n3 + 4 = 7\n</reasoning>\n<answer>\n7\n</answer>\nDone.": 3.49,
    "<reasoning>\n3 + 4 = 8\n</reasoning>\n<answer>\n8\n</answer>\n": 2.0,
    "7": 2.5,
    "It is seven.": 0.0,
}
"""Completion of the first question → what the five functions of the script come to."""


def ported(tmp_path: Path, **more: Any) -> Port:
    """Train for two steps with the script's own arguments, but for the model and the lengths."""
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


@pytest.mark.parametrize(("peft", "trained"), [(None, "all weights"), (LORA, "rank 16, alpha 64")])
def test_it_does_what_the_script_does(tmp_path: Path, peft: Any, trained: str) -> None:
    port = ported(tmp_path, peft_config=peft)
    # 8 completions a step, 4 of each prompt: 4 rows are two steps
    assert port.batches == [(2, 4), (2, 4)]
    # `prompt` is what is asked, with its own system message in place of the template's
    assert set(port.prompts.values()) == {
        chatml(("system", SYSTEM), ("user", question)) for question, _ in SOLVED
    }
    assert list(port.trained.values()) == [trained]
    loss, optimizer = port.setting("algorithm.loss"), port.setting("optimizer")
    assert (loss["kl_coefficient"], loss["clip_low"], loss["clip_high"]) == (0.0, 0.2, 0.2)
    assert (port.setting("algorithm.scale"), port.setting("algorithm.truncated")) == ("std", "keep")
    assert (optimizer["lr"], optimizer["schedule"], optimizer["warmup_share"]) == (5e-6, "cosine", 0.1)
    # a tenth of two steps is one step of warm-up, which begins at 0 as in transformers
    assert port.rates == [0.0, 5e-6]
    assert (optimizer["betas"], optimizer["weight_decay"], optimizer["max_grad_norm"]) == (
        [0.9, 0.99],
        0.1,
        0.1,
    )
    assert port.setting("team.sampling.temperature") == 1.0
    for completion, paid in GIVEN.items():
        assert port.earned({"agent_0": completion}).rewards["agent_0"] == pytest.approx(paid), completion
