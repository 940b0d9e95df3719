"""Adapters before they hold weights: which layers of a model they go on, and what the folder of one says and holds.

They go on `all-linear`, or on the layers that a user names. `all-linear` takes every linear layer of the decoder's blocks, fused ones (`qkv_proj`, `c_attn`) and GPT-2's `Conv1D`
included. It leaves out, by what they are and not by a list of models:

- the output head, embeddings, and what stands beside the blocks, such as a vision tower and its projector;
- routers of a mixture of experts, and gates with a single output: adapters would move which expert is chosen;
- experts, whose weights `transformers` keeps as one tensor for all of a block. The target `experts` adds them, each
  expert with a pair of factors of its own (PEFT's `target_parameters`);
- in a model with experts, other layers that are named like the parts of one (a shared expert's `down_proj`): PEFT would
  take these names for the experts when it loads the adapter;
- of a state-space mixer (Mamba) everything but `in_proj`: its scan may read the other weights past their layers, and
  PEFT refuses `out_proj`.

A name reaches what `all-linear` leaves out where an adapter there computes the right thing.

The folders are PEFT's; no tensor is read. An adapter must be the plain LoRA that kapelle computes. Some fifty fields of its
settings define how its tensors are used. A few are read, a few do not change the computation, and every other one must have the
value that disables it. A field with another value is refused by name, also one that later versions of PEFT add.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kapelle.errors import ModelError, did_you_mean
from kapelle.team import ALL_LINEAR, Lora

ROUTERS = frozenset({"router", "gate", "shared_expert_gate"})
"""Names of the layers that choose or weigh experts, or of what holds them."""

EXPERTS = "experts"
"""What the module that holds a block's experts is called; as a target, the weights in it."""

EXPERT_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"})
"""Names that the parts of an expert have or once had."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The modules of a model, as if it had no adapters: what the choice reads of it."""

    model: str
    """Name of its class, for errors."""
    modules: frozenset[str]
    """Paths of all modules."""
    linear: Mapping[str, tuple[int, int]]
    """Path → features in and out of every linear layer, in the model's order."""
    head: str | None
    """Path of the output head."""
    mixers: frozenset[str] = frozenset()
    """Paths of state-space mixers, which have tensors A and D of their own."""
    eyes: frozenset[str] = frozenset()
    """Paths of what stands beside the decoder of a model that sees: its vision tower and projector."""
    experts: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Path → experts, features in and out of every weight that all experts of a block share one tensor for."""
    counted: frozenset[str] = frozenset()
    """Paths of modules of experts that say how many they are, so that the choices of their routers are known."""
    transposed: frozenset[str] = frozenset()
    """Paths of linear layers whose weights have features in first: GPT-2's `Conv1D`."""

    @property
    def mixtures(self) -> list[str]:
        """Paths of all modules of experts, in order."""
        return sorted(path for path in self.modules if path.rpartition(".")[2] == EXPERTS)

    @property
    def routers(self) -> list[str]:
        """Paths of what weighs these experts."""
        blocks = [path.rpartition(".")[0] for path in self.mixtures]
        return [
            place
            for block in blocks
            for each in ("router", "gate")
            if (place := f"{block}.{each}") in self.modules
        ]


def check_routing(layers: Layers) -> None:
    """Raise ModelError unless the choices of all of a model's routers can be recorded and taken again."""
    if not layers.mixtures or not layers.counted.issuperset(layers.mixtures):
        raise ModelError(
            f"`model.routing: replayed` needs a mixture whose routers are known, and {layers.model} "
            f"{'chooses experts in a way of its own' if layers.mixtures else 'has no experts'}. Set `model.routing: free`."
        )


def linear_layers(layers: Layers) -> dict[str, tuple[int, int]]:
    """Return the features in and out of the layers that can have an adapter, by path."""
    return {
        path: features
        for path, features in layers.linear.items()
        if path != layers.head and _refusal(layers, path) is None
    }


def adapted_layers(layers: Layers, targets: Sequence[str]) -> list[str]:
    """Return the paths of the layers that targets name, in the model's order; weights of experts stand behind them.

    Raises ModelError when a target names none, or one that cannot have an adapter.
    """
    fit = linear_layers(layers)
    chosen: set[str] = set()
    if ALL_LINEAR in targets:
        parts_of_experts = EXPERT_PARTS if any(_ends(path, EXPERTS) for path in layers.modules) else ()
        chosen.update(
            path
            for path, (_, features_out) in fit.items()
            if any(part.isdigit() for part in path.split("."))  # the number of its block
            and ROUTERS.isdisjoint(path.split("."))
            and path.rpartition(".")[2] not in parts_of_experts
            and features_out > 1
            and (path.rpartition(".")[0] not in layers.mixers or path.endswith(".in_proj"))
        )
        if not chosen:
            raise ModelError(f"`{ALL_LINEAR}` finds no linear layer in the blocks of {layers.model}.")
    for target in targets:
        found = [path for path in fit if _ends(path, target)]
        if of_experts(target):
            found += [
                path
                for path in layers.experts
                if _ends(path, target) or _ends(path.rpartition(".")[0], target)
            ]
        if target != ALL_LINEAR and not found:
            raise ModelError(_no_such_layer(layers, target, fit))
        chosen.update(found)
    return [path for path in (*fit, *layers.experts) if path in chosen]


def of_experts(target: str) -> bool:
    """Return whether a target names weights of experts: `experts`, `experts.down_proj`, or a whole path of one."""
    return EXPERTS in target.split(".")


def adapter_shapes(layers: Layers, lora: Lora) -> dict[str, tuple[int, int]]:
    """Return the shape of every tensor of an adapter under PEFT's names.

    Of experts PEFT keeps the factors of all of them side by side: A `[rank · experts, in]` and B `[out, rank · experts]`, in
    which the rank is the slow axis. Raises ModelError as `adapted_layers`, and for dropout on experts, which PEFT refuses.
    """
    paths = adapted_layers(layers, lora.targets)
    if lora.dropout and any(path in layers.experts for path in paths):
        raise ModelError(
            f"`lora.dropout` is {lora.dropout:g} and `lora.targets` names experts, on which PEFT takes no dropout. Set `lora.dropout: 0`, "
            f"or leave '{EXPERTS}' out of `lora.targets`."
        )
    shapes: dict[str, tuple[int, int]] = {}
    for path, place in peft_places(paths, layers.experts).items():
        count, features_in, features_out = layers.experts.get(path) or (1, *layers.linear[path])
        shapes[f"{place}.lora_A.weight"] = (lora.rank * count, features_in)
        shapes[f"{place}.lora_B.weight"] = (features_out, lora.rank * count)
    return shapes


def peft_places(paths: Sequence[str], experts: Collection[str]) -> dict[str, str]:
    """Return under which name PEFT keeps the factors of each path.

    It wraps a module once for each of its weights in `experts`, so that the last one is outside and the ones before it are inside.
    """
    places = {path: f"base_model.model.{path}" for path in paths}
    within: dict[str, list[str]] = {}
    for path in paths:
        if path in experts:
            within.setdefault(path.rpartition(".")[0], []).append(path)
    for module, own in within.items():
        for depth, path in enumerate(reversed(own)):
            places[path] = f"base_model.model.{module}{'.base_layer' * depth}"
    return places


def named(layers: Layers, lora: Lora) -> Lora:
    """Return the settings with the shortest names of the layers that their targets stand for on a model.

    So two settings are equal where their adapters go on the same layers. Raises ModelError as `adapted_layers`.
    """
    paths = adapted_layers(layers, lora.targets)
    # The shortest ends of paths that no other module's path has: what PEFT takes as `target_modules` or, of experts, as
    # `target_parameters`.
    known = layers.modules | layers.experts.keys()
    taken = {end for path in known.difference(paths) for end in _ends_of(path)}
    shortest = {
        next(end for end in _ends_of(path) if end not in taken and (path in layers.linear or of_experts(end)))
        for path in paths
    }
    return replace(
        lora,
        targets=tuple(sorted(shortest)),
        fan_in_fan_out=not layers.transposed.isdisjoint(paths),
    )


def _ends_of(path: str) -> Iterator[str]:
    """Yield the ends of a path that begin with a word, shortest first."""
    parts = path.split(".")
    return (".".join(parts[first:]) for first in reversed(range(len(parts))) if not parts[first].isdigit())


def _ends(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _refusal(layers: Layers, path: str) -> str | None:
    """Return why a linear layer can have no adapter; None where it can."""
    if of_experts(path):
        return "its expert reads only the tokens that a router chose"
    if any(path.startswith(f"{each}.") for each in layers.eyes):
        return "it belongs to how the model sees, which is frozen"
    if path.endswith(".dt_proj") and path.rpartition(".")[0] in layers.mixers:
        return "the state-space scan reads its weight without calling the layer"
    return None


def _no_such_layer(layers: Layers, target: str, fit: Mapping[str, tuple[int, int]]) -> str:
    known = sorted({path.rpartition(".")[2] for path in fit})
    listed = f" Known: {', '.join([*known, EXPERTS] if layers.experts else known)}."
    way_out = f"{listed} `{ALL_LINEAR}` takes all that are fit for it."
    if of_experts(target) and not layers.experts:
        there = any(_ends(path, EXPERTS) for path in layers.modules)
        why = (
            "computes its experts in a way of its own, which takes no adapters" if there else "has no experts"
        )
        return f"`lora.targets` names '{target}', and {layers.model} {why}.{way_out}"
    for path in layers.linear:
        if _ends(path, target):
            why = (
                _refusal(layers, path)
                or "it is the output head, which reads chosen tokens and not whole rows"
            )
            return f"`lora.targets` names '{target}', which can have no adapter: {why}.{way_out}"
    hint = did_you_mean(target, known)
    return (
        f"`lora.targets` names '{target}', no linear layer of this model below its output head."
        f"{'' if hint == listed else hint}{way_out}"
    )


# -------- Folders of PEFT adapters

ADAPTER = "adapter_model.safetensors"
"""The file in which PEFT keeps an adapter's tensors."""

TAKEN = frozenset({"r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "use_rslora"})
"""Fields that become `team.Lora`; `use_rslora` divides alpha by √r (2312.03732) where LoRA divides by r."""

HARMLESS = {
    "auto_mapping": "names the base's class for PEFT's own loader",
    "base_model_name_or_path": "a name; folders move, so kapelle compares the weights themselves (`kapelle.json`)",
    "revision": "a name, as the one before",
    "peft_version": "the version that wrote the folder",
    "inference_mode": "whether PEFT lets the tensors learn",
    "fan_in_fan_out": "which way round a base's weight lies; PEFT, as kapelle, goes by the kind of the layer",
}
"""Fields that never change the computation, and why."""

LEFT_OUT: tuple[object, ...] = (None, False, {}, [])
"""Values of a field that is not used."""

PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),  # others put another head on the base
    # How A and B were initialised no longer matters once they are trained. All other ways (pissa, olora, corda, loftq, …)
    # also change the base, which PEFT repeats at every load.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
    "bias": ("none", None),
    # The name of a module that is used with `megatron_config` alone.
    "megatron_core": ("megatron.core", None),
    "qalora_group_size": (16, None),
    **dict.fromkeys(
        (
            "alora_invocation_tokens",
            "alpha_pattern",
            "arrow_config",
            "corda_config",
            "ensure_weight_tying",
            "eva_config",
            "exclude_modules",
            "kasa_config",
            "layer_replication",
            "layers_pattern",
            "layers_to_transform",
            "loftq_config",
            "lora_bias",
            "lora_ga_config",
            "megatron_config",
            "modules_to_save",
            "monteclora_config",
            "rank_pattern",
            "runtime_config",
            "trainable_token_indices",
            "use_bdlora",
            "use_dora",
            "use_qalora",
            "velora_config",
        ),
        LEFT_OUT,
    ),
}
"""Values that disable a field, for every other field of `peft.LoraConfig`."""


def _is_plain(key: str, value: object) -> bool:
    if key in TAKEN or key in HARMLESS:
        return True
    known, default = (False, None) if key in PLAIN else _default_in_peft(key)
    plain = (default,) if known else PLAIN.get(key, LEFT_OUT)
    return any(value == each and type(value) is type(each) for each in plain)


def _default_in_peft(key: str) -> tuple[bool, object]:
    """Return whether the installed PEFT knows a field that is not in this table, and its default."""
    try:
        from peft import LoraConfig
    except ImportError:
        return False, None
    for known in fields(LoraConfig):
        if known.name == key and known.default is not MISSING:
            return True, known.default
        if known.name == key and known.default_factory is not MISSING:
            return True, known.default_factory()
    return False, None


def base_and_adapter(path: str) -> tuple[str, str | None]:
    """Return the path of a base model, and the folder of the PEFT adapter that `path` is; None where it is a model.

    The base is what the adapter's `adapter_config.json` names, beside the adapter or elsewhere. Raises ModelError for an adapter
    whose base is unknown.
    """
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return path, None
    try:
        named = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Name a folder that PEFT saved.") from error
    if not isinstance(named, str) or not named:
        raise ModelError(f"{file} names no base model (`base_model_name_or_path`). Add model.path=BASE.")
    beside = file.parent / named
    return str(beside) if beside.is_dir() else named, path


def read_lora(folder: Path) -> Lora:
    """Read the size of a PEFT LoRA folder's adapter without its weights; ModelError as `read_adapter`.

    It names every field that is not plain LoRA.
    """
    try:
        settings: Mapping[str, Any] = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        kind, targets = settings["peft_type"], settings["target_modules"]
        parameters = settings.get("target_parameters") or []
        odd = [f"{key}: {value!r}" for key, value in settings.items() if not _is_plain(key, value)]
        if kind == "LORA" and not isinstance(targets, list):
            odd.append(f"target_modules: {targets!r}, no list of names")
        # Other tensors than those of experts would be adapted there, such as a router.
        if not isinstance(parameters, list) or not all(map(of_experts, parameters)):
            odd.append(f"target_parameters: {parameters!r}, other names than those of experts")
        if odd:
            raise ModelError(
                f"Adapter '{folder}' is not plain LoRA, which is all that kapelle computes: {'; '.join(odd)[:400]}. Merge it "
                "into its base with peft (`PeftModel.from_pretrained(base, FOLDER).merge_and_unload()`), save that with "
                "`save_pretrained` and name it as `model.path`, or train a plain LoRA."
            )
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        if settings.get("use_rslora"):
            alpha *= math.sqrt(rank)
        return Lora(rank, alpha, (*targets, *parameters), float(settings.get("lora_dropout", 0.0)))
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(
            f"'{folder}' is no PEFT adapter folder: adapter_config.json cannot be read ({error.strerror}). Name a "
            "run (RUN, RUN@best, RUN@STEP), or a folder that one has saved, such as RUN/checkpoints/STEP/policies/NAME."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"'{folder}' is no PEFT adapter folder: {error!r}.") from error


def shapes_of(folder: Path, files: str = "*.safetensors") -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in some safetensors files of a folder, without reading the tensors.

    Raises ModelError when there are none, or when they cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(folder.glob(files)):
            with safe_open(file, "np") as tensors:
                found |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"The weights in '{folder}' cannot be read: {error}.") from error
    if not found:
        raise ModelError(
            f"'{folder}' holds no weights ({files}). Save it again as safetensors: kapelle loads nothing else."
        )
    return found
