"""Settings by the names of other libraries: converted to ours, ignored, or an error with the reason."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

import kapelle
from kapelle.algorithms.grpo import GRPO
from kapelle.environments.arithmetic import Arithmetic
from kapelle.errors import ConfigError, for_command
from kapelle.settings.aliases import ARGUMENTS, TABLE
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import Recipe, load_recipe, load_stages, to_yaml

make: Any = kapelle.Trainer
REST = "environment: {name: arithmetic}\nworkflow: {name: solo}\n"
RECIPE = f"{REST}algorithm: {{name: grpo}}\n"


def read(text: str, folder: Path, *settings: str) -> Recipe:
    """Return a recipe with this text, and settings of the command line."""
    path = folder / "r.yaml"
    path.write_text(text)
    return load_recipe(str(path), (), settings)


def at(config: Any, path: str) -> Any:
    """Return a setting by its dotted name."""
    for part in path.split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


THREE = {"optimizer.lr": 2e-5, "algorithm.group_size": 4, "algorithm.loss.kl_coefficient": 0.04}


def test_a_recipe_may_use_names_of_trl(tmp_path: Path) -> None:
    recipe = read(f"{RECIPE}learning_rate: 2e-5\nnum_generations: 4\nbeta: 0.04\n", tmp_path)
    assert {path: at(recipe.config, path) for path in THREE} == THREE
    assert recipe.notes[0].startswith("learning_rate is read as optimizer.lr, num_generations is read as")
    assert recipe.origin["optimizer.lr"].endswith("r.yaml")
    assert "learning_rate" not in to_yaml(recipe.config)


def test_a_command_line_has_precedence_over_a_recipe(tmp_path: Path) -> None:
    text = f"{REST}algorithm: {{name: grpo, group_size: 16}}\noptimizer: {{lr: 1.0}}\n"
    recipe = read(text, tmp_path, "learning_rate=2e-5", "num_generations=4", "beta=0.04")
    assert {path: at(recipe.config, path) for path in THREE} == THREE
    assert recipe.origin["algorithm.group_size"] == "command line"


def test_a_call_in_python_may_use_names_of_trl() -> None:
    rest: Any = {"environment": Arithmetic(), "workflow": {"name": "solo"}, "algorithm": GRPO(epochs=3)}
    with pytest.warns(UserWarning, match="num_generations is read as algorithm.group_size"):
        trainer = make(**rest, learning_rate=2e-5, num_generations=4, beta=0.04)
    with trainer:
        assert {path: at(trainer.config, path) for path in THREE} == THREE
        assert at(trainer.config, "algorithm.epochs") == 3


PPO = f"{REST}algorithm: {{name: ppo}}\n"
DPO = f"{REST}algorithm: {{name: dpo}}\n"
A = "actor_rollout_ref"


@pytest.mark.parametrize(
    ("text", "settings", "ours"),
    [
        # Completions, of which a task has num_generations: 16 × 4 / 8 = 8 tasks.
        (RECIPE, ["per_device_train_batch_size=16", "gradient_accumulation_steps=4", "num_generations=8"], {"training.tasks_per_step": 8, "algorithm.group_size": 8}),
        # 32 generation batches for 4 accumulated ones: 8 updates on the samples of one step.
        (RECIPE, ["per_device_train_batch_size=2", "gradient_accumulation_steps=4", "steps_per_generation=32"], {"training.tasks_per_step": 8, "algorithm.minibatches": 8}),
        (RECIPE, ["generation_batch_size=64"], {"training.tasks_per_step": 8}),
        # 64 completions are generated at once, 8 in each batch: 8 batches, and 4 updates of 2 batches each.
        (RECIPE, ["generation_batch_size=64", "per_device_train_batch_size=8", "gradient_accumulation_steps=2"], {"training.tasks_per_step": 8, "algorithm.minibatches": 4}),
        # One update of 8 batches learns from 4 generations of 2, all by the same weights.
        (RECIPE, ["per_device_train_batch_size=4", "gradient_accumulation_steps=8", "steps_per_generation=2"], {"training.tasks_per_step": 4, "algorithm.minibatches": 1}),
        (RECIPE, ["per_device_train_batch_size=16", "gradient_accumulation_steps=16", "num_generations=7", "num_processes=7"], {"training.tasks_per_step": 256}),
        (RECIPE, ["eval_strategy=no", "eval_steps=5"], {"evaluation.every": 0}),
        (RECIPE, ["eval_strategy='no'", "eval_steps=5", "eval_on_start=true", "use_cpu=true", "torch_dtype=auto"], {"evaluation.every": 0, "evaluation.before_and_after": True, "model.device": "cpu", "model.dtype": "float32"}),
        (RECIPE, ["system_prompt=Think."], {"team.agents.0.system": "Think."}),
        (RECIPE, ["peft_config={r: 64, lora_alpha: 32, lora_dropout: 0.1, target_modules: [q_proj], task_type: CAUSAL_LM}"], {"team.sharing": "lora", "team.lora.rank": 64, "team.lora.alpha": 32.0, "team.lora.dropout": 0.1, "team.lora.targets": ("q_proj",)}),
        (RECIPE, ["peft_config=null"], {"team.sharing": "shared"}),
        (RECIPE, [f"{A}.actor.clip_ratio=0.2", f"{A}.actor.clip_ratio_low=0.1"], {"algorithm.loss.clip_low": 0.1, "algorithm.loss.clip_high": 0.2}),
        (RECIPE, ["algorithm.name=magrpo", "discount=1.0", "num_turns=1"], {"algorithm.name": "magrpo"}),
        (RECIPE, ["pretrain=embedded", "n_samples_per_prompt=4", "rollout_batch_size=16", "generate_max_len=9"], {"algorithm.group_size": 4, "training.tasks_per_step": 16, "team.sampling.max_tokens": 9}),
        (DPO, ["per_device_train_batch_size=16"], {"training.tasks_per_step": 16}),
        (DPO, ["beta=0.3", "loss_type=ipo"], {"algorithm.beta": 0.3, "algorithm.kind": "ipo"}),
        (RECIPE, ["max_steps=100", "num_iterations=2"], {"training.steps": 50, "algorithm.epochs": 2}),
        (RECIPE, ["max_steps=-1", "num_train_epochs=3"], {"training.epochs": 3.0}),
        (RECIPE, ["max_steps=7", "num_train_epochs=3"], {"training.epochs": None, "training.steps": 7}),
        (f"{RECIPE}training: {{epochs: 2}}\n", ["max_steps=7"], {"training.epochs": None, "training.steps": 7}),
        (f"{RECIPE}max_steps: 7\n", ["num_train_epochs=3"], {"training.epochs": 3.0}),
        (RECIPE, ["epochs=2"], {"training.epochs": 2.0}),
        (RECIPE, ["warmup_ratio=0.1", "max_steps=55"], {"optimizer.warmup_steps": 6}),
        (f"{RECIPE}warmup_ratio: 0.1\n", ["training.steps=200"], {"optimizer.warmup_steps": 20}),
        (RECIPE, ["warmup_steps=0.1", "max_steps=55"], {"optimizer.warmup_steps": 6}),
        (RECIPE, ["warmup_steps=0.1", "num_train_epochs=3"], {"optimizer.warmup_share": 0.1, "optimizer.warmup_steps": 0}),
        (RECIPE, ["algorithm.name=reinforce_plus_plus", "scale_rewards=batch"], {"algorithm.name": "reinforce_plus_plus"}),
        (RECIPE, ["use_vllm=true", "vllm_mode=server", "vllm_server_base_url=http://127.0.0.1:8000"], {"engine.server": "http://127.0.0.1:8000"}),
        (RECIPE, ["epsilon=0.1"], {"algorithm.loss.clip_low": 0.1, "algorithm.loss.clip_high": 0.1}),
        (RECIPE, ["epsilon=0.1", "epsilon_high=0.3"], {"algorithm.loss.clip_low": 0.1, "algorithm.loss.clip_high": 0.3}),
        (RECIPE, ["loss_type=dr_grpo", "max_completion_length=99"], {"algorithm.loss.aggregation": "sequence_sum", "algorithm.loss.constant": 99}),
        (RECIPE, ["adam_beta2=0.95", "max_grad_norm=0", "optim=adamw_torch"], {"optimizer.betas": (0.9, 0.95), "optimizer.max_grad_norm": None}),
        (RECIPE, ["scale_rewards=false", "top_k=-1", "bf16=true"], {"algorithm.scale": "none", "team.sampling.top_k": 0, "model.dtype": "bfloat16"}),
        (RECIPE, ["report_to=none", "logging_steps=1"], {"trackers": ()}),
        (RECIPE, ["use_vllm=true", "vllm_tensor_parallel_size=2"], {"engine.name": "vllm", "engine.options": {"tensor_parallel_size": 2}}),
        (RECIPE, ["algorithm.adv_estimator=rloo", f"{A}.rollout.n=4"], {"algorithm.name": "rloo", "algorithm.group_size": 4}),
        (RECIPE, ["algorithm.group_size=4", "algorithm.adv_estimator=rloo"], {"algorithm.name": "rloo", "algorithm.group_size": 4}),
        (RECIPE, ["algorithm.adv_estimator=gae", "algorithm.gamma=0.9", "algorithm.lam=0.8"], {"algorithm.name": "ppo", "algorithm.gae.gamma_token": 0.9, "algorithm.gae.lam": 0.8}),
        (f"{REST}algorithm: {{adv_estimator: reinforce_plus_plus, gamma: 0.9}}\n", [], {"algorithm.name": "reinforce_plus_plus", "algorithm.gamma": 0.9}),
        (RECIPE, ["data.train_batch_size=64", f"{A}.actor.ppo_mini_batch_size=16"], {"training.tasks_per_step": 64, "algorithm.minibatches": 4}),
        (RECIPE, [f"{A}.actor.kl_loss_coef=0.1"], {"algorithm.loss.kl_coefficient": 0.0}),
        (RECIPE, [f"{A}.actor.kl_loss_coef=0.1", f"{A}.actor.use_kl_loss=true"], {"algorithm.loss.kl_coefficient": 0.1}),
        (PPO, ["algorithm.use_kl_in_reward=true", "trainer.critic_warmup=10"], {"algorithm.gae.kl_in_reward": 0.001, "training.critic_warmup": 9}),
        (RECIPE, ["trainer.logger=[console, wandb]", "trainer.project_name=mine", "trainer.test_freq=-1"], {"trackers.0.name": "wandb", "trackers.0.project": "mine", "evaluation.every": 0}),
        (f"{RECIPE}{A}: {{actor: {{optim: {{lr: 1e-6}}}}}}\n'{A}.rollout.temperature': 0.5\n", [], {"optimizer.lr": 1e-6, "team.sampling.temperature": 0.5}),
        (RECIPE, ["num_agents=2", "agent_learning_rate=1e-4", "rollout_buffer_size=6"], {"team.agents": 2, "optimizer.lr": 1e-4, "training.tasks_per_step": 6}),
        (RECIPE, ["reference_kl_enabled=true"], {"algorithm.loss.kl_coefficient": 0.1}),
        # Values that change nothing are ignored, whether the run has such a setting or not.
        (RECIPE, ["algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.kl_coef=0.001", "algorithm.gamma=1", "algorithm.lam=1.0"], {"algorithm.name": "grpo"}),
        (DPO, ["beta=0.3", "entropy_coef=0.0", "num_iterations=1", "mask_truncated_completions=false", "delta=null"], {"algorithm.beta": 0.3}),
        (DPO, [f"{A}.actor.use_kl_loss=false", f"{A}.actor.kl_loss_coef=0.001", f"{A}.actor.entropy_coeff=0", "algorithm.norm_adv_by_std_in_grpo=true"], {"algorithm.name": "dpo"}),
        (RECIPE, ["delta=null", "run_name=null", "save_total_limit=null", "trainer.total_training_steps=null"], {"algorithm.loss.dual_clip": None, "checkpoint.keep": 2, "training.steps": 50}),
        (f"{REST}algorithm: {{name: grpo, loss: {{dual_clip: 3}}}}\n", ["delta=null"], {"algorithm.loss.dual_clip": None}),
        (RECIPE, [f"{A}.actor.fsdp_config.param_offload=false", f"{A}.actor.fsdp_config.optimizer_offload=false", "trainer.n_gpus_per_node=8", "trainer.nnodes=2"], {"train_engine.name": "torch"}),
        (RECIPE, [f"{A}.actor.strategy=fsdp2", f"{A}.actor.fsdp_config.param_offload=false", f"{A}.actor.fsdp_config.optimizer_offload=true"], {"train_engine.cpu_offload": True}),
        (RECIPE, ["warmup_ratio=0.1", "num_train_epochs=3"], {"optimizer.warmup_share": 0.1, "optimizer.warmup_steps": 0}),
        (RECIPE, ["warmup_ratio=0.1", "warmup_steps=5", "num_train_epochs=3"], {"optimizer.warmup_share": 0.0, "optimizer.warmup_steps": 5}),
        (RECIPE.replace("arithmetic", "math"), ["data.train_files=/d/train.parquet", "data.val_files=/d/test.parquet"], {"environment.path": "/d", "environment.train": "train.parquet", "environment.test": "test.parquet"}),
        (RECIPE.replace("arithmetic", "math"), ["data.train_files=/d/all.parquet", "data.prompt_key=prompt"], {"environment.path": "/d/all.parquet", "environment.question_field": "prompt"}),
        (RECIPE, ["data.filter_overlong_prompts=true"], {"tasks.max_prompt_tokens": "context"}),
        (RECIPE, ["data.filter_overlong_prompts=false"], {"tasks.max_prompt_tokens": None}),
        (RECIPE, ["data.filter_overlong_prompts=true", "data.max_prompt_length=64"], {"tasks.max_prompt_tokens": 64}),
        (RECIPE, ["tasks.max_prompt_tokens=64", "data.filter_overlong_prompts=true"], {"tasks.max_prompt_tokens": 64}),
        # Both, and they agree; and the later of two sources.
        (f"{RECIPE}learning_rate: 1e-5\noptimizer: {{lr: 0.00001}}\n", [], {"optimizer.lr": 1e-5}),
        (f"{RECIPE}learning_rate: 1e-5\n", ["optimizer.lr=3e-5"], {"optimizer.lr": 3e-5}),
        (f"{RECIPE}num_generations: 16\n", ["algorithm.name=rloo"], {"algorithm.group_size": 16}),
        (f"{RECIPE}stages: [{{name: a, learning_rate: 3e-5}}]\nlearning_rate: 1\n", ["beta=0.5"], {"optimizer.lr": 3e-5, "algorithm.loss.kl_coefficient": 0.5}),
    ],
)  # fmt: skip
def test_units_of_other_libraries_are_converted(
    text: str, settings: list[str], ours: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    stages = load_stages(str(path), (), settings)
    config = stages[0][1].config if stages else read(text, tmp_path, *settings).config
    assert {path: at(config, path) for path in ours} == ours


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["learning_rate=1e-5", "optimizer.lr=1e-4"], "`optimizer.lr` is 1e-4"),
        (["learning_rate=1e-5", f"{A}.actor.optim.lr=1e-4"], "`learning_rate` reads as 1e-5"),
        (["per_device_train_batch_size=6"], "0.75 tasks"),
        (["gradient_accumulation_steps=4"], "training.tasks_per_step"),
        (["per_device_train_batch_size=many"], "write a number"),
        (["per_device_train_batch_size=3", "generation_batch_size=8"], "2.66667 batches"),
        (["per_device_train_batch_size=4", "generation_batch_size=8", "steps_per_generation=2"], "cannot be combined"),
        (["per_device_train_batch_size=4", "gradient_accumulation_steps=8", "steps_per_generation=2", "num_iterations=2"], "Raise `steps_per_generation`"),
        (["per_device_train_batch_size=8", "gradient_accumulation_steps=0"], "at least 1"),
        (["max_steps=7", "num_iterations=2"], "3.5 steps"),
        (["warmup_ratio=3"], "share"),
        (["scale_rewards=batch"], "reinforce_plus_plus"),
        (["loss_type=drgrpo"], "dr_grpo"),
        (["report_to=wandbb"], "Did you mean 'wandb'?"),
        (["load_in_8bit=true"], "4 bits"),
        (["bf16=maybe"], "maybe"),
        (["vllm_tensor_parallel_size=2"], "`engine.name: vllm`"),
        (["label_smoothing=0.1"], "`algorithm.name: grpo` has no `algorithm.label_smoothing`"),
        ([f"{A}.actor.ppo_mini_batch_size=5"], "6.4 parts"),
        ([f"{A}.actor.ppo_mini_batch_size=0"], "at least 1"),
        ([f"{A}.actor.fsdp_config.param_offload=true"], "`train_engine.name: torch` has no `train_engine.cpu_offload`"),
        (["algorithm.use_kl_in_reward=true"], "`algorithm.gae.kl_in_reward`"),
        (["peft_config=3"], "LoRA"),
        (["peft_config={r: 8, use_dora: true}"], "use_dora"),
        (["data.filter_overlong_prompts=64"], "neither true nor false"),
        (["vllm_mode=server"], "engine.server"),
        (["algorithm.name=sac"], "docs/explanations/which_algorithm.md"),
        (["data.val_files=/d/test.parquet"], "evaluation.sets"),
        (["min_p=0.1"], "team.sampling.top_p"),
        ([f"{A}.rollout.temprature=1"], f"Did you mean '{A}.rollout.temperature'?"),
        (["learning_rate=fast"], "`learning_rate` is read as `optimizer.lr`"),
        (["training.learning_rate=1"], "`optimizer.lr=…`"),
        (["algorithm.beta=0.1"], "`algorithm.loss.kl_coefficient=…`"),
        (["batch_size=4"], "training.tasks_per_step"),
        (["learning_rat=1"], "Did you mean 'learning_rate'?"),
        (["trainer=3"], "'trainer'"),
    ],
)  # fmt: skip
def test_a_value_without_a_counterpart_is_an_error_with_the_reason(
    settings: list[str], word: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught, for_command():
        read(RECIPE, tmp_path, *settings)
    assert word in str(caught.value)


def test_cory_passes_settings_to_its_base_algorithm() -> None:
    given = ("num_generations=3", "per_device_train_batch_size=6", "steps_per_generation=2", "beta=0.2", "loss_type=grpo")  # fmt: skip
    config = load_recipe("cory_gsm8k", (), given).config
    base: Any = config.algorithm
    base = base.base
    assert (base.group_size, base.minibatches, base.loss.kl_coefficient) == (3, 2, 0.2)
    assert (base.loss.aggregation, config.training.tasks_per_step) == ("sequence_mean", 4)


def test_names_are_unique_and_differ_from_ours() -> None:
    assert len({alias.name for alias in TABLE}) == len(TABLE)
    assert [alias.name for alias in TABLE if alias.name in RunConfig.model_fields] == []


VERL_GRPO = f"""
algorithm.adv_estimator=grpo
data.train_files=/data/gsm8k/train.parquet
data.val_files=/data/gsm8k/test.parquet
data.train_batch_size=1024
data.max_prompt_length=512
data.max_response_length=1024
data.filter_overlong_prompts=True
data.truncation=error
{A}.model.path=Qwen/Qwen3-8B
{A}.actor.optim.lr=1e-6
{A}.model.use_remove_padding=True
{A}.actor.ppo_mini_batch_size=256
{A}.actor.ppo_micro_batch_size_per_gpu=32
{A}.actor.use_kl_loss=True
{A}.actor.kl_loss_coef=0.001
{A}.actor.kl_loss_type=low_var_kl
{A}.actor.entropy_coeff=0
{A}.model.enable_gradient_checkpointing=True
{A}.actor.fsdp_config.param_offload=False
{A}.actor.fsdp_config.optimizer_offload=False
{A}.rollout.log_prob_micro_batch_size_per_gpu=32
{A}.rollout.tensor_model_parallel_size=2
{A}.rollout.name=vllm
{A}.rollout.gpu_memory_utilization=0.6
{A}.rollout.n=5
{A}.ref.log_prob_micro_batch_size_per_gpu=32
{A}.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False
trainer.critic_warmup=0
trainer.logger=["console","wandb"]
trainer.project_name=verl_grpo_example_gsm8k
trainer.experiment_name=qwen3_8b_function_rm
trainer.n_gpus_per_node=8
trainer.nnodes=1
trainer.save_freq=20
trainer.test_freq=5
trainer.total_epochs=15
""".split()
"""What verl's public example of GRPO on GSM8K sets."""
TRL_GRPO = """run_name=mine learning_rate=5e-6 adam_beta1=0.9 adam_beta2=0.99 weight_decay=0.1 warmup_ratio=0.1 lr_scheduler_type=cosine
logging_steps=1 bf16=true per_device_train_batch_size=8 per_device_eval_batch_size=8 gradient_accumulation_steps=4
gradient_checkpointing=true num_generations=16 max_prompt_length=256 max_completion_length=786 num_train_epochs=1 save_steps=100
save_total_limit=2 max_grad_norm=0.1 report_to=wandb log_on_each_node=false use_vllm=true vllm_mode=colocate
vllm_gpu_memory_utilization=0.3 beta=0.0 epsilon=0.2 num_iterations=1 loss_type=dr_grpo scale_rewards=false temperature=1.0 top_p=1.0
top_k=0 min_p=null repetition_penalty=1.0 mask_truncated_completions=false eval_strategy=steps eval_steps=50 save_strategy=steps
optim=adamw_torch_fused remove_unused_columns=false push_to_hub=false log_completions=true seed=42""".split()  # noqa: SIM905 (read as in a shell)
"""What programs with TRL's `GRPOConfig` usually set."""


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        (VERL_GRPO, {"algorithm.name": "grpo", "algorithm.group_size": 5, "algorithm.minibatches": 4, "algorithm.loss.kl_coefficient": 0.001, "environment.path": "/data/gsm8k", "environment.test": "test.parquet", "training.tasks_per_step": 1024, "training.epochs": 15.0, "engine.options": {"tensor_parallel_size": 2}, "trackers.0.name": "wandb", "name": "qwen3_8b_function_rm"}),
        (TRL_GRPO, {"optimizer.warmup_share": 0.1, "optimizer.schedule": "cosine", "training.tasks_per_step": 2, "training.epochs": 1.0, "evaluation.every": 50, "seed": 42}),
    ],
    ids=["verl", "trl"],
)  # fmt: skip
def test_every_setting_of_a_public_example_is_read_or_ignored_with_a_note(
    settings: list[str], ours: dict[str, Any]
) -> None:
    recipe = load_recipe("gsm8k", (), settings)
    assert {path: at(recipe.config, path) for path in ours} == ours
    for name in (setting.partition("=")[0] for setting in settings):
        notes = recipe.notes[0]
        assert f"{name} is read as " in notes or f"{name} is ignored (" in notes or name == "seed", name


def test_all_faults_of_a_call_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make(environmen=Arithmetic(), workflow={"name": "solo"}, algorithm={"name": "grpo", "epoch": 2}, min_p=0.1)  # fmt: skip
    faults = str(caught.value).split("\n- ")[1:]
    assert len(faults) == 3
    assert any("'environmen'. Did you mean 'environment'?" in fault for fault in faults)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("`peft_config`", ["learning_rate=1e-6"]),
        ("`lora_rank`", [f"{A}.actor.optim.lr=1e-6"]),
        ("", ["learning_rate=1e-6", "lora_r=8"]),
        ("", ["learning_rate=1e-6", "use_peft=false"]),
        ("", ["optimizer.lr=1e-6"]),
    ],
)
def test_a_note_says_that_adapters_train_if_no_setting_decides(
    name: str, settings: list[str], tmp_path: Path
) -> None:
    notes = " ".join(read(RECIPE, tmp_path, *settings).notes)
    assert ("adapters train" in notes) == bool(name)
    assert name in notes


GRPO_FIELDS = ["learning_rate", "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout", "cast_lm_head_to_fp32", "remove_unused_columns", "num_generations", "num_generations_eval", "max_completion_length", "ds3_gather_for_generation", "shuffle_dataset", "pad_to_multiple_of", "generation_batch_size", "steps_per_generation", "temperature", "top_p", "top_k", "min_p", "generation_kwargs", "repetition_penalty", "cache_implementation", "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size", "beta", "num_iterations", "epsilon", "delta", "epsilon_high", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level", "reward_weights", "multi_objective_aggregation", "scale_rewards", "loss_type", "mask_truncated_completions", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target", "max_tool_calling_iterations", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "off_policy_mask_threshold", "use_bias_correction_kl", "log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo", "use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged", "vllm_importance_sampling_cap", "model_name_or_path", "model_revision", "dtype", "attn_implementation", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora", "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"]  # fmt: skip
"""The own fields of TRL's `GRPOConfig` and `ModelConfig` (2026), less those of the chat template."""


def test_every_field_of_trls_configurations_is_known() -> None:
    known = {*(alias.name for alias in TABLE), *ARGUMENTS, *RunConfig.model_fields}
    assert {*GRPO_FIELDS, *(field.name for field in fields(TrainingArguments))} <= known


ENVIRONMENT = """
class Environment:
    def reset(self, *given, **named): ...
    def step(self, *given, **named): ...
"""


def test_files_are_passed_to_the_questions_of_an_environment_in_siirls_form(tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    questions = "questions: {name: math, path: /old}"
    text = RECIPE.replace(
        "{name: arithmetic}",
        f"{{name: siirl_env, env_path: '{tmp_path}/environment.py:Environment', {questions}}}",
    )
    files = ("data.train_files=/d/a.parquet", "data.val_files=/d/b.parquet")
    questions_read = yaml.safe_load(read(text, tmp_path, *files).yaml())["environment"]["questions"]
    assert (questions_read["path"], questions_read["train"], questions_read["test"]) == (
        "/d",
        "a.parquet",
        "b.parquet",
    )
