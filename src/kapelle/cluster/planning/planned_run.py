"""Collect the quantities of a memory plan: a run's team, lengths and settings as numbers, and the dimensions of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from kapelle.algorithm import Algorithm
from kapelle.algorithms.signals.embeddings import Embeddings
from kapelle.algorithms.signals.reference import ReferenceLogProbs
from kapelle.cluster.planning.questions import episodes_of, requested_by
from kapelle.cluster.planning.workload import Workload, workload
from kapelle.engines.rollout.vllm import KV_GIB
from kapelle.engines.train.pass_size import CPU_TOKENS
from kapelle.engines.train.settings import Fsdp
from kapelle.environment import QuestionCounts, UsesModels, offers
from kapelle.models.adapters import adapted_layers, base_and_adapter, linear_layers, read_lora
from kapelle.models.embedded import settings_of
from kapelle.models.fast.families import family_of
from kapelle.models.outline import Outline, adapter_parameters, read_outlines, read_settings
from kapelle.models.renderer import light_renderer
from kapelle.settings.schema import RunConfig
from kapelle.setup.preparation import PreparedRun
from kapelle.team import Agent, Place, Policy, Team

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Number of bytes of a four-bit weight, including its share of the scales (arXiv:2305.14314, section 3)."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Adapter:
    """The size of a low-rank adapter."""

    parameters: int
    low: int
    """Rank of the adapter times the number of adapted layers in one block."""
    output: bool
    """Whether the output projection of attention has an adapter."""


NOTHING = Adapter(0, 0, output=False)
OUTPUTS = ("o_proj", "c_proj", "out_proj", "dense")
"""Names of the output projection of attention in different architectures."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run, with all quantities that determine its memory."""

    config: RunConfig
    algorithm: Algorithm
    team: Team
    outlines: Mapping[str, Outline]
    """Mapping from each base model to its outline."""
    shapes: Mapping[str, Shape]
    """Mapping from each base model to its dimensions."""
    adapters: Mapping[str, Adapter]
    """Mapping from each policy or critic to the size of its adapter."""
    places: Mapping[str, Place]
    """Mapping from each base model to its compute type and device."""
    nf4: frozenset[str]
    """Base models whose linear layers are stored in four bits."""
    work: Workload
    optimizer: str
    microbatch_tokens: int
    """Maximum number of tokens of a pass: the value of the setting, or for `auto` the default on a CPU."""
    checkpointing: bool
    max_rows: int
    kept_tokens: int
    left_open: bool
    """Whether the engine chooses the number of tokens of a pass (`training.microbatch_tokens: auto`)."""
    chosen_tokens: Mapping[str, int] = field(default_factory=dict)
    """Mapping from each base model to the number of tokens of a pass that the engine chooses on a GPU with known memory."""
    ranks: int = 1
    """Number of processes that train together, each with a share of the tasks of a step."""
    judges: Mapping[str, int] = field(default_factory=dict)
    """Mapping from each device to the number of bytes of the environment's frozen judges in the process that rolls out episodes."""
    asked: Mapping[str, QuestionCounts] = field(default_factory=dict)
    """Mapping from the path or name of each judge to the number of queries to it."""

    @property
    def references(self) -> bool:
        """Whether the algorithm needs reference log-probs."""
        return self.algorithm.need(ReferenceLogProbs) is not None

    @property
    def embedders(self) -> bool:
        """Whether the algorithm reads embeddings that a copy of the base model computes."""
        embeddings = self.algorithm.need(Embeddings)
        return embeddings is not None and embeddings.reader == "base"

    @property
    def often(self) -> bool:
        """Whether an update consists of several optimiser steps, before which learners are copied."""
        update = self.algorithm.update
        return update.order.sequential or update.epochs * update.minibatches > 1

    @property
    def problems(self) -> int:
        """Maximum number of tasks in an evaluation, or 0 if there are no evaluations."""
        evaluation = self.config.evaluation
        return max(
            evaluation.problems * evaluation.before_and_after,
            evaluation.problems_while_training * bool(evaluation.every),
        )

    @property
    def asynchronous(self) -> bool:
        """Whether a second process samples during the update."""
        return self.config.training.asynchronous and self.algorithm.collects_episodes

    @property
    def engine(self) -> str:
        """Name of the rollout engine."""
        return str(self.config.engine.model_dump()["name"])

    @property
    def kv_gib(self) -> float:
        """Maximum size of the KV cache of each base model in GiB, or 0 for no limit. With vLLM, there is always a limit."""
        given = self.config.engine.model_dump().get("kv_gib")
        return float(given or (KV_GIB if self.engine == "vllm" else 0.0))

    @property
    def served(self) -> str:
        """Value of the setting `engine.server` of vLLM."""
        return str(self.config.engine.model_dump().get("server", ""))

    @property
    def own_tasks(self) -> int:
        """Maximum number of tasks of a step that one process handles."""
        return -(-self.work.tasks // self.ranks)

    @property
    def shares_weights(self) -> bool:
        """Whether several processes share the weights (`fsdp`)."""
        return self.ranks > 1 and isinstance(self.config.train_engine, Fsdp)

    def part(self, count: int) -> int:
        """Return how many of `count` parameters of a base model one process stores during an update."""
        return -(-count // self.ranks) if self.shares_weights else count

    def pass_tokens(self, base: str) -> int:
        """Return the maximum number of tokens of a pass over a base model."""
        return self.chosen_tokens.get(base, self.microbatch_tokens)

    def size(self, base: str) -> int:
        """Return the number of bytes per number in the compute type of a base model."""
        return BYTES[self.places[base].dtype]

    def cpu(self, base: str) -> bool:
        """Return whether a base model is on a CPU."""
        return self.device(base) == "cpu"

    def device(self, base: str) -> str:
        """Return the device of a base model."""
        return self.places[base].device or "cpu"

    def learners(self, base: str) -> list[str]:
        """Return the trained policies and critics that use a base model."""
        policies = [
            name for name, policy in self.team.policies.items() if policy.trained and policy.base == base
        ]
        return policies + [
            n for n, critic in self.team.critics.items() if critic.trained and critic.base == base
        ]

    def trained_numbers(self, base: str) -> list[int]:
        """Return the number of parameters that each learner on a base model trains in one process."""
        whole = self.part(self.outlines[base].parameters)
        counts = [
            whole if policy.lora is None else self.adapters[policy.name].parameters
            for policy in self.team.policies.values()
            if policy.trained and policy.endpoint is None and policy.base == base
        ]
        heads = self.outlines[base].hidden + 1
        for critic in self.team.critics.values():
            if not critic.trained or critic.base != base:
                continue
            own = self.adapters[critic.name].parameters if critic.lora is not None else 0
            counts.append(heads + (whole if critic.whole else own))
        return counts


def planned_run(prepared: PreparedRun, device: str, ranks: int = 1) -> PlannedRun:
    """Return the quantities of a plan for one of `ranks` processes of a checked run.

    Base models without a specified device are on `device`.
    """
    config, team, algorithm = prepared.config, prepared.team, prepared.algorithm
    renderers = {
        path: prepared.given[path].renderer if path in prepared.given else light_renderer(path, config.model)
        for path in set(team.bases.values())
    }
    nf4 = in_four_bits(config, team)
    shapes, places = {}, {}
    for base, path in team.bases.items():
        settings = settings_of(config.model.embedded) if path == "embedded" else read_settings(path)
        shapes[base] = shape_of(settings, prepared.outlines[base], codes=base in nf4)
        place = team.places.get(base, Place(config.model.dtype, config.model.device))
        # kapelle's small embedded model is on the CPU unless a device is set.
        default = "cpu" if path == "embedded" else device
        places[base] = place if place.device is not None else Place(place.dtype, default)
    engine, tokens = config.engine.model_dump(), config.training.microbatch_tokens
    return PlannedRun(
        config,
        algorithm,
        team,
        prepared.outlines,
        shapes,
        _adapters(team, prepared.outlines, shapes),
        places,
        nf4,
        workload(config, team, renderers, episodes_of(algorithm)),
        config.optimizer.name,
        CPU_TOKENS if tokens == "auto" else tokens,
        config.training.gradient_checkpointing,
        int(engine.get("max_rows", 1024)),
        int(engine.get("kept_tokens", 0)),
        tokens == "auto",
        ranks=ranks,
        judges=_judges(config, device),
        asked=requested_by(config.environment),
    )


def _judges(config: RunConfig, device: str) -> dict[str, int]:
    """Return a mapping from each device to the bytes of the environment's judges, as `setup/frozen_models.py` loads them."""
    models = config.environment.frozen_models if offers(config.environment, UsesModels) else ()
    found: dict[str, int] = {}
    for place in dict.fromkeys(model.path for model in models):
        path, adapter = base_and_adapter(place)
        lora = None if adapter is None else read_lora(Path(adapter))
        team = Team.alone(
            Agent("judge"), Policy("judge", lora=lora, trained=False, past=adapter), {"base": path}
        )
        outline = read_outlines(team, config.model)["base"]
        where = config.model.device or ("cpu" if path == "embedded" else device)
        own = base_bytes(outline, BYTES[config.model.dtype], nf4="base" in in_four_bits(config, team))
        found[where] = found.get(where, 0) + own + (4 * adapter_parameters(outline, lora) if lora else 0)
    return found


def base_bytes(outline: Outline, size: int, *, nf4: bool) -> int:
    """Return the number of bytes of a frozen base model in a compute type of `size` bytes, or with linear layers in four bits."""
    if not nf4:
        return size * outline.parameters
    layers = outline.layers
    codes = {f"{path}.weight" for path in layers.linear if path != layers.head}
    total = 0.0
    for name, shape in outline.weights.items():
        total += prod(shape) * (NF4 if name in codes else size)
    return int(total)


def _adapters(team: Team, outlines: Mapping[str, Outline], shapes: Mapping[str, Shape]) -> dict[str, Adapter]:
    loras = {name: (policy.base, policy.lora) for name, policy in team.every.items()}
    loras |= {name: (critic.base, critic.lora) for name, critic in team.critics.items()}
    found = {}
    for name, (base, lora) in loras.items():
        if lora is None:
            continue
        layers, depth = outlines[base].layers, shapes[base].depth
        features = linear_layers(layers)
        paths = [path for path in adapted_layers(layers, lora.targets) if path in features]
        found[name] = Adapter(
            adapter_parameters(outlines[base], lora),
            lora.rank * len(paths) // depth,
            any(path.endswith(OUTPUTS) for path in paths),
        )
    return found


def in_four_bits(config: RunConfig, team: Team) -> frozenset[str]:
    """Return the base models whose linear layers are stored in four bits."""
    if config.model.quantization is None:
        return frozenset()
    return frozenset(
        base for base, path in team.bases.items() if path != "embedded" and base not in team.trained_bases
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a decoder-only transformer."""

    hidden: int
    """Size of the hidden states, D."""
    inner: int
    """Number of features between up and down projection, F, summed over the experts of one token."""
    depth: int
    """Number of transformer blocks."""
    heads: int
    """Number of query heads, H."""
    key_heads: int
    """Number of key-value heads, J."""
    head_size: int
    """Size of an attention head, E."""
    vocabulary: int
    """Size of the vocabulary, V."""
    context: int
    """Maximum number of positions."""
    normed: bool
    """Whether queries and keys are normalised in each head."""
    flat: bool
    """Whether kapelle's own forward pass is used instead of that of `transformers`."""
    tied: bool
    """Whether the output head shares its weights with the embedding."""
    block: int
    """Number of parameters of all blocks."""
    head: int
    """Number of parameters of the output head."""


def shape_of(settings: Mapping[str, Any], outline: Outline, *, codes: bool = False) -> Shape:
    """Return the dimensions of a model with these settings. With `codes`, the weights of the model are stored in four bits."""
    hidden = outline.hidden
    heads = int(_first_set(settings, "num_attention_heads", "n_head", "num_heads") or 1)
    vocabulary = int(settings.get("vocab_size") or max(shape[0] for shape in outline.weights.values()))
    blocks = sum(
        prod(shape)
        for name, shape in outline.weights.items()
        if any(part.isdigit() for part in name.split("."))
    )
    head_size = int(settings.get("head_dim") or hidden // heads)
    inner = int(_first_set(settings, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden)
    if visited := int(_first_set(settings, "num_experts_per_tok", "num_experts_per_token") or 0):
        shared = int(settings.get("shared_expert_intermediate_size") or 0)
        inner = visited * int(settings.get("moe_intermediate_size") or inner) + shared
    return Shape(
        hidden,
        inner,
        int(_first_set(settings, "num_hidden_layers", "n_layer", "num_layers") or 1),
        heads,
        int(
            _first_set(settings, "num_key_value_heads", "n_head", "num_heads", "num_attention_heads") or heads
        ),
        head_size,
        vocabulary,
        int(_first_set(settings, "max_position_embeddings", "n_positions", "max_seq_len") or 2048),
        any(name.endswith("q_norm.weight") for name in outline.weights),
        not codes and family_of(settings) is not None,
        not any(name == "lm_head.weight" for name in outline.weights),
        blocks,
        vocabulary * hidden,
    )


def _first_set(settings: Mapping[str, Any], *names: str) -> Any:
    return next((settings[name] for name in names if settings.get(name) is not None), None)
