"""What a GPU is asked in `gpu.py` and its twin in `gpu_counts.py`: the shapes of two Qwen3 models, and the work on them.

Weights are random and lie in bfloat16, as a model is loaded for a GPU. Every agent has a LoRA adapter of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from benchmarks.subjects import prompt_ids, tokenizer
from kapelle.algorithms.grpo import GRPO
from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.local.step_graphs import GraphRecorder
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.train.protocol import Objective, TrainSetup, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Sample
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import Lora, Policy
from kapelle.types import Sampling, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Recorder = Callable[[torch.device], GraphRecorder | None]

ROWS, PROMPT, TURNS, HEARD, MEDIAN = 64, 128, 4, 32, 32
"""Rows that are sampled together, tokens of a prompt; turns of a conversation, tokens heard and median of those said in each."""
LENGTH = 256
"""Tokens of a sample of the update, half of them a prompt."""


class Shape(NamedTuple):
    """Sizes of a Qwen3 model, from the `config.json` that Qwen publishes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int = 128
    words: int = 151_936


SHAPES: Mapping[str, Shape] = {
    "0.6B": Shape(1024, 3072, 28, 16, 8),
    "4B": Shape(2560, 9728, 36, 32, 8),
    "tiny": Shape(64, 128, 2, 4, 2, 16, 262),
}
"""The last one shows on a CPU that a benchmark runs."""


def drawn(
    shape: Shape, dtype: str, device: str, epsilon: float = 1e-6, context: int = 4096, *, tied: bool = True
) -> PreTrainedModel:
    """Return a model with random weights; its norms divide by the root of a mean square plus `epsilon`."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    words = tokenizer()
    config = Qwen3Config(
        vocab_size=shape.words,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=context,
        rms_norm_eps=epsilon,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.eval()
    return model


def ours(model: PreTrainedModel, dtype: str, agents: int = 0) -> LanguageModel:
    """Return a model as kapelle holds it, with an adapter for each agent."""
    made = LanguageModel(model, tokenizer(), dtype, "random")
    for number, name in enumerate(names(agents)):
        made.bank.add(name, Lora(), number)
    return made


def names(agents: int) -> list[str]:
    """Return the agents' names."""
    return [f"agent_{k}" for k in range(agents)]


def decoding(model: LanguageModel, agents: int, rows: int, new: int, recorder_on: Recorder) -> Decoder:
    """Return a decoder that has read its prompts: each agent has as many rows, and all continue for `new` tokens."""
    decoder = Decoder(model, agents, recorder_on=recorder_on)
    who = names(agents)
    decoder.join(
        [
            Job(who[row * agents // rows], prompt_ids(row, PROMPT), Sampling(max_tokens=new), row)
            for row in range(rows)
        ]
    )
    return decoder


def lengths(rows: int, *, even: bool, median: int = MEDIAN, seed: int = 0) -> list[list[int]]:
    """Return how many tokens each row says in each turn: `median` of them, or lognormal around it (σ = 0.8), at most 6 times as many."""
    draw = random.Random(seed)
    return [
        [
            median if even else min(6 * median, max(1, round(median * draw.lognormvariate(0, 0.8))))
            for _ in range(TURNS)
        ]
        for _ in range(rows)
    ]


def conversations(engine: LocalEngine, policies: Sequence[str], said: Sequence[Sequence[int]]) -> int:
    """Let each row hear 32 tokens and say some in each turn, continuing as soon as it has spoken; return the tokens said."""
    task = Task("benchmark", "")

    async def one(row: int) -> int:
        policy, tokens = policies[row * len(policies) // len(said)], tuple[int, ...]()
        for turn, new in enumerate(said[row]):
            tokens += prompt_ids(1000 * turn + row, HEARD)
            request = Request(policy, policy, (), tokens, Sampling(max_tokens=new), TURNS * row + turn, task)
            answer = await engine.generate(request)
            tokens += answer.ids
        return len(tokens) - TURNS * HEARD

    async def all_rows() -> list[int]:
        return await asyncio.gather(*(one(row) for row in range(len(said))))

    told, asked = sum(asyncio.run(all_rows())), sum(map(sum, said))
    assert 0.9 * asked < told <= asked, "nearly all have full length: the end is one word of 151,936"
    return told


def sampler(model: LanguageModel, agents: int, recorder_on: Recorder) -> LocalEngine:
    """Return a rollout engine for agents whose adapters the model has."""
    policies = [Policy(name, lora=Lora()) for name in names(agents)]
    return LocalEngine({"base": model}, policies, kept_tokens=1 << 17, recorder_on=recorder_on)


def learner(
    model: LanguageModel, agents: int, tokens: int, *, gradient_checkpointing: bool = False
) -> TorchTrainEngine:
    """Return a train engine that gives the model an adapter for each agent; passes hold `tokens` tokens."""
    policies = [Policy(name, lora=Lora()) for name in names(agents)]
    limits = UpdateLimits(microbatch_tokens=tokens, gradient_checkpointing=gradient_checkpointing)
    return TorchTrainEngine(TrainSetup({"base": model}, policies, (), OptimizerConfig(lr=1e-5), limits, 0))


OBJECTIVE = Objective(GRPO().build().policy_loss, parity=False)
"""The loss of GRPO; what sampled the samples is not compared."""


def samples(agents: int, count: int, length: int = LENGTH) -> list[Sample]:
    """Return samples of one length, in turn of each agent."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for number in range(count):
        answered = length - length // 2
        drawn.append(
            Sample(
                names(agents)[number * agents // count],
                prompt_ids(number, length),
                tuple(range(length // 2, length)),
                {
                    "advantage": torch.randn(answered, generator=generator),
                    "behaviour": torch.full((answered,), -11.9),
                },
            )
        )
    return drawn
