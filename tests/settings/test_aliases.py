"""Settings by the names of other libraries: read as ours, converted, or refused with the reason."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

import kapelle
from kapelle.algorithms.grpo import GRPO
from kapelle.cli.parser import split_words
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


def test_a_recipe_may_use_their_names_and_keeps_ours(tmp_path: Path) -> None:
    recipe = read(f"{RECIPE}learning_rate: 2e-5\nnum_generations: 4\nbeta: 0.04\n", tmp_path)
    assert {path: at(recipe.config, path) for path in THREE} == THREE
    (note,) = recipe.notes
    assert note.startswith(
        "learning_rate is read as optimizer.lr, num_generations is read as algorithm.group_size"
    )
    assert recipe.origin["optimizer.lr"].endswith("r.yaml")
    assert "learning_rate" not in to_yaml(recipe.config)


def test_so_may_a_command_line_over_a_recipe(tmp_path: Path) -> None:
    text = f"{REST}algorithm: {{name: grpo, group_size: 16}}\noptimizer: {{lr: 1.0}}\n"
    recipe = read(text, tmp_path, "learning_rate=2e-5", "num_generations=4", "beta=0.04")
    assert {path: at(recipe.config, path) for path in THREE} == THREE
    assert recipe.origin["algorithm.group_size"] == "command line"


def test_so_may_a_call() -> None:
    with pytest.warns(UserWarning, match="num_generations is read as algorithm.group_size"):
        trainer = make(
            environment=Arithmetic(),
            workflow={"name": "solo"},
            algorithm=GRPO(epochs=3),
            learning_rate=2e-5,
            num_generations=4,
            beta=0.04,
        )
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
        # What asks for nothing is left out, whether the run has such a setting or not.
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
        # Both, and they agree; and the later of two sources.
        (f"{RECIPE}learning_rate: 1e-5\noptimizer: {{lr: 0.00001}}\n", [], {"optimizer.lr": 1e-5}),
        (f"{RECIPE}learning_rate: 1e-5\n", ["optimizer.lr=3e-5"], {"optimizer.lr": 3e-5}),
        (f"{RECIPE}num_generations: 16\n", ["algorithm.name=rloo"], {"algorithm.group_size": 16}),
        (f"{RECIPE}stages: [{{name: a, learning_rate: 3e-5}}]\nlearning_rate: 1\n", ["beta=0.5"], {"optimizer.lr": 3e-5, "algorithm.loss.kl_coefficient": 0.5}),
    ],
)  # fmt: skip
def test_their_units_become_ours(
    text: str, settings: list[str], ours: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    stages = load_stages(str(path), (), settings)
    config = stages[0][1].config if stages else read(text, tmp_path, *settings).config
    assert {path: at(config, path) for path in ours} == ours


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["learning_rate=1e-5", "optimizer.lr=1e-4"], "`learning_rate: 1e-5` is read as `optimizer.lr: 1e-5`, and `optimizer.lr` is 1e-4, both, on the command line. Leave one out."),
        (["learning_rate=1e-5", f"{A}.actor.optim.lr=1e-4"], f"`learning_rate: 1e-5` is read as `optimizer.lr: 1e-5`, and `{A}.actor.optim.lr` reads as 1e-4"),
        (["per_device_train_batch_size=6"], "6 completions of a step (6 per device × 1 batches × 1 processes), 8 of each task, are 0.75 tasks"),
        (["gradient_accumulation_steps=4"], "`gradient_accumulation_steps` (TRL, on the command line) cannot be read: alone it says nothing here"),
        (["per_device_train_batch_size=many"], "`per_device_train_batch_size` cannot be 'many': write a number."),
        (["per_device_train_batch_size=3", "generation_batch_size=8"], "8 completions generated at once, 3 in each batch (3 per device × 1 processes), are 2.66667 batches"),
        (["per_device_train_batch_size=4", "generation_batch_size=8", "steps_per_generation=2"], "`generation_batch_size` and `steps_per_generation` say the same; leave one out"),
        (["per_device_train_batch_size=4", "gradient_accumulation_steps=8", "steps_per_generation=2", "num_iterations=2"], "Raise `steps_per_generation` to `gradient_accumulation_steps`"),
        (["per_device_train_batch_size=8", "gradient_accumulation_steps=0"], "`gradient_accumulation_steps` cannot be 0: it is a number of batches from 1"),
        (["max_steps=7", "num_iterations=2"], "7 optimiser steps, 2 in each step, are 3.5 steps"),
        (["warmup_ratio=0.1", "num_train_epochs=3", "optimizer.warmup_steps=5"], "`warmup_steps` and `warmup_share` both say how long the rate rises; leave one out"),
        (["warmup_ratio=3"], "it is a share of all steps, from 0 to below 1"),
        (["scale_rewards=batch"], "For `batch` set `algorithm.name: reinforce_plus_plus`."),
        (["loss_type=luspo"], "`loss_type` (TRL, on the command line) cannot be read: 'luspo' has no counterpart here; of theirs these have: dapo"),
        (["lr_scheduler_type=polynomial"], "of theirs these have: constant, constant_with_warmup, linear, cosine"),
        (["report_to=wandbb"], "'wandbb' is no tracker of kapelle. Did you mean 'wandb'?"),
        (["report_to=[wandb, comet_ml]"], "'comet_ml' is no tracker of kapelle. Known: mlflow, tensorboard, trackio, wandb."),
        (["sync_ref_model=true"], "theirs mixes the policy into the reference"),
        (["load_in_8bit=true"], "frozen weights are held in 4 bits here"),
        (["bf16=maybe"], "'maybe' is neither true nor false"),
        (["vllm_tensor_parallel_size=2"], "it is for vLLM: set `engine.name: vllm` too"),
        (["dataset_name=a/b"], "`environment.name: arithmetic` has no `environment.path`"),
        (["label_smoothing=0.1"], "`algorithm.name: grpo` has no `algorithm.label_smoothing`"),
        (["algorithm.adv_estimator=grp"], "'grp' has no counterpart here; of theirs these have: gae"),
        ([f"{A}.actor.ppo_mini_batch_size=5"], "32 tasks of a step in parts of 5 are 6.4 parts"),
        ([f"{A}.actor.ppo_mini_batch_size=0"], "it is a number of prompts from 1"),
        (["trainer.n_gpus_per_node=0"], "`trainer.n_gpus_per_node` cannot be 0: it is a whole number from 1"),
        ([f"{A}.actor.fsdp_config.param_offload=true"], "it is `train_engine.cpu_offload`, of `fsdp`: set `train_engine.name: fsdp` too"),
        (["algorithm.use_kl_in_reward=true"], "`algorithm.name: grpo` has no `algorithm.gae.kl_in_reward`"),
        (["algorithm.gamma=0.9"], "`algorithm.name: grpo` has no `algorithm.gae.gamma_token`"),
        ([f"{A}.actor.ulysses_sequence_parallel_size=2"], "each text is computed in one process"),
        (["discount=0.9", "algorithm.name=magrpo"], "rewards of later turns count in full there. Leave it out, or take `algorithm.name: mappo`"),
        (["presence_penalty=0.5"], "nothing is sampled with a penalty here"),
        (["save_strategy=best"], "Set `checkpoint.best`"),
        (["model_revision=v2"], "`model.path` may be the folder of another revision"),
        (["peft_config={peft_type: IA3}"], "adapters here are LoRA"),
        (["peft_config=3"], "adapters here are LoRA"),
        (["peft_config={r: 8, use_dora: true}"], "adapters here are LoRA, without `use_dora`"),
        (["data.train_files=[a.parquet, b.parquet]", "algorithm.adv_estimator=grpo"], "several files are several environments"),
        (["algorithm.name=sac"], "docs/explanations/which_algorithm.md"),
        (["loss_type=drgrpo"], "sapo, dr_grpo"),
        (["vllm_server_base_url=http://127.0.0.1:8000"], "`engine.name: local` has no `engine.server`"),
        (["vllm_mode=server"], "For a server set `engine.server` too"),
        (["algorithm.name=ddpg"], "docs/explanations/which_algorithm.md"),
        (["algorithm.name=gspo"], "Set `algorithm.name: grpo` and `algorithm.loss.level: sequence`"),
        (["algorithm.name=DAPO"], "`algorithm.loss.clip_high: 0.28`"),
        (["algorithm=maremax"], "Set `algorithm.name: remax`"),
        (["reward_model.enable=true"], "name its checkpoint, `reward_model.path`"),
        (["reward_model.reward_manager=dapo"], "reward functions are `environment.rewards`"),
        (["custom_reward_function.path=r.py"], "reward functions are `environment.rewards`"),
        (["data.val_files=/d/test.parquet"], "`environment.name: arithmetic` has no `environment.eval_path`. Put both files in one folder, or add this one to `evaluation.sets`."),
        (["min_p=0.1"], "`team.sampling.top_p` and `team.sampling.top_k` cut what is sampled from"),
        (["push_to_hub=true"], "`kapelle export RUN --push OWNER/NAME` sends"),
        ([f"{A}.actor.optim.learning_rate=1"], f"No setting is called '{A}.actor.optim.learning_rate', on the command line"),
        ([f"{A}.rollout.temprature=1"], f"Did you mean '{A}.rollout.temperature'?"),
        (["learning_rate=fast"], "'optimizer.lr' cannot be 'fast' (set on the command line): write a number. (`learning_rate` is read as `optimizer.lr`.)"),
        (["learning_rate=-1"], "'optimizer.lr' cannot be -1"),
        (["training.max_steps=1"], "Write `training.steps=…`."),
        (["team.lora.lora_alpha=1"], "Write `team.lora.alpha=…`."),
        (["model.name=x"], "Write `model.path=…`."),
        (["training.learning_rate=1"], "Unknown key 'training.learning_rate' (set on the command line). Write `optimizer.lr=…`."),
        (["reward_weights=[1,2]"], "`reward_weights` (TRL, on the command line) cannot be read: `environment.rewards` lists them"),
        (["batch_size=4"], "Unknown key 'batch_size' (set on the command line). A step takes `training.tasks_per_step` tasks, each tried `algorithm.group_size` times."),
        (["algorithm=grpoo"], "Unknown algorithm 'grpoo'. Did you mean 'grpo'?"),
        (["workflow=xyzzy"], "Unknown workflow 'xyzzy'."),
        (["learning_rat=1"], "Did you mean 'learning_rate'?"),
        (["algorithm.beta=0.1"], "Write `algorithm.loss.kl_coefficient=…`."),
        (["trackers.0.name=wandb"], "write a list with a `name` in each entry, `trackers: [{name: …"),
        (["trainer=3"], "No setting is called 'trainer'"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_here_is_refused_with_the_reason(
    settings: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught, for_command():
        read(RECIPE, tmp_path, *settings)
    assert said in str(caught.value)


def test_of_cory_they_are_said_of_what_it_plays_with() -> None:
    asked = (
        "num_generations=3",
        "per_device_train_batch_size=6",
        "steps_per_generation=2",
        "beta=0.2",
        "loss_type=grpo",
    )
    config = load_recipe("cory_gsm8k", (), asked).config
    base = "algorithm.base"
    found = {
        path: at(config, path)
        for path in (
            f"{base}.group_size",
            f"{base}.minibatches",
            f"{base}.loss.kl_coefficient",
            f"{base}.loss.aggregation",
            "training.tasks_per_step",
        )
    }
    assert list(found.values()) == [3, 2, 0.2, "sequence_mean", 4]


def test_no_name_of_theirs_hides_one_of_ours() -> None:
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


def test_what_verls_own_example_sets_is_read_or_left_out_with_a_sentence() -> None:
    recipe = load_recipe("gsm8k", (), VERL_GRPO)
    read = recipe.notes[0]
    for setting in VERL_GRPO:
        name = setting.partition("=")[0]
        assert f"{name} is read as " in read or f"{name} is left out (" in read, name
    ours = {
        "algorithm.name": "grpo",
        "algorithm.group_size": 5,
        "algorithm.minibatches": 4,
        "algorithm.loss.kl_coefficient": 0.001,
        "environment.path": "/data/gsm8k",
        "environment.test": "test.parquet",
        "training.tasks_per_step": 1024,
        "training.epochs": 15.0,
        "engine.options": {"tensor_parallel_size": 2},
        "trackers.0.name": "wandb",
        "name": "qwen3_8b_function_rm",
    }
    assert {path: at(recipe.config, path) for path in ours} == ours
    assert "n_gpus_per_node is left out (processes are started by `--launch torchrun --processes N`)" in read


TRL_GRPO = """run_name=mine learning_rate=5e-6 adam_beta1=0.9 adam_beta2=0.99 weight_decay=0.1 warmup_ratio=0.1 lr_scheduler_type=cosine
logging_steps=1 bf16=true per_device_train_batch_size=8 per_device_eval_batch_size=8 gradient_accumulation_steps=4
gradient_checkpointing=true num_generations=16 max_prompt_length=256 max_completion_length=786 num_train_epochs=1 save_steps=100
save_total_limit=2 max_grad_norm=0.1 report_to=wandb log_on_each_node=false use_vllm=true vllm_mode=colocate
vllm_gpu_memory_utilization=0.3 beta=0.0 epsilon=0.2 num_iterations=1 loss_type=dr_grpo scale_rewards=false temperature=1.0 top_p=1.0
top_k=0 min_p=null repetition_penalty=1.0 mask_truncated_completions=false eval_strategy=steps eval_steps=50 save_strategy=steps
optim=adamw_torch_fused remove_unused_columns=false push_to_hub=false log_completions=true seed=42""".split()  # noqa: SIM905 (read as in a shell)
"""What programs with TRL's `GRPOConfig` usually set."""


def test_what_a_grpo_config_usually_sets_is_read_or_left_out_with_a_sentence() -> None:
    recipe = load_recipe("gsm8k", (), TRL_GRPO)
    read = recipe.notes[0]
    for setting in TRL_GRPO:
        name = setting.partition("=")[0]
        assert f"{name} is read as " in read or f"{name} is left out (" in read or name == "seed", name
    ours = {
        "optimizer.warmup_share": 0.1,
        "optimizer.schedule": "cosine",
        "training.tasks_per_step": 2,
        "training.epochs": 1.0,
        "evaluation.every": 50,
        "seed": 42,
    }
    assert {path: at(recipe.config, path) for path in ours} == ours


@pytest.mark.parametrize(
    ("given", "most"),
    [
        (("data.filter_overlong_prompts=true",), "context"),
        (("data.filter_overlong_prompts=false",), None),
        (("data.filter_overlong_prompts=true", "data.max_prompt_length=64"), 64),
        (("data.max_prompt_length=64", "data.filter_overlong_prompts=true"), 64),
        (("tasks.max_prompt_tokens=64", "data.filter_overlong_prompts=true"), 64),
    ],
)
def test_verls_filter_is_what_fits_the_model_or_the_number_beside_it(
    given: tuple[str, ...], most: int | str | None, tmp_path: Path
) -> None:
    assert at(read(RECIPE, tmp_path, *given).config, "tasks.max_prompt_tokens") == most


def test_verls_filter_is_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither true nor false"):
        read(RECIPE, tmp_path, "data.filter_overlong_prompts=64")


SIIRL = f"""
algorithm.adv_estimator=gae_marft
data.train_files=/data/train.parquet
data.val_files=/data/test.parquet
data.train_batch_size=128
data.max_prompt_length=1024
data.max_response_length=2048
data.filter_overlong_prompts=True
data.return_raw_chat=True
data.truncation='error'
data.shuffle=False
{A}.model.path=Qwen/Qwen3-1.7B
{A}.actor.optim.lr=1e-6
{A}.model.use_remove_padding=True
{A}.model.use_fused_kernels=False
{A}.actor.ppo_mini_batch_size=64
{A}.actor.use_kl_loss=True
{A}.actor.grad_clip=0.5
{A}.actor.clip_ratio=0.2
{A}.actor.kl_loss_coef=0.01
{A}.rollout.tensor_model_parallel_size=4
{A}.rollout.name=sglang
{A}.rollout.max_model_len=12288
{A}.rollout.agent.rewards_with_env=True
{A}.rollout.multi_turn.max_assistant_turns=3
{A}.rollout.multi_turn.use_all_traj=False
{A}.rollout.n=1
{A}.rollout.prompt_length=1024
{A}.rollout.response_length=2048
critic.optim.lr=1e-5
critic.model.use_remove_padding=True
critic.model.path=Qwen/Qwen3-1.7B
critic.model.enable_gradient_checkpointing=True
critic.use_dynamic_bsz=False
critic.ppo_mini_batch_size=64
critic.ppo_max_token_len_per_gpu=12288
critic.model.fsdp_config.param_offload=False
trainer.resume_mode=auto
trainer.default_local_dir=checkpoints
trainer.val_before_train=False
+ray_kwargs.ray_init.num_cpus=8
""".split()
"""What siiRL's public script for MARFT sets."""
DAG = """
nodes:
- {node_id: r, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent_group: 0, dependencies: []}
- {node_id: a, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent_group: 1, dependencies: [r]}
"""


def test_what_siirls_script_sets_is_laid_over_the_recipe_of_marft(tmp_path: Path) -> None:
    (tmp_path / "dag.yaml").write_text(DAG)
    words = split_words(["marft_math_duo", *SIIRL])
    alone = load_recipe(words[0][0], (), words[1]).config
    found = load_recipe("marft_math_duo", (), [*words[1], f"dag.workflow_path={tmp_path}/dag.yaml"]).config
    ours = {
        "algorithm.name": "marft",
        "algorithm.minibatches": 2,
        "optimizer.lr": 1e-6,
        "optimizer.critic_lr": 1e-5,
        "environment.test": "test.parquet",
        "engine.name": "local",
        "evaluation.before_and_after": False,
    }
    for config in (alone, found):
        assert {path: at(config, path) for path in ours} == ours
    assert alone.workflow.name == "chain"
    assert {
        path: at(found, f"workflow.{path}") for path in ("name", "max_assistant_turns", "use_all_traj")
    } == {
        "name": "dag",
        "max_assistant_turns": 3,
        "use_all_traj": False,
    }


OPEN_R1 = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
model_revision: v2
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: rows/of-mine
dataset_prompt_column: problem
num_processes: 7
bf16: true
use_vllm: true
vllm_device: auto
do_eval: true
eval_strategy: steps
gradient_accumulation_steps: 16
hub_model_id: mine
hub_strategy: every_save
log_level: info
lr_scheduler_type: cosine
max_prompt_length: 512
max_steps: -1
num_generations: 7
num_train_epochs: 1
output_dir: data/mine
overwrite_output_dir: true
per_device_train_batch_size: 16
push_to_hub: true
reward_funcs: [accuracy]
save_strategy: "epoch"
warmup_ratio: 0.1
benchmark: x
optimizer: {lrr: 1}
team: {sampling: {max_tokens: many}}
trackers: [{nam: wandb}]
"""


def test_all_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught, for_command():
        read(OPEN_R1, tmp_path)
    first, *faults = str(caught.value).split("\n- ")
    assert first == "8 settings cannot be used:"
    named = "model_revision push_to_hub reward_funcs benchmark environment.name optimizer.lrr trackers.0.nam"
    for name in [*named.split(), "team.sampling.max_tokens"]:
        assert [fault for fault in faults if f"`{name}`" in fault or f"'{name}'" in fault], name


def test_so_it_is_in_python() -> None:
    with pytest.raises(ConfigError) as caught:
        make(
            environmen=Arithmetic(),
            workflow={"name": "solo"},
            algorithm={"name": "grpo", "epoch": 2},
            min_p=0.1,
        )
    faults = str(caught.value).split("\n- ")[1:]
    assert len(faults) == 3
    assert "`Trainer` has no keyword 'environmen'. Did you mean 'environment'?" in faults
    with pytest.raises(ConfigError, match="3 settings") as caught:
        kapelle.train(
            "embedded",
            [{"question": "1", "answer": "1"}],
            str,
            foo=1,
            push_to_hub=True,
            run_dir=None,
            optimizer={"lrr": 1},
        )
    assert "`optimizer={'lrr': …}`" in str(caught.value) or "'optimizer.lrr'" in str(caught.value)


PORTS = (
    ("adapters train, as nothing says what does (without `peft_config`", ["learning_rate=1e-6"]),
    ("adapters train, as nothing says what does (without `lora_rank`", [f"{A}.actor.optim.lr=1e-6"]),
    ("", ["learning_rate=1e-6", "lora_r=8"]),
    ("", ["learning_rate=1e-6", "use_peft=false"]),
    ("", ["optimizer.lr=1e-6"]),
)


@pytest.mark.parametrize(("said", "settings"), PORTS)
def test_a_port_is_told_that_adapters_train_where_all_weights_did(
    said: str, settings: list[str], tmp_path: Path
) -> None:
    notes = " ".join(read(RECIPE, tmp_path, *settings).notes)
    assert said in notes if said else "adapters train" not in notes


GRPO_FIELDS = ["learning_rate", "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout", "cast_lm_head_to_fp32", "remove_unused_columns", "num_generations", "num_generations_eval", "max_completion_length", "ds3_gather_for_generation", "shuffle_dataset", "pad_to_multiple_of", "generation_batch_size", "steps_per_generation", "temperature", "top_p", "top_k", "min_p", "generation_kwargs", "repetition_penalty", "cache_implementation", "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size", "beta", "num_iterations", "epsilon", "delta", "epsilon_high", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level", "reward_weights", "multi_objective_aggregation", "scale_rewards", "loss_type", "mask_truncated_completions", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target", "max_tool_calling_iterations", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "off_policy_mask_threshold", "use_bias_correction_kl", "log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo", "use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged", "vllm_importance_sampling_cap", "model_name_or_path", "model_revision", "dtype", "attn_implementation", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora", "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"]  # fmt: skip
"""The own fields of TRL's `GRPOConfig` and `ModelConfig` (2026), less those of the chat template."""


def test_every_field_of_trl_s_configurations_is_read_left_out_or_refused_with_a_reason() -> None:
    known = {*(alias.name for alias in TABLE), *ARGUMENTS, *RunConfig.model_fields}
    theirs = {*GRPO_FIELDS, *(field.name for field in fields(TrainingArguments))}
    assert theirs <= known


WORLD = """
class World:
    def reset(self, *given, **named): ...
    def step(self, *given, **named): ...
"""


def test_files_for_an_environment_in_siirls_form_are_those_of_its_questions(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    questions = "questions: {name: math, path: /old}"
    text = RECIPE.replace(
        "{name: arithmetic}", f"{{name: siirl_env, env_path: '{tmp_path}/world.py:World', {questions}}}"
    )
    files = ("data.train_files=/d/a.parquet", "data.val_files=/d/b.parquet")
    asked = yaml.safe_load(read(text, tmp_path, *files).yaml())["environment"]["questions"]
    assert (asked["path"], asked["train"], asked["test"]) == ("/d", "a.parquet", "b.parquet")
