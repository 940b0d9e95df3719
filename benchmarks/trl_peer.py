"""TRL's `GRPOTrainer` as a peer, at its best setting we know.

transformers' own generation, no KL, no gradient checkpointing (its default, slower here), one microbatch and one optimiser step
per batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.ours import LEARNING_RATE
from benchmarks.subjects import question, reward, tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def train_trl(
    model: PreTrainedModel,
    dtype: str,
    prompts: int,
    samples: int,
    new: int,
    prompt_tokens: int,
    steps: int,
    on_begin: Callable[[], None],
    on_end: Callable[[], None],
    lora: Any = None,
    words: Any = None,
    *,
    vllm: bool = False,
) -> None:
    """Take `steps` steps, with a call before and after each, and check that each did the required work.

    `words` is the tokeniser; by default that of `subjects`. With `vllm`, vLLM samples on the same GPU.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    completions = prompts * samples
    seen: list[list[int]] = []

    class Turnwise(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            on_begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            on_end()

    def paid(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append([len(ids) for ids in completion_ids])
        return [reward(said[0]["content"]) for said in completions]

    questions = [question(2 * k, prompt_tokens) for k in range(prompts * steps)]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder,
            per_device_train_batch_size=completions,
            num_generations=samples,
            max_completion_length=new,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=dtype == "bfloat16",
            use_cpu=model.device.type == "cpu",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            use_vllm=vllm,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
        )
        if vllm:  # it loads the model from its folder
            saved = Path(folder) / "model"
            model.save_pretrained(saved)
            (words or tokenizer()).save_pretrained(saved)
            loaded = type(model).from_pretrained(saved, dtype=model.dtype)
            torch.nn.Module.to(loaded, model.device)
            model = loaded
        peer = GRPOTrainer(
            model,
            paid,
            settings,
            Dataset.from_list([{"prompt": [{"role": "user", "content": asked}]} for asked in questions]),
            processing_class=words or tokenizer(),
            callbacks=[Turnwise()],
            peft_config=lora,
        )
        peer.train()
    assert [len(batch) for batch in seen] == [completions] * steps, "TRL samples as many completions"
    assert {n for batch in seen for n in batch} == {new}, "TRL's completions have full length"
    assert peer.state.global_step == steps, "TRL takes one optimiser step per batch"


def lora_settings() -> Any:
    """Return PEFT's settings of our default adapter."""
    import peft

    from kapelle.team import Lora

    lora = Lora()
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=round(lora.alpha),
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
