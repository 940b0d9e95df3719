"""Folders of PEFT adapters: what their settings may say and what their files hold; no tensor is read.

An adapter must be the plain LoRA that kapelle computes. Some fifty fields of its settings define how its tensors are used. A
few are read, a few do not change the computation, and every other one must have the value that disables it. A field with
another value is refused by name, also one that later versions of PEFT add.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from kapelle.errors import ModelError
from kapelle.team import Lora

ADAPTER = "adapter_model.safetensors"
"""The file in which PEFT keeps an adapter's tensors."""

TAKEN = frozenset({"r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora"})
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
    "megatron_core": (
        "megatron.core",
        None,
    ),  # the name of a module that is used with `megatron_config` alone
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
            "target_parameters",
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
    for field in fields(LoraConfig):
        if field.name == key and field.default is not MISSING:
            return True, field.default
        if field.name == key and field.default_factory is not MISSING:
            return True, field.default_factory()
    return False, None


def read_lora(folder: Path) -> Lora:
    """Read the size of a PEFT LoRA folder's adapter without its weights; ModelError as `read_adapter`.

    It names every field that is not plain LoRA.
    """
    try:
        settings: Mapping[str, Any] = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        kind, targets = settings["peft_type"], settings["target_modules"]
        odd = [f"{key}: {value!r}" for key, value in settings.items() if not _is_plain(key, value)]
        if kind == "LORA" and not isinstance(targets, list):
            odd.append(f"target_modules: {targets!r}, no list of names")
        if odd:
            raise ModelError(
                f"Adapter '{folder}' is not plain LoRA, which is all that kapelle computes: {'; '.join(odd)[:400]}. Merge it "
                "into its base with peft (`PeftModel.from_pretrained(base, FOLDER).merge_and_unload()`), save that with "
                "`save_pretrained` and name it as `model.path`, or train a plain LoRA."
            )
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        if settings.get("use_rslora"):
            alpha *= math.sqrt(rank)
        return Lora(rank, alpha, tuple(targets), float(settings.get("lora_dropout", 0.0)))
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
