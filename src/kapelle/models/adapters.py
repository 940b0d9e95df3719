"""Select the layers that get adapters, and read the settings of PEFT's adapter folders. This module reads no tensors.

The setting `lora.targets` is `all-linear` or a list of layer names. The value `all-linear` selects every linear layer
of the decoder's blocks, including fused layers (`qkv_proj`, `c_attn`) and GPT-2's `Conv1D`. The value `all-linear`
leaves out some layers:

- The output head, embeddings and modules outside the blocks (such as a vision tower and its projector) are excluded.
- Routers of a mixture of experts and gates with a single output are excluded, because adapters would change which
  expert is chosen.
- Experts are excluded, because `transformers` keeps their weights as one tensor per block. The target `experts` adds them,
  with one pair of factors per expert (PEFT's `target_parameters`).
- In a model with experts, other layers that are named like a part of an expert (such as a shared expert's `down_proj`) are
  excluded, because PEFT would mistake these names for the experts when it loads the adapter.
- In a state-space mixer (Mamba), every layer except `in_proj` is excluded, because the scan of the mixer may read the other
  weights without calling their layers, and because PEFT rejects `out_proj`.

A user can list an excluded layer by name if an adapter at this layer computes the correct result.

An adapter folder must contain plain LoRA. About fifty fields of its settings define how its tensors are used. kapelle
reads a few of these fields, a few others do not change the computation, and every other field must have a value that
disables it. A field with any other value raises an error that names the field. Fields that later versions of PEFT add
also raise this error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kapelle.errors import ModelError, did_you_mean
from kapelle.team import ALL_LINEAR, Lora

ROUTERS = frozenset({"router", "gate", "shared_expert_gate"})
"""The names of the layers that choose or weight experts, and of the modules that contain such layers."""

EXPERTS = "experts"
"""The name of the module that contains the experts of a block. As a target, the name selects the weights in this
module."""

EXPERT_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"})
"""The names of the parts of an expert, in all versions of `transformers`."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The modules of a model without its adapters."""

    model: str
    """The name of the model's class, for error messages."""
    modules: frozenset[str]
    """The paths of all modules."""
    linear: Mapping[str, tuple[int, int]]
    """Mapping from the path of every linear layer to its numbers of input and output features, in the model's order."""
    head: str | None
    """The path of the output head."""
    mixers: frozenset[str] = frozenset()
    """The paths of state-space mixers, which have their own tensors A and D."""
    eyes: frozenset[str] = frozenset()
    """The paths of the vision tower and projector of a vision-language model."""
    experts: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Mapping from the path of every weight that a block's experts keep in one tensor to the number of experts and the
    numbers of input and output features of an expert."""
    counted: frozenset[str] = frozenset()
    """The paths of modules of experts that state their number (`num_experts`), so that their routers' choices can be
    recorded."""
    transposed: frozenset[str] = frozenset()
    """The paths of linear layers whose weights have the shape (features in, features out), such as GPT-2's `Conv1D`."""

    @property
    def mixtures(self) -> list[str]:
        """The paths of all modules of experts, in sorted order."""
        return sorted(path for path in self.modules if path.rpartition(".")[2] == EXPERTS)

    @property
    def routers(self) -> list[str]:
        """The paths of the routers that belong to the modules of experts."""
        blocks = [path.rpartition(".")[0] for path in self.mixtures]
        found = [f"{block}.{name}" for block in blocks for name in ("router", "gate")]
        return [path for path in found if path in self.modules]


def check_routing(layers: Layers) -> None:
    """Raise ModelError unless the choices of all routers of a model can be recorded and replayed."""
    if not layers.mixtures or not layers.counted.issuperset(layers.mixtures):
        raise ModelError(
            "`model.routing: replayed` needs a mixture of experts with the routers of `transformers`, but "
            f"{layers.model} has none. Set `model.routing: free`."
        )


def linear_layers(layers: Layers) -> dict[str, tuple[int, int]]:
    """Return the numbers of input and output features of the layers that can have an adapter, by path."""
    return {
        path: features
        for path, features in layers.linear.items()
        if path != layers.head and _why_unfit(layers, path) is None
    }


def adapted_layers(layers: Layers, targets: Sequence[str]) -> list[str]:
    """Return the paths of the layers that the targets name, in the model's order, followed by the weights of experts.

    Raises ModelError if a target names no layer, or a layer that cannot have an adapter.
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
            and (_parent(path) not in layers.mixers or path.endswith(".in_proj"))
        )
        if not chosen:
            raise ModelError(f"`{ALL_LINEAR}` finds no linear layer in the blocks of {layers.model}.")
    for target in targets:
        found = [path for path in fit if _ends(path, target)]
        if of_experts(target):
            found += [each for each in layers.experts if _ends(each, target) or _ends(_parent(each), target)]
        if target != ALL_LINEAR and not found:
            raise ModelError(_no_such_layer(layers, target, fit))
        chosen.update(found)
    return [path for path in (*fit, *layers.experts) if path in chosen]


def of_experts(target: str) -> bool:
    """Return whether a target (such as `experts`, `experts.down_proj` or the full path of such a weight) names weights of experts."""
    return EXPERTS in target.split(".")


def adapter_shapes(layers: Layers, lora: Lora) -> dict[str, tuple[int, int]]:
    """Return the shape of every tensor of an adapter under PEFT's names.

    PEFT stores the factors of all experts side by side. The factor A has the shape [rank · experts, in] and the factor
    B has the shape [out, rank · experts], with the rank as the slow axis. Raises ModelError in the same cases as
    `adapted_layers`, and for dropout on experts, which PEFT does not support.
    """
    paths = adapted_layers(layers, lora.targets)
    if lora.dropout and any(path in layers.experts for path in paths):
        raise ModelError(
            f"`lora.dropout` is {lora.dropout:g} and `lora.targets` names experts, but PEFT does not support dropout on "
            f"experts. Set `lora.dropout: 0`, or remove '{EXPERTS}' from `lora.targets`."
        )
    shapes: dict[str, tuple[int, int]] = {}
    for path, place in peft_places(paths, layers.experts).items():
        count, features_in, features_out = layers.experts.get(path) or (1, *layers.linear[path])
        shapes[f"{place}.lora_A.weight"] = (lora.rank * count, features_in)
        shapes[f"{place}.lora_B.weight"] = (features_out, lora.rank * count)
    return shapes


def peft_places(paths: Sequence[str], experts: Collection[str]) -> dict[str, str]:
    """Return the name under which PEFT stores the factors of each path.

    PEFT wraps a module once for each of its weights in `experts`, so that the last weight has the outermost wrapper.
    """
    places = {path: f"base_model.model.{path}" for path in paths}
    within: dict[str, list[str]] = {}
    for path in paths:
        if path in experts:
            within.setdefault(_parent(path), []).append(path)
    for module, own in within.items():
        for depth, path in enumerate(reversed(own)):
            places[path] = f"base_model.model.{module}{'.base_layer' * depth}"
    return places


def named(layers: Layers, lora: Lora) -> Lora:
    """Return the settings with each target replaced by the shortest unique names of the layers that it selects in a model.

    Two settings with such names are equal if they adapt the same layers. Raises ModelError in the same cases as
    `adapted_layers`.
    """
    paths = adapted_layers(layers, lora.targets)
    # The shortest ends of paths that no other module's path has, as PEFT expects them in `target_modules` and, for experts,
    # in `target_parameters`.
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
    """Yield the suffixes of a path that begin with a word instead of a number, shortest first."""
    parts = path.split(".")
    return (".".join(parts[first:]) for first in reversed(range(len(parts))) if not parts[first].isdigit())


def _ends(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _why_unfit(layers: Layers, path: str) -> str | None:
    """Return the reason why a linear layer cannot have an adapter, or None if it can have one."""
    if of_experts(path):
        return "its expert reads only the tokens that a router chose"
    if any(path.startswith(f"{each}.") for each in layers.eyes):
        return "it belongs to the vision tower, which is frozen"
    if path.endswith(".dt_proj") and _parent(path) in layers.mixers:
        return "the state-space scan reads its weight without calling the layer"
    return None


def _no_such_layer(layers: Layers, target: str, fit: Mapping[str, tuple[int, int]]) -> str:
    known = sorted({path.rpartition(".")[2] for path in fit} | ({EXPERTS} if layers.experts else set()))
    why = f"{layers.model} has no layer of that name that can have an adapter.{did_you_mean(target, known)}"
    for path in layers.linear:
        if _ends(path, target):
            why = f"{_why_unfit(layers, path) or 'it is the output head, which reads only selected tokens'}."
    listed = "" if "Known:" in why else f" Known: {', '.join(known)}."
    return f"`lora.targets` names '{target}': {why}{listed} `{ALL_LINEAR}` takes all suitable layers."


# -------- Folders of PEFT adapters

ADAPTER = "adapter_model.safetensors"
"""The name of the file in which PEFT stores the tensors of an adapter."""

TAKEN = frozenset({"r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "use_rslora"})
"""Fields that are converted to `team.Lora`. With `use_rslora`, alpha is divided by √r (arXiv:2312.03732) instead of r."""

HARMLESS = {
    "auto_mapping": "names the base's class for PEFT's own loader",
    "base_model_name_or_path": "a name; kapelle compares the hash of the base's weights (`kapelle.json`)",
    "revision": "a name too",
    "peft_version": "the version that wrote the folder",
    "inference_mode": "whether PEFT trains the tensors",
    "fan_in_fan_out": "how a base's weight is stored; PEFT and kapelle decide by the kind of the layer",
}
"""Mapping from fields that never change the computation to the reason why they do not."""

UNUSED: tuple[object, ...] = (None, False, {}, [])
"""Values that disable a field."""

PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),  # others put a different head on the base
    # How A and B were initialised no longer matters once they are trained. All other methods (pissa, olora, corda, loftq, …)
    # also change the base, and PEFT repeats this change at every load.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
    "bias": ("none", None),
    # This names a module that is used only with `megatron_config`.
    "megatron_core": ("megatron.core", None),
    "qalora_group_size": (16, None),
}
"""Values of plain LoRA for fields of `peft.LoraConfig`. All fields that are not listed must have a value in `UNUSED`."""


def _is_plain(key: str, value: object) -> bool:
    if key in TAKEN or key in HARMLESS:
        return True
    return any(value == each and type(value) is type(each) for each in PLAIN.get(key, UNUSED))


def base_and_adapter(path: str) -> tuple[str, str | None]:
    """Return the path of a base model, and `path` itself if it is the folder of a PEFT adapter or None otherwise.

    The adapter's `adapter_config.json` names the base model, which may be a folder next to the adapter. Raises
    ModelError if no base model is named.
    """
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return path, None
    try:
        named = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Use a folder that PEFT saved.") from error
    if not isinstance(named, str) or not named:
        raise ModelError(
            f"{file} does not name a base model (`base_model_name_or_path`). Add model.path=BASE."
        )
    beside = file.parent / named
    return str(beside) if beside.is_dir() else named, path


def read_lora(folder: Path) -> Lora:
    """Read the LoRA settings of a PEFT folder. Raises ModelError, which lists every field that plain LoRA does not have."""
    try:
        settings: Mapping[str, Any] = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        kind, targets = settings["peft_type"], settings["target_modules"]
        parameters = settings.get("target_parameters") or []
        odd = [f"{key}: {value!r}" for key, value in settings.items() if not _is_plain(key, value)]
        if kind == "LORA" and not isinstance(targets, list):
            odd.append(f"target_modules: {targets!r}, not a list of names")
        # Any other tensor, such as a router, is not supported there.
        if not isinstance(parameters, list) or not all(map(of_experts, parameters)):
            odd.append(f"target_parameters: {parameters!r}, not only names of experts")
        if odd:
            raise ModelError(
                f"Adapter '{folder}' is not plain LoRA, the only kind that kapelle computes: {'; '.join(odd)[:400]}. "
                "Merge it into its base with peft (`merge_and_unload()`), save the result and set it as `model.path`."
            )
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        if settings.get("use_rslora"):
            alpha *= math.sqrt(rank)
        return Lora(rank, alpha, (*targets, *parameters), float(settings.get("lora_dropout", 0.0)))
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(
            f"'{folder}' is not a PEFT adapter folder: adapter_config.json cannot be read ({error.strerror}). Give a run "
            "(RUN, RUN@best, RUN@STEP), or a saved policy such as RUN/checkpoints/STEP/policies/NAME."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"'{folder}' is not a PEFT adapter folder: {error!r}.") from error


def shapes_of(folder: Path, files: str = "*.safetensors") -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the safetensors files of a folder, without reading the tensors.

    Raises ModelError if there are no such files, or if a file cannot be read.
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
        raise ModelError(f"'{folder}' contains no weights ({files}). Save the weights again as safetensors.")
    return found
