"""Settings by the names of other libraries: read as ours, converted, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kapelle
from kapelle.algorithms.grpo import GRPO
from kapelle.environments.arithmetic import Arithmetic
from kapelle.errors import ConfigError, for_command
from kapelle.settings.aliases import TABLE
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
        (["per_device_train_batch_size=8", "generation_batch_size=8"], "`per_device_train_batch_size` says the same; leave one out"),
        (["per_device_train_batch_size=8", "gradient_accumulation_steps=0"], "`gradient_accumulation_steps` cannot be 0: it is a number of batches from 1"),
        (["max_steps=7", "num_iterations=2"], "7 optimiser steps, 2 in each step, are 3.5 steps"),
        (["warmup_ratio=0.1", "num_train_epochs=3"], "how many `training.epochs` makes is known when the data is read. Set `optimizer.warmup_steps`"),
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
        (["trainer.n_gpus_per_node=8"], "Processes are started by `--launch torchrun --processes N`"),
        ([f"{A}.actor.optim.learning_rate=1"], f"No setting is called '{A}.actor.optim.learning_rate', on the command line"),
        ([f"{A}.rollout.temprature=1"], f"Did you mean '{A}.rollout.temperature'?"),
        (["learning_rate=fast"], "'optimizer.lr' cannot be 'fast' (set on the command line): write a number. (`learning_rate` is read as `optimizer.lr`.)"),
        (["learning_rate=-1"], "'optimizer.lr' cannot be -1"),
        (["training.learning_rate=1"], "Unknown key 'training.learning_rate' (set on the command line). Write `optimizer.lr=…`."),
        (["learning_rat=1"], "Did you mean 'learning_rate'?"),
        (["algorithm.beta=0.1"], "Did you mean 'algorithm.loss.kl_coefficient'?"),
        (["trackers.0.name=wandb"], "write `trackers=[{name: wandb}]`"),
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
