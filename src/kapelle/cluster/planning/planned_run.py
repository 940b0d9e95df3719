"""Everything that a plan counts with: a run's team, lengths and settings as plain numbers, and the widths of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from kapelle.algorithm import CriticSpec
from kapelle.algorithms.signals.embeddings import Embeddings
from kapelle.algorithms.signals.reference import ReferenceLogProbs
from kapelle.cluster.planning.questions import asked_by, episodes_of
from kapelle.cluster.planning.workload import Workload, workload
from kapelle.engines.rollout.vllm import KV_GIB
from kapelle.engines.train.pass_size import CPU_TOKENS
from kapelle.engines.train.settings import Fsdp
from kapelle.environment import AsksModels, QuestionCounts, offers
from kapelle.models.adapters import adapted_layers, base_and_adapter, linear_layers, read_lora
from kapelle.models.embedded import settings_of
from kapelle.models.outline import Outline, adapter_parameters, read_outlines, read_settings
from kapelle.models.renderer import light_renderer
from kapelle.settings.schema import RunConfig
from kapelle.setup.preparation import PreparedRun
from kapelle.team import Agent, Place, Policy, Team

FLAT = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type` that kapelle's own pass reads (`models/fast/flat.py`), if nothing else is set."""

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in four bits, with its share of the scales (2305.14314, section 3)."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's size."""

    parameters: int
    low: int
    """Its rank times its layers in one block."""
    masked: int
    """Features in of these layers, if it has dropout."""
    output: bool
    """Whether one of them is what follows attention."""


NOTHING = Adapter(0, 0, 0, output=False)
OUTPUTS = ("o_proj", "c_proj", "out_proj", "dense")
"""How layers that follow attention are named."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run as far as its memory depends on it."""

    team: Team
    outlines: Mapping[str, Outline]
    """By base, as the two below."""
    shapes: Mapping[str, Shape]
    adapters: Mapping[str, Adapter]
    """By policy or critic."""
    places: Mapping[str, Place]
    """With the device that each base is on."""
    nf4: frozenset[str]
    """Bases whose linear layers are held in four bits."""
    work: Workload
    critic: CriticSpec | None
    references: bool
    embedders: bool
    optimizer: str
    microbatch_tokens: int
    """Most tokens of a pass: as set, or where they are left open those of a CPU."""
    checkpointing: bool
    minibatches: int
    often: bool
    """Whether an update takes several optimiser steps, before which learners are copied."""
    skips: bool
    """Whether a bad step is undone, for which its learner is copied."""
    entropy: bool
    plays: bool
    """Whether the team samples in training."""
    problems: int
    """Tasks of an evaluation; 0 for none."""
    overlap: bool
    engine: str
    max_rows: int
    kept_tokens: int
    kv_gib: float
    """What `engine.kv_gib` gives the KV cache of each base; 0 where it gives no bound. vLLM, which takes what is free, needs some."""
    served: str
    """`engine.server` of vLLM."""
    tf32: bool
    """Whether GPUs compute products of float32 in TF32."""
    left_open: bool
    """Whether the engine chooses the tokens of a pass."""
    chosen_tokens: Mapping[str, int] = field(default_factory=dict)
    """By base: those that it chooses on a GPU of known memory."""
    ranks: int = 1
    """Processes that train together, each with a share of a step's tasks."""
    shared_out: Fsdp | None = None
    """How they share weights out; None where each holds all."""
    judges: Mapping[str, int] = field(default_factory=dict)
    """Device → bytes of the frozen models that the environment asks where episodes are played."""
    asked: Mapping[str, QuestionCounts] = field(default_factory=dict)
    """How often each model that pays episodes is asked, by its path or name."""

    @property
    def own_tasks(self) -> int:
        """Return the most tasks of a step that one process plays and learns from."""
        return -(-self.work.tasks // self.ranks)

    def part(self, count: int) -> int:
        """Return how many of a base's numbers one process keeps."""
        return count if self.shared_out is None else -(-count // self.ranks)

    def offloads(self, base: str) -> bool:
        """Return whether a base's parts, their gradients and their moments leave its device."""
        return self.shared_out is not None and self.shared_out.cpu_offload and not self.cpu(base)

    def pass_tokens(self, base: str) -> int:
        """Return the most tokens of a pass over a base."""
        return self.chosen_tokens.get(base, self.microbatch_tokens)

    def size(self, base: str) -> int:
        """Return the bytes of a base's compute type."""
        return BYTES[self.places[base].dtype]

    def cpu(self, base: str) -> bool:
        """Return whether a base is on a CPU."""
        return self.device(base) == "cpu"

    def device(self, base: str) -> str:
        """Return the device of a base."""
        return self.places[base].device or "cpu"

    def learners(self, base: str) -> list[str]:
        """Return the policies and critics on a base that train."""
        policies = [
            name for name, policy in self.team.policies.items() if policy.trained and policy.base == base
        ]
        return policies + [
            n for n, critic in self.team.critics.items() if critic.trained and critic.base == base
        ]

    def trained_numbers(self, base: str) -> list[int]:
        """Return how many numbers each learner on a base trains on its device in one process."""
        whole = 0 if self.offloads(base) else self.part(self.outlines[base].parameters)
        counts = [
            whole if policy.lora is None else self.adapters[policy.name].parameters
            for policy in self.team.policies.values()
            if policy.trained and policy.endpoint is None and policy.base == base
        ]
        critics = [critic for critic in self.team.critics.values() if critic.trained and critic.base == base]
        heads = self.outlines[base].hidden + 1
        for critic in critics:
            own = self.adapters[critic.name].parameters if critic.lora is not None else 0
            counts.append(heads + (whole if critic.whole else own))
        return counts


def planned_run(prepared: PreparedRun, device: str, ranks: int = 1) -> PlannedRun:
    """Return what one of so many processes of a run that passed all checks plans with; bases without a device of their own are on `device`."""
    config, team, algorithm = prepared.config, prepared.team, prepared.algorithm
    # How text becomes tokens, by path of a base.
    renderers = {
        path: prepared.given[path].renderer if path in prepared.given else light_renderer(path, config.model)
        for path in set(team.bases.values())
    }
    embeddings = algorithm.need(Embeddings)
    nf4 = in_four_bits(config, team)
    shapes = {
        base: shape_of(
            settings_of(config.model.embedded) if path == "embedded" else read_settings(path),
            prepared.outlines[base],
            codes=base in nf4,
        )
        for base, path in team.bases.items()
    }
    engine, evaluation = config.engine.model_dump(), config.evaluation
    evaluates = [evaluation.problems] * evaluation.before_and_after
    evaluates += [evaluation.problems_while_training] * bool(evaluation.every)
    places = {}
    for base, path in team.bases.items():
        place = team.places.get(base, Place(config.model.dtype, config.model.device))
        # kapelle's own small model is on the CPU unless a device is named.
        elsewhere = "cpu" if path == "embedded" else device
        places[base] = place if place.device is not None else Place(place.dtype, elsewhere)
    tokens = config.training.microbatch_tokens
    return PlannedRun(
        team,
        prepared.outlines,
        shapes,
        _adapters(team, prepared.outlines, shapes),
        places,
        nf4,
        workload(config, team, renderers, episodes_of(algorithm)),
        algorithm.critic,
        algorithm.need(ReferenceLogProbs) is not None,
        embeddings is not None and embeddings.reader == "base",
        config.optimizer.name,
        CPU_TOKENS if tokens == "auto" else tokens,
        config.training.gradient_checkpointing,
        algorithm.update.minibatches,
        algorithm.update.order.sequential or algorithm.update.epochs * algorithm.update.minibatches > 1,
        config.training.non_finite == "skip",
        algorithm.update.entropy,
        algorithm.plays,
        max(evaluates, default=0),
        config.training.overlap and algorithm.plays,
        str(engine["name"]),
        int(engine.get("max_rows", 1024)),
        int(engine.get("kept_tokens", 0)),
        float(engine.get("kv_gib") or (KV_GIB if engine["name"] == "vllm" else 0.0)),
        str(engine.get("server", "")),
        config.model.tf32,
        tokens == "auto",
        ranks=ranks,
        shared_out=config.train_engine if ranks > 1 and isinstance(config.train_engine, Fsdp) else None,
        judges=_judges(config, device),
        asked=asked_by(config.environment),
    )


def _judges(config: RunConfig, device: str) -> dict[str, int]:
    """Return device → bytes of the frozen models that an environment asks, each loaded as `setup/frozen_models.py` does."""
    models = config.environment.frozen_models if offers(config.environment, AsksModels) else ()
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
    """Return the bytes of a frozen base in a compute type of so many bytes, or with linear layers in four bits."""
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
        wide = sum(features[path][0] for path in paths)
        found[name] = Adapter(
            adapter_parameters(outlines[base], lora),
            lora.rank * len(paths) // depth,
            wide // depth if lora.dropout else 0,
            any(path.endswith(OUTPUTS) for path in paths),
        )
    return found


def in_four_bits(config: RunConfig, team: Team) -> frozenset[str]:
    """Return the bases whose linear layers are held in four bits."""
    if config.model.quantization is None:
        return frozenset()
    return frozenset(
        base for base, path in team.bases.items() if path != "embedded" and base not in team.trained_bases
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths of a decoder."""

    hidden: int
    """D."""
    inner: int
    """F: features between up and down projection; of the experts that one token visits, together."""
    depth: int
    """Blocks."""
    heads: int
    """H: query heads."""
    key_heads: int
    """J."""
    head_size: int
    """E."""
    vocabulary: int
    """V."""
    context: int
    """Most positions."""
    normed: bool
    """Whether queries and keys are normalised per head."""
    flat: bool
    """Whether kapelle's own pass reads it; else that of `transformers`."""
    tied: bool
    """Whether the output head is the embedding."""
    block: int
    """Parameters of all blocks."""
    head: int
    """Parameters of the output head."""


def shape_of(settings: Mapping[str, Any], outline: Outline, *, codes: bool = False) -> Shape:
    """Return the shape of a model with these settings; `codes` says that its weights are held in four bits.

    Where an architecture has other names for its widths, they are read from the outline.
    """
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
        not codes and reads_flat(settings),
        not any(name == "lm_head.weight" for name in outline.weights),
        blocks,
        vocabulary * hidden,
    )


def reads_flat(settings: Mapping[str, Any]) -> bool:
    """Return whether kapelle's own pass reads a model with these settings; see `models/fast/flat.py`."""
    kind = settings.get("model_type")
    layers = set(settings.get("layer_types") or ["full_attention"])
    return (
        kind in FLAT
        and not settings.get("final_logit_softcapping")
        and settings.get("hidden_act", "silu") == "silu"
        and not settings.get("use_sliding_window", False)
        and layers == {"full_attention"}
        and (kind != "mistral" or settings.get("sliding_window", 4096) is None)
    )


def _first_set(settings: Mapping[str, Any], *names: str) -> Any:
    return next((settings[name] for name in names if settings.get(name) is not None), None)
