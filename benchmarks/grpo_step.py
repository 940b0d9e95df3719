"""One whole GRPO step of one agent that trains all weights: sampling, rewards, update.

Peer: TRL 1.16 `GRPOTrainer` on the same weights, prompts and lengths, with transformers' own generation, no KL,
no gradient checkpointing (its default, slower here), one microbatch and one optimiser step per batch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.measure import cpu_seconds, single_thread, summary
from benchmarks.ours import LEARNING_RATE, grpo_trainer, take_step
from benchmarks.subjects import model, question, reward, subject, tokenizer
from kapelle.training.trainer import Trainer

PROMPT, NEW, SAMPLES = 64, 64, 8


def run() -> dict[str, Any]:
    """Return the ratios for each size and compute type."""
    single_thread()
    small = _trl_against([_ours("1M", 16, "float32")], "1M", 16, "float32", rounds=4)
    half = _trl_against([_ours("10M", 4, "bfloat16")], "10M", 4, "bfloat16", rounds=2)
    mixed = _trl_against(
        [_ours("10M", 4, "bfloat16"), _ours("10M", 4, "float32")], "10M", 4, "float32", rounds=2
    )
    return {
        "1M float32, 16 x 8 x 64": small[0],
        "10M bfloat16 on both, 4 x 8 x 64": half[0],
        "10M our bfloat16, their float32": mixed[0],
        "10M float32 on both": mixed[1],
    }


def _ours(size: str, prompts: int, dtype: str) -> Trainer:
    return grpo_trainer(subject(size, dtype), {"sharing": "shared"}, prompts, SAMPLES, NEW, PROMPT)


def _trl_against(
    ours: Sequence[Trainer], size: str, prompts: int, dtype: str, rounds: int
) -> list[dict[str, Any]]:
    """Let TRL train; after each of its steps ours take one. The first round does not count."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    completions, seen = prompts * SAMPLES, []
    times: list[tuple[float, list[float]]] = []

    class Turnwise(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            theirs = time.process_time() - self.started
            mine = [cpu_seconds(partial(take_step, trainer, completions, NEW)) for trainer in ours]
            times.append((theirs, mine))

    def paid(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append([len(ids) for ids in completion_ids])
        return [reward(said[0]["content"]) for said in completions]

    rows = [
        {"prompt": [{"role": "user", "content": question(2 * k, PROMPT)}]}
        for k in range(prompts * (rounds + 1))
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder,
            per_device_train_batch_size=completions,
            num_generations=SAMPLES,
            max_completion_length=NEW,
            max_steps=rounds + 1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=dtype == "bfloat16",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
        )
        peer = GRPOTrainer(
            model(size),
            paid,
            settings,
            Dataset.from_list(rows),
            processing_class=tokenizer(),
            callbacks=[Turnwise()],
        )
        peer.train()
    assert [len(batch) for batch in seen] == [completions] * (rounds + 1), "TRL samples as many completions"
    assert {n for batch in seen for n in batch} == {NEW}, "TRL's completions have full length"
    assert peer.state.global_step == rounds + 1, "TRL takes one optimiser step per batch"
    return [summary([(mine[k], theirs) for theirs, mine in times[1:]]) for k in range(len(ours))]
