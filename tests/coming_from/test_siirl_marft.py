"""Port siiRL's MARFT script with its workflow file: a Reasoner and an Actor, three turns. From af00a77."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.coming_from.test_verl_gsm8k import WANTED, save_rows
from tests.support.ports import Port, chatml
from tests.support.qwen import save_qwen

from kapelle.cli import main

pytestmark = pytest.mark.slow

RECIPE = """
name: marft
team: {agents: [{name: reasoner}, {name: actor}]}
environment: {name: math, question_field: prompt, answer_field: reward_model.ground_truth, extraction: [last_box]}
workflow: {name: chain}
algorithm: {name: marft}
"""
WORKFLOW = """
dag_id: marft
shared: &shared {rollout.n: 1, rollout.tensor_model_parallel_size: 4}
nodes:
  - node_id: rollout_reasoner
    node_type: MODEL_INFERENCE
    node_role: ROLLOUT
    config: *shared
    agent_group: 0
    dependencies: []
    agent_options:
      obs_with_env: true
      process_path: process.py
      pre_process_kwargs: {pre_chat_template: "You are the Reasoner.\\nproblem: ${prompt}\\nreasoner: "}
      post_process_kwargs: {post_chat_template: " reasoner: "}
  - node_id: rollout_actor
    node_type: MODEL_INFERENCE
    node_role: ROLLOUT
    agent_group: 1
    dependencies: [rollout_reasoner]
    agent_options:
      obs_with_env: true
      process_path: process.py
      pre_process_kwargs: {pre_chat_template: "You are the Actor.\\n${prompt}\\nactor: "}
      post_process_kwargs: {post_chat_template: " actor: "}
      env_path: [math_env.py:MathEnv]
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, agent_group: 1, dependencies: [rollout_actor]}
  - {node_id: value_1, node_type: MODEL_TRAIN, node_role: CRITIC, agent_group: 0, dependencies: [reward]}
  - {node_id: value_2, node_type: MODEL_TRAIN, node_role: CRITIC, agent_group: 1, dependencies: [value_1], agent_options: {share_instance: 0}}
  - {node_id: train_1, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 0, dependencies: [value_2], agent_options: {train_cycle: 15}}
  - {node_id: train_2, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 1, dependencies: [train_1], agent_options: {train_cycle: 15}}
"""
PROCESS = """
from string import Template


def pre_process(tokenizer, prompt_id, obs, **kwargs):
    text = Template(kwargs.get("pre_chat_template", "")).substitute(prompt=tokenizer.decode(prompt_id))
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=True, add_generation_prompt=True)


def post_process(tokenizer, prompt_id, response_id, **kwargs):
    return prompt_id + tokenizer.encode(kwargs["post_chat_template"]) + response_id
"""
MATH_ENV = """
class MathEnv:
    def reset(self):
        pass

    async def step(self, actions, ground_truth):
        right = f"\\\\boxed{{{ground_truth}}}" in actions[-1]
        verdict = " This answer is right." if right else " This answer is wrong."
        return [text + verdict for text in actions], float(right), right
"""


def script(rows: Path, model: Path, length: int) -> list[str]:
    """Return the arguments of the script, with smaller sizes."""
    actor, rollout, critic = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"
    return [
        "algorithm.adv_estimator=gae_marft",
        f"data.train_files={rows}/train.parquet",
        f"data.val_files={rows}/test.parquet",
        "data.train_batch_size=2",
        "data.max_prompt_length=1024",
        f"data.max_response_length={length}",
        "data.filter_overlong_prompts=True",
        "data.return_raw_chat=True",
        "data.truncation=error",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.use_fused_kernels=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        f"{actor}.optim.lr=1e-6",
        f"{actor}.ppo_mini_batch_size=1",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{actor}.use_kl_loss=True",
        f"{actor}.grad_clip=0.5",
        f"{actor}.clip_ratio=0.2",
        f"{actor}.kl_loss_coef=0.01",
        f"{actor}.kl_loss_type=low_var_kl",
        f"{actor}.fsdp_config.param_offload=False",
        f"{actor}.fsdp_config.optimizer_offload=False",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.name=sglang",
        f"{rollout}.gpu_memory_utilization=0.3",
        f"{rollout}.max_model_len=12288",
        f"{rollout}.enable_chunked_prefill=False",
        f"{rollout}.enforce_eager=False",
        f"{rollout}.free_cache_engine=False",
        f"{rollout}.agent.rewards_with_env=True",
        f"{rollout}.multi_turn.max_assistant_turns=3",
        f"{rollout}.multi_turn.use_all_traj=False",
        f"{rollout}.n=1",
        f"{rollout}.prompt_length=1024",
        f"{rollout}.response_length={length}",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        f"{critic}.optim.lr=1e-5",
        f"{critic}.model.use_remove_padding=True",
        f"{critic}.model.path={model}",
        f"{critic}.model.enable_gradient_checkpointing=True",
        f"{critic}.use_dynamic_bsz=False",
        f"{critic}.ppo_micro_batch_size_per_gpu=4",
        f"{critic}.ppo_mini_batch_size=1",
        f"{critic}.ppo_max_token_len_per_gpu=12288",
        f"{critic}.model.fsdp_config.param_offload=False",
        f"{critic}.model.fsdp_config.optimizer_offload=False",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "algorithm.use_kl_in_reward=False",
        "trainer.critic_warmup=0",
        "trainer.logger=['console']",
        "trainer.project_name=marft",
        "trainer.experiment_name=qwen3",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=30",
        "trainer.test_freq=10",
        "trainer.total_epochs=1",
        "trainer.resume_mode=auto",
        "trainer.max_actor_ckpt_to_keep=5",
        "trainer.default_local_dir=ckpts",
        "trainer.val_before_train=False",
        "dag.workflow_path=workflow.yaml",
    ]


@pytest.mark.long
def test_run_matches_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows")
    save_qwen(tmp_path / "model", "qwen3")
    files = {"workflow.yaml": WORKFLOW, "process.py": PROCESS, "math_env.py": MATH_ENV, "recipe.yaml": RECIPE}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert (
        main(["train", "recipe.yaml", *script(tmp_path / "rows", tmp_path / "model", 6), "--run-dir", "run"])
        == 0
    )
    port = Port(tmp_path / "run", tmp_path / "model")
    assert port.batches == [(2, 1), (2, 1)]
    episode = port.episodes[0]
    assert [turn.agent for turn in episode.turns] == ["reasoner", "actor"] * 3
    history = episode.task.question
    assert history.endswith(WANTED)
    for turn in episode.turns:
        role = turn.agent
        prompt = (
            f"You are the Reasoner.\nproblem: {history}"
            if role == "reasoner"
            else f"You are the Actor.\n{history}"
        )
        assert port.decoded(turn.prompt_ids) == chatml(("user", f"{prompt}\n{role}: "))
        history += f" {role}: {turn.text}" + ("" if role == "reasoner" else " This answer is wrong.")
    # Each agent has an adapter. Training alternates between them every 15 steps.
    assert port.trained == {"reasoner": "rank 16, alpha 32", "actor": "rank 16, alpha 32"}
    assert port.setting("algorithm.order") == {"name": "alternate", "interval": 15}
    assert [agent["share_critic_with"] for agent in port.setting("team.agents")] == [None, "reasoner"]
    loss, optimizer = port.setting("algorithm.loss"), port.setting("optimizer")
    assert (optimizer["lr"], optimizer["critic_lr"], optimizer["max_grad_norm"]) == (1e-6, 1e-5, 0.5)
    assert (loss["kl_coefficient"], loss["kl_estimator"], loss["clip_low"]) == (0.01, "k3", 0.2)
    assert (port.setting("algorithm.name"), port.setting("algorithm.minibatches")) == ("marft", 2)
    assert (port.setting("algorithm.gae.kl_in_reward"), port.setting("checkpoint.keep")) == (0.0, 5)
    for text, turns, reward in (("It is \\boxed{7}.", 2, 1.0), ("It is \\boxed{8}.", 6, 0.0)):
        played = port.earned({"reasoner": "Add.", "actor": text})
        assert (len(played.turns), sum(turn.reward for turn in played.turns)) == (turns, reward)
