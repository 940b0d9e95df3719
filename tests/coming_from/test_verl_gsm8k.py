"""Port verl's GSM8K scripts for Qwen3-8B: all weights and LoRA. From 1dda039b9 (0.10.0.dev)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.ports import Port, chatml, scripted
from tests.support.qwen import save_qwen

from kapelle.cli import main
from kapelle.environments import Rewarded
from kapelle.setup.recipe import load_recipe
from kapelle.workflows import Solo

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
WANTED = 'Let\'s think step by step and output the final answer after "####".'
RECIPE = """
name: verl_gsm8k
environment: {name: math, question_field: prompt, answer_field: reward_model.ground_truth, extraction: [hash]}
team: {agents: 1}
workflow: {name: solo}
"""


def save_rows(folder: Path) -> None:
    """Write two files in the format of verl's GSM8K preprocessing."""
    folder.mkdir()
    for split, rows in (("train", SOLVED), ("test", [("How many is 2 + 2?", "#### 4")])):
        made = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{question} {WANTED}"}],
                "ability": "math",
                "reward_model": {
                    "style": "rule",
                    "ground_truth": solution.split("#### ")[1].replace(",", ""),
                },
                "extra_info": {"split": split, "index": k, "answer": solution, "question": question},
            }
            for k, (question, solution) in enumerate(rows)
        ]
        pq.write_table(pa.Table.from_pylist(made), folder / f"{split}.parquet")


def script(data: Path, model: Path, *, lr: str, more: tuple[str, ...] = ()) -> list[str]:
    """Return the arguments of the scripts, with smaller sizes."""
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        "data.train_batch_size=2",
        "data.max_prompt_length=1024",
        "data.max_response_length=6",
        "data.filter_overlong_prompts=True",
        "data.truncation=error",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        f"actor_rollout_ref.actor.optim.lr={lr}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.actor.entropy_coeff=0",
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        "actor_rollout_ref.rollout.n=5",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "trainer.balance_batch=True",
        'trainer.logger=["console"]',
        "trainer.project_name=verl_grpo_gsm8k_math",
        "trainer.experiment_name=qwen3_8b_grpo_vllm_fsdp",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=20",
        "trainer.test_freq=5",
        "trainer.total_epochs=1",
        *more,
    ]


def ported(tmp_path: Path, lr: str, *more: str) -> Port:
    model, data = tmp_path / "model", tmp_path / "gsm8k"
    save_qwen(model, "qwen3")
    save_rows(data)
    recipe = tmp_path / "verl.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    run = tmp_path / "run"
    assert main(["train", str(recipe), *script(data, model, lr=lr, more=more), "--run-dir", str(run)]) == 0
    return Port(run, model)


GIVEN = {
    "3 + 4 = 7\n#### 7": (1.0, 1.0),
    "#### 7\nSo she has 7 apples.": (1.0, 1.0),
    "3 + 4 = 8\n#### 8": (0.0, 0.0),
    "It is 7.": (0.0, 0.0),
    "#### 7.": (0.0, 1.0),
    "#### 8\n#### 7": (1.0, 0.0),
    "#### 7 apples": (1.0, 1.0),
}
"""Completion of the first question → reward of verl's rule for `openai/gsm8k`, reward of `math`."""


def check_shared_results(port: Port) -> None:
    assert port.batches == [(2, 5), (2, 5)]
    # There is no system message, and thinking has the model's default.
    assert set(port.prompts.values()) == {chatml(("user", f"{question} {WANTED}")) for question, _ in SOLVED}
    loss, algorithm, optimizer = (port.setting(each) for each in ("algorithm.loss", "algorithm", "optimizer"))
    assert (loss["kl_coefficient"], loss["kl_estimator"]) == (0.001, "k3")
    assert (loss["clip_low"], loss["clip_high"], loss["entropy_coefficient"]) == (0.2, 0.2, 0.0)
    assert (algorithm["minibatches"], algorithm["epochs"], algorithm["scale"]) == (2, 1, "std")
    assert (optimizer["schedule"], optimizer["betas"], optimizer["max_grad_norm"]) == (
        "constant",
        [0.9, 0.999],
        1.0,
    )
    assert [port.earned({"agent_0": each}).rewards["agent_0"] for each in GIVEN] == [
        ours for _, ours in GIVEN.values()
    ]


def verl_rule(completion: str, reward_model: Any) -> float:
    """Return 1 if the last number after `#### ` in the last 300 characters equals the gold answer as text."""
    found = re.findall(r"#### (-?[\d.,]+)", completion[-300:])
    return float(bool(found) and found[-1].replace(",", "") == reward_model["ground_truth"])


@pytest.mark.long
@pytest.mark.slow
def test_all_weights(tmp_path: Path) -> None:
    # The script names no adapter, so verl trains all weights.
    port = ported(tmp_path, "1e-6", "team.sharing=shared")
    check_shared_results(port)
    assert port.rates == [1e-6, 1e-6]
    assert list(port.trained.values()) == ["all weights"]


@pytest.mark.slow
def test_lora(tmp_path: Path) -> None:
    rank = ("actor_rollout_ref.model.lora_rank=64", "actor_rollout_ref.model.lora_alpha=32")
    rest = (
        "actor_rollout_ref.rollout.load_format=safetensors",
        "actor_rollout_ref.rollout.layered_summon=True",
        "trainer.val_before_train=False",
    )
    port = ported(tmp_path, "3e-6", *rank, *rest)
    check_shared_results(port)
    assert port.rates == [3e-6, 3e-6]
    assert port.trained == {"agent_0": "rank 64, alpha 32"}
    assert port.setting("team.lora.targets") == ["all-linear"]


def test_verl_rule_as_reward_function(tmp_path: Path) -> None:
    save_rows(tmp_path / "gsm8k")
    rows = {"path": str(tmp_path / "gsm8k"), "config": None, "eval_path": "own"}
    rule = [{"function": f"{__name__}:verl_rule"}]
    environment = Rewarded.model_validate({**rows, "rewards": rule})
    rewards = [scripted(environment, Solo(), {"agent_0": each}).rewards["agent_0"] for each in GIVEN]
    assert rewards == [theirs for theirs, _ in GIVEN.values()]


def test_sizes_of_script(tmp_path: Path) -> None:
    """The sizes for 8 billion parameters on eight GPUs become settings. The run needs vLLM."""
    recipe = tmp_path / "verl.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    theirs = [
        "data.train_batch_size=1024",
        f"{actor}.ppo_mini_batch_size=256",
        f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size=2",
        'trainer.logger=["console","wandb"]',
        "trainer.n_gpus_per_node=8",
        "trainer.total_epochs=15",
        "trainer.v1.trainer_mode=sync",
        "ray_kwargs.ray_init.runtime_env.py_executable=null",
    ]
    config: Any = load_recipe(str(recipe), settings=[*script(tmp_path, tmp_path, lr="1e-6"), *theirs]).config
    assert (config.training.tasks_per_step, config.training.epochs) == (1024, 15)
    assert (config.algorithm.minibatches, config.algorithm.group_size) == (4, 5)
    assert (config.engine.name, config.engine.options) == ("vllm", {"tensor_parallel_size": 2})
    assert [(tracker.name, tracker.project) for tracker in config.trackers] == [
        ("wandb", "verl_grpo_gsm8k_math")
    ]
    assert (config.checkpoint.every, config.evaluation.every) == (20, 5)
    assert (config.tasks.max_prompt_tokens, config.name) == (1024, "qwen3_8b_grpo_vllm_fsdp")
