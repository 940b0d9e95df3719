"""Port open-r1's GRPO demonstration for Qwen2.5-1.5B-Instruct, a YAML file with TRL's names. From 1416fa0 (TRL 0.18)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.support.ports import Port, chatml
from tests.support.qwen import save_qwen

from kapelle.cli import main

SYSTEM = (
    "You are a helpful assistant that reasons before it answers. Respond in the following format: "
    "<think>\n...\n</think>\n<answer>\n...\n</answer>"
)
SOLVED = [
    ("What is 3 + 4?", "7"),
    ("What is 2 * 1200?", "2400"),
    ("What is 5 * 6?", "30"),
    ("Halve 48.", "24"),
]
THEIRS = f"""
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_prompt_column: problem
system_prompt: {json.dumps(SYSTEM)}
bf16: true
do_eval: false
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
hub_model_id: Qwen2.5-1.5B-Open-R1-GRPO
hub_strategy: every_save
learning_rate: 2.0e-05
log_completions: true
log_level: info
logging_first_step: true
logging_steps: 1
logging_strategy: steps
lr_scheduler_type: cosine
max_prompt_length: 512
max_steps: -1
num_train_epochs: 1
overwrite_output_dir: true
per_device_eval_batch_size: 16
report_to: []
save_strategy: "epoch"
save_total_limit: 1
seed: 42
warmup_ratio: 0.1
"""
"""The keys that stay the same. The original has `report_to: wandb`."""
SMALLER = "max_completion_length: 6\nnum_generations: 4\nper_device_train_batch_size: 2\nuse_vllm: false\n"
"""The original has 1024, 16, 16 and true."""
UNSUPPORTED = (
    "push_to_hub: true\nreward_funcs: [accuracy, format, tag_count]\nreward_weights: [1.0, 1.0, 1.0]\n"
)
OURS = """
team: {{sharing: shared}}
environment:
  name: rewarded
  eval_path: none
  rewards: [{{function: "{module}:accuracy"}}, {{function: "{module}:form"}}, {{function: "{module}:tag_count"}}]
workflow: {{name: solo}}
algorithm: {{name: grpo}}
evaluation: {{before_and_after: false}}
"""


def accuracy(completion: str, answer: str) -> float:
    """Return 1 for the right boxed answer, as open-r1 does for numbers."""
    return float(re.findall(r"\\boxed\{(.*?)\}", completion)[:1] == [answer])


def form(completion: str) -> float:
    pattern = r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
    return float(re.match(pattern, completion, re.DOTALL | re.MULTILINE) is not None)


def tag_count(completion: str) -> float:
    return sum(
        0.25
        for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
        if completion.count(tag) == 1
    )


GIVEN = {
    "<think>\n3 + 4\n</think>\n<answer>\n\\boxed{7}\n</answer>": 3.0,
    "<think>\n3 + 4\n</think>\n<answer>\n\\boxed{8}\n</answer>": 2.0,
    "<think>\n3 + 4\n</think>\nIt is \\boxed{7}.": 1.5,
    "7": 0.0,
}
"""Completion of the first problem → sum of `accuracy`, `format` and `tag_count`."""


def save_rows(folder: Path) -> None:
    """Write rows in the format of OpenR1-Math-220k."""
    folder.mkdir()
    rows = [
        {
            "problem": question,
            "solution": f"So it is $\\boxed{{{answer}}}$.",
            "answer": answer,
            "problem_type": "Algebra",
            "source": "olympiads",
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        }
        for question, answer in SOLVED
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_recipe(tmp_path: Path, more: str = "") -> Path:
    """Write the recipe that a user would port."""
    save_rows(tmp_path / "rows")
    ours = OURS.format(module=__name__)
    named = f"model_name_or_path: {tmp_path}/model\ndataset_name: {tmp_path}/rows\n"
    recipe = tmp_path / "open_r1.yaml"
    recipe.write_text(named + THEIRS + SMALLER + more + ours, encoding="utf-8")
    return recipe


@pytest.mark.slow
def test_run_matches_file(tmp_path: Path) -> None:
    save_qwen(tmp_path / "model", "qwen2")
    assert main(["train", str(save_recipe(tmp_path)), "--run-dir", str(tmp_path / "run")]) == 0
    port = Port(tmp_path / "run", tmp_path / "model")
    # One device: 2 × 4 completions per step, 4 of each problem.
    assert port.batches == [(2, 4), (2, 4)]
    assert set(port.prompts.values()) == {
        chatml(("system", SYSTEM), ("user", question)) for question, _ in SOLVED
    }
    assert list(port.trained.values()) == ["all weights"]
    assert port.setting("seed") == 42
    optimizer, loss = port.setting("optimizer"), port.setting("algorithm.loss")
    assert (optimizer["lr"], optimizer["schedule"], optimizer["warmup_share"]) == (2e-5, "cosine", 0.1)
    assert (loss["kl_coefficient"], loss["clip_low"], loss["clip_high"]) == (0.0, 0.2, 0.2)
    assert (port.setting("model.dtype"), port.setting("training.gradient_checkpointing")) == (
        "bfloat16",
        True,
    )
    assert port.setting("checkpoint.keep") == 1
    for completion, reward in GIVEN.items():
        assert port.earned({"agent_0": completion}).rewards["agent_0"] == pytest.approx(reward), completion


def test_error_names_every_unsupported_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(save_recipe(tmp_path, UNSUPPORTED)), "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert [
        key for key in (*yaml.safe_load(UNSUPPORTED), *yaml.safe_load(THEIRS)) if f"`{key}`" in message
    ] == [*yaml.safe_load(UNSUPPORTED)]
