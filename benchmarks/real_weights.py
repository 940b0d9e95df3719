"""One GRPO step of one agent on real weights: Gemma 3 270M (base) in float32, an adapter of rank 8, 8 x 8 answers of 12 tokens.

Peer: TRL 1.16 `GRPOTrainer` with PEFT on the same weights, prompts, lengths and adapter. Each runs in a process of its own, one
step in turn. `python examples/real/prepare.py` fetches the model. The type is float32, because some processors have no
instructions for bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import single_thread
from benchmarks.real_shape import Work, against_trl, forget_peak
from benchmarks.subjects import NEVER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = Path("build/real/gemma-3-270m-q4_k_m.gguf")


def run() -> dict[str, Any]:
    """Return how many times as fast ours is, and its share of the peer's memory."""
    work = Work(gemma, gemmas_words, agents=1, prompts=8, samples=8, new=12, prompt=32)
    return {"float32": against_trl("float32", work)}


def gemma(dtype: str) -> PreTrainedModel:
    """Return the model with its weights in a type."""
    import torch
    from transformers import AutoModelForCausalLM

    from kapelle.models.pretrained import converted

    single_thread()
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(converted(FILE), dtype=getattr(torch, dtype))
    made.config.eos_token_id = made.generation_config.eos_token_id = gemmas_words().eos_token_id
    forget_peak()
    return made


def gemmas_words() -> Any:
    """Return its tokeniser with an end token that the model cannot sample, so that all completions have full length."""
    from transformers import AutoTokenizer

    from kapelle.models.chat_template import PLAIN_TEMPLATE
    from kapelle.models.pretrained import converted

    words: Any = AutoTokenizer.from_pretrained(converted(FILE))
    words.add_special_tokens({"eos_token": NEVER})
    words.chat_template = PLAIN_TEMPLATE
    return words
