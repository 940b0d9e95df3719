"""A team small enough that its training takes milliseconds: what tests of several modules build on.

The embedded model is made sharper than it starts, so that a wrong adapter, position or mask changes
log-probs by far more than any tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kapelle.engines.train.protocol import TrainEngine, TrainSetup, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.engines.train.torch.learner import Learner
from kapelle.models.language_model import LanguageModel, load_language_model
from kapelle.rows import Sample
from kapelle.settings.schema import EmbeddedConfig, ModelConfig, OptimizerConfig
from kapelle.team import Agent, Critic, Lora, Policy, Team
from kapelle.types import Sampling

SIZE: dict[str, int] = {
    "hidden": 16,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 32,
    "context": 256,
}
"""Of the embedded model, as its settings."""

LORA = Lora(rank=2, alpha=4.0)


def tiny_model(seed: int = 0, dtype: str = "float32", size: float = 0.3, **shape: int) -> LanguageModel:
    """Return an embedded model whose weights are drawn with standard deviation `size`; `shape` replaces values of `SIZE`."""
    config = ModelConfig.model_validate({"embedded": {**SIZE, **shape, "seed": seed}, "dtype": dtype})
    assert isinstance(config.embedded, EmbeddedConfig)
    model = load_language_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.base_parameters().values():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def stir(weights: Mapping[str, Tensor], seed: int, size: float = 0.3) -> None:
    """Draw an adapter's weights again, so that it no longer stands at its start, where it changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in weights.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * size)


def with_adapters(*names: str, dtype: str = "float32") -> LanguageModel:
    """Return a tiny base with an adapter of each name, none of which is what it began as."""
    model = tiny_model(dtype=dtype)
    for seed, name in enumerate(names):
        model.bank.add(name, LORA, seed)
        stir(model.bank.parameters(name), seed)
    return model


def train_engine(
    policies: Sequence[Policy],
    critics: Sequence[Critic] = (),
    *,
    models: Mapping[str, LanguageModel] | None = None,
    stirred: bool = True,
    references: bool = False,
    limits: UpdateLimits | None = None,
    seed: int = 0,
    **optimizer: Any,
) -> TorchTrainEngine:
    """Return a train engine on a tiny base; adapters are stirred by their names unless told otherwise."""
    engine = TorchTrainEngine(
        TrainSetup(
            models or {"base": tiny_model()},
            policies,
            critics,
            OptimizerConfig(**{"lr": 1e-2, **optimizer}),
            limits or UpdateLimits(),
            seed,
            references=references,
        )
    )
    if stirred:
        for policy in policies:
            if policy.lora is not None:
                stir(engine.weights(policy.name), sum(policy.name.encode()))
    return engine


def learners_of(engine: TrainEngine) -> Mapping[str, Learner]:
    """Return what the engine `torch` trains, by name."""
    assert isinstance(engine, TorchTrainEngine)
    return engine.learners


def model_of(engine: TorchTrainEngine, name: str) -> LanguageModel:
    """Return the model that a learner stands on."""
    return engine.model_of(name)


def lora_policies(*names: str, lora: Lora = LORA) -> list[Policy]:
    """Return one policy with an adapter of its own for each name."""
    return [Policy(name, lora=lora) for name in names]


def draw_samples(
    learners: Sequence[str], lengths: Sequence[tuple[int, int]], seed: int = 0, temperature: float = 1.0
) -> list[Sample]:
    """Return, for each learner, one random sequence per (prompt, completion) length, with advantages."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for learner in learners:
        for prompt, completion in lengths:
            tokens = torch.randint(6, 262, (prompt + completion,), generator=generator).tolist()
            advantage_T = torch.randn(completion, generator=generator)
            places = tuple(range(prompt, prompt + completion))
            samples.append(
                Sample(learner, tuple(tokens), places, {"advantage": advantage_T}, temperature=temperature)
            )
    return samples


def related_samples(learners: Sequence[str], seed: int = 0, temperature: float = 1.0) -> list[Sample]:
    """Return, for each learner, samples that share tokens as the turns of a group do.

    Five answers to one prompt, two of them the same and one of them a single token, a second turn that
    continues from the first answer, and answers to three prompts that begin with the same 18 tokens.
    """
    generator = torch.Generator().manual_seed(1000 + seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(6, 262, (count,), generator=generator).tolist())

    samples = []
    for learner in learners:
        prompt, first = tokens(6), tokens(4)
        answers = [first, tokens(3), first, tokens(1), tokens(7)]
        later = (*prompt, *first, *tokens(3))
        system = tokens(18)
        alike = [((*system, *tokens(k)), tokens(3)) for k in range(1, 4)]
        for opening, answer in [*((prompt, answer) for answer in answers), (later, tokens(4)), *alike]:
            places = tuple(range(len(opening), len(opening) + len(answer)))
            columns = {"advantage": torch.randn(len(answer), generator=generator)}
            samples.append(Sample(learner, opening + answer, places, columns, temperature=temperature))
    return samples


def with_columns(samples: Sequence[Sample], **columns: Sequence[Tensor]) -> list[Sample]:
    """Return the samples with further columns, one tensor per sample and name."""
    return [
        replace(s, columns={**s.columns, **{name: values[k] for name, values in columns.items()}})
        for k, s in enumerate(samples)
    ]


def with_behaviour(engine: TrainEngine, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples as if the engine's weights of this moment had sampled them."""
    return with_columns(samples, behaviour=engine.score(samples))


def frozen_copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights as they are now."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def same_bits(one: object, other: object) -> bool:
    """Return whether two trees of tensors and plain values are equal, bitwise."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and one == other


def first_gradient(engine: TorchTrainEngine, name: str, beta: float = 0.9) -> dict[str, Tensor]:
    """Return the gradient of a learner's first step, read off its first moment: m = (1 − β₁)·g."""
    entries = engine.learners[name].state()["optimizer"]
    return {key: entry["exp_avg"] / (1 - beta) for key, entry in entries.items()}


def team_of(*agents: str, critics: Mapping[str, str] | None = None) -> Team:
    """Return agents with a policy of their own name; `critics` maps agents to critics."""
    of = dict(critics or {})
    return Team(
        tuple(Agent(name, sampling=Sampling(max_tokens=8)) for name in agents),
        {name: Policy(name, lora=LORA) for name in agents},
        {name: name for name in agents},
        critics={name: Critic(name) for name in of.values()},
        critic_of=of,
    )


def sections(**over: Any) -> dict[str, Any]:
    """Return the sections of a tiny run, two agents in a debate; what is given replaces a whole section.

    The environment pays for noise, so that untrained models have something to learn from.
    """
    return {
        "environment": {"name": "tests.support.plugins:Digest"},
        "workflow": {"name": "debate"},
        "algorithm": {"name": "grpo", "group_size": 3},
        "team": {"agents": 2, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 4}},
        "model": {"embedded": SIZE},
        "training": {"steps": 3, "tasks_per_step": 2},
        "evaluation": {"problems": 4, "before_and_after": False},
        "optimizer": {"lr": 1e-2},
        **over,
    }
