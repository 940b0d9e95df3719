"""One whole step of two agents that answer the same prompts: sampling, rewards, update of both.

Peer: CoMLRL 1.4.3 `MAGRPOTrainer`, single turn, aligned joint actions. It holds one model per agent; it samples
agent by agent and prompt by prompt, and runs sequence by sequence in the update. Measured twice, with equal
trained weights on both sides: a LoRA adapter per agent (ours on one base, theirs PEFT models), and all weights
of a model per agent. CoMLRL's loss omits the last token of each completion; ours has all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.measure import compare, single_thread
from benchmarks.ours import LEARNING_RATE, grpo_trainer, take_step
from benchmarks.subjects import FixedTasks, model, question, reward, subject, tokenizer
from benchmarks.trl_peer import lora_settings
from kapelle.algorithms.grpo import GRPO
from kapelle.settings.schema import EvaluationConfig, OptimizerConfig, TrainingConfig
from kapelle.training.trainer import Trainer
from kapelle.workflows.parallel import Parallel

PROMPTS, SAMPLES, NEW, PROMPT, AGENTS = 4, 8, 64, 64, ("first", "second")


def run() -> dict[str, Any]:
    """Return the ratios with adapters and with full weights."""
    single_thread()
    return {
        "1M, an adapter per agent": _compare(adapters=True),
        "1M, a model per agent": _compare(adapters=False),
    }


def _compare(*, adapters: bool) -> dict[str, Any]:
    if adapters:
        trainer = grpo_trainer(
            subject("1M"), {"agents": [{"name": name} for name in AGENTS]}, PROMPTS, SAMPLES, NEW, PROMPT
        )
    else:
        trainer = _own_models(PROMPTS)
    peer = _magrpo(adapters=adapters)

    def ours() -> None:
        take_step(trainer, len(AGENTS) * PROMPTS * SAMPLES, NEW)

    def theirs() -> None:
        counted = _Counted(peer)
        peer.train()
        counted.check()

    return compare(ours, theirs, rounds=2)


def _own_models(prompts: int) -> Trainer:
    from kapelle.training.trainer import Trainer

    return Trainer(
        models={name: subject("1M") for name in AGENTS},
        model={"path": AGENTS[0]},
        team={
            "sampling": {"max_tokens": NEW},
            "agents": [{"name": name, "weights": {"model": name}} for name in AGENTS],
        },
        environment=FixedTasks(prompt_tokens=PROMPT),
        workflow=Parallel(),
        algorithm=GRPO(group_size=SAMPLES),
        optimizer=OptimizerConfig(lr=LEARNING_RATE),
        training=TrainingConfig(steps=1000, tasks_per_step=prompts),
        evaluation=EvaluationConfig(before_and_after=False),
    )


def _magrpo(*, adapters: bool) -> Any:
    import peft
    from comlrl.trainers.reinforce.magrpo import MAGRPOConfig, MAGRPOTrainer
    from datasets import Dataset

    words = tokenizer()
    agents: list[Any] = [model("1M") for _ in AGENTS]
    if adapters:
        agents = [peft.get_peft_model(agent, lora_settings()) for agent in agents]

    def asked(row: dict[str, Any]) -> str:
        prompt = [{"role": "user", "content": row["question"]}]
        return str(words.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))

    return MAGRPOTrainer(
        agents=agents,
        num_agents=len(AGENTS),
        tokenizer=words,
        train_dataset=Dataset.from_list([{"question": question(2 * k, PROMPT)} for k in range(PROMPTS)]),
        reward_func=lambda *said: [sum(reward(text) for text in joint) for joint in zip(*said, strict=True)],
        formatters=[asked] * len(AGENTS),
        args=MAGRPOConfig(
            num_train_epochs=1,
            agent_learning_rate=LEARNING_RATE,
            num_agents=len(AGENTS),
            num_generations=SAMPLES,
            max_new_tokens=NEW,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_turns=1,
            eval_interval=0,
            rollout_buffer_size=PROMPTS,
            train_batch_size=PROMPTS,
            agent_devices="cpu",
        ),
    )


class _Counted:
    """Counts what one `train` call of the peer did, to see that it is the same work."""

    def __init__(self, peer: Any) -> None:
        self._steps = [0] * len(AGENTS)
        self._tokens: list[int] = []
        for number, optimizer in enumerate(peer.optimizers):
            optimizer.register_step_post_hook(lambda *_, n=number: self._stepped(n))
        inner = type(peer)._compute_loss_with_gradients

        def counted(agent: Any, data: Any, returns: Any) -> torch.Tensor:
            said = data["completion_input_ids"][0]
            self._tokens += [len(ids) for ids in said]
            loss: torch.Tensor = inner(peer, agent, data, returns)
            return loss

        peer._compute_loss_with_gradients = counted

    def _stepped(self, number: int) -> None:
        self._steps[number] += 1

    def check(self) -> None:
        """See that it was the work that ours does."""
        assert self._steps == [1] * len(AGENTS), f"one optimiser step per agent, not {self._steps}"
        assert self._tokens == [NEW] * (len(AGENTS) * PROMPTS * SAMPLES), "as many completions of full length"
