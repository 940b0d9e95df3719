"""Export the trained policies of a run for other programs, as adapters, as merged models or as models for llama.cpp's converter.

    peft         each policy's adapter for PEFT; a base that only this run has is written to `base`
    hf           each policy as a model for `transformers`, with its adapter merged into its base
    gguf-ready   the same, checked for the requirements of `convert_hf_to_gguf.py`

Merging computes W + (alpha / rank) · B A in float32 and rounds the result once to the type of the base.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kapelle.errors import ConfigError, ModelError, need_known
from kapelle.models.adapters import adapted_layers, peft_places
from kapelle.models.chat_template import with_defaults
from kapelle.models.checksums import base_of, write_checksums
from kapelle.models.gguf_file import gguf_file
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import layers_of
from kapelle.models.weights import hash_of_base, read_adapter, save_model
from kapelle.runs.model_card import Exported, model_card
from kapelle.runs.named_checkpoint import policy_folder
from kapelle.settings.feature import without_features
from kapelle.setup.preparation import prepare
from kapelle.setup.team_file import TEAM_FILE, write_team
from kapelle.team import Policy, own_name
from kapelle.training.observer import Observer
from kapelle.training.provenance import config_of_run
from kapelle.training.served import checkpoint_of, warmed

# -------- Whether llama.cpp's `convert_hf_to_gguf.py` supports a model
#
# The converter identifies a byte-level BPE by comparing its ids for one text with a list of published tokenisers. So it never supports
# a tokeniser that was made for a tiny model.

SMALLEST = 30_000
"""The minimum vocabulary size. Every byte-level BPE tokeniser on the converter's list has a larger vocabulary."""
UNKNOWN = frozenset({"GPTNeoForCausalLM", "HeliumForCausalLM", "OPTForCausalLM"})
"""Architectures that the converter does not support. The version of the converter is given in docs/export.md."""
_INSTEAD = "Export with `--format hf`, or train on a pretrained model"


def check_convertible(model: str | Path) -> None:
    """Raise ModelError if llama.cpp's converter does not support a base model or an exported folder. Hub names are not checked."""
    if str(model) == "embedded":
        raise ModelError(
            f"llama.cpp's converter does not support the base 'embedded': it only supports published tokenisers. {_INSTEAD}."
        )
    place = Path(model).expanduser()
    if not place.is_dir():
        return
    config = _read(place / "config.json")
    named = config.get("architectures") or ()
    if not named:
        raise ModelError(
            f"llama.cpp's converter does not support {place}: its config.json has no `architectures`."
        )
    if named[0] in UNKNOWN:
        raise ModelError(
            f"llama.cpp's converter does not support the architecture {named[0]} of {place}. {_INSTEAD}."
        )
    if (place / "tokenizer.model").is_file():  # SentencePiece, which the converter supports
        return
    tokeniser = _read(place / "tokenizer.json").get("model")
    if not isinstance(tokeniser, Mapping):
        raise ModelError(
            f"llama.cpp's converter does not support {place}: it has neither `tokenizer.model` nor `tokenizer.json`. Save the "
            "model with its tokeniser."
        )
    kind, tokens = tokeniser.get("type"), len(tokeniser.get("vocab") or ())
    if kind == "WordLevel" or (kind == "BPE" and not tokeniser.get("byte_fallback") and tokens < SMALLEST):
        raise ModelError(
            f"llama.cpp's converter does not support the tokeniser of {place}, a {kind} of {tokens:,} tokens: it only supports published "
            f"tokenisers. {_INSTEAD}."
        )


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


Form = Literal["peft", "hf", "gguf-ready"]


def export(
    run: Path,
    out: Path,
    form: Form,
    observer: Observer,
    *,
    which: str | None = None,
    agents: Sequence[str] = (),
    licence: str | None = None,
) -> list[Exported]:
    """Write the trained policies of a run's checkpoint into a new folder, with a model card and `team.yaml`.

    If `agents` are given, only their policies are exported. The argument `licence` is the licence on the model card; the
    default is the licence of the base model. Raises ConfigError if an agent has no trained weights or the base cannot be
    merged exactly, and CheckpointError if there is no checkpoint.
    """
    config = without_features(config_of_run(run)).model_copy(update={"start_from": {}})
    absent: list[str] = []
    prepared = prepare(config, training=False, absent=absent)
    for what in absent:
        observer.phase("missing", what)
    checkpoint, step = checkpoint_of(run, which, observer)
    team, names = prepared.team, list(prepared.team.trained)
    agents = [own_name(agent, config.name) for agent in agents]
    for agent in agents:
        need_known("--agent", "agent", agent, tuple(team.names))
    if agents:
        own = {name for agent in agents for name in team.turns_of.get(agent) or (team.policy_of[agent],)}
        names = [name for name in names if name in own]
    if not names:
        raise ConfigError(
            "These agents have no trained weights to export. Give trained agents with `--agent`."
        )
    chosen = [team.policies[name] for name in names]
    if form != "peft" and config.model.quantization is not None:
        raise ConfigError(
            f"{run} trained on a base in {config.model.quantization}, into which an adapter cannot be merged exactly. Export the "
            "adapters with `--format peft`, and merge them into the base in its own type with PEFT."
        )
    if form == "gguf-ready":
        for path in dict.fromkeys(team.bases[policy.base] for policy in chosen):
            check_convertible(path)
    ready = warmed(prepared, observer)
    # Bases that exist only in this run are exported with their adapters.
    unpublished = {
        base
        for base, path in team.bases.items()
        if ready.team.bases[base] != path or path == "embedded" or gguf_file(path) is not None
    }
    models = ready.load() if form != "peft" or unpublished else {}
    folders = _base_folders(out, chosen, unpublished)
    found = []
    for policy in chosen:
        place = out if len(chosen) == 1 else out / policy_folder(out, policy.name).name
        place.mkdir(parents=True, exist_ok=True)
        saved = policy_folder(checkpoint, policy.name)
        observer.phase("exporting", policy.name)
        if policy.lora is None or form == "peft":
            shutil.copytree(saved, place, dirs_exist_ok=True)
            if policy.lora is not None and policy.base in unpublished:
                # The adapters of such a base refer to its folder, which is written once.
                base = folders[policy.base]
                if not base.exists():
                    save_model(base, models[policy.base])
                file = place / "adapter_config.json"
                beside = base.name if place == out else f"../{base.name}"
                named = {**json.loads(file.read_text("utf-8")), "base_model_name_or_path": beside}
                file.write_text(json.dumps(named, indent=2) + "\n", "utf-8")
                (place / "kapelle.json").unlink(missing_ok=True)  # the list of unchanged files
        else:
            save_model(place, models[policy.base], merged(models[policy.base], saved))
        speakers = [agent for agent, name in team.policy_of.items() if name == policy.name]
        template = place / "chat_template.jinja"
        if speakers and (arguments := team[speakers[0]].chat_template_kwargs) and template.is_file():
            # Other programs do not pass arguments to the template.
            template.write_text(with_defaults(template.read_text("utf-8"), arguments), "utf-8")
            write_checksums(place)
        if form == "gguf-ready":
            check_convertible(place)
        path, dtype = team.bases[policy.base], str(config.model.dtype)
        kind = form if policy.lora is not None or form != "peft" else "hf"
        found.append(Exported(policy.name, speakers, place.relative_to(out).as_posix(), path, kind, dtype))
    written = {base: place for base, place in folders.items() if place.is_dir()}
    lacking = write_team(out, config, team, step, found, written, unpublished)
    if lacking is not None:
        observer.phase("exporting", f"no {TEAM_FILE}: {lacking}")
    (out / "README.md").write_text(model_card(run, step, found, licence, team=lacking is None), "utf-8")
    return found


def _base_folders(out: Path, chosen: Sequence[Policy], unpublished: Collection[str]) -> dict[str, Path]:
    """Return the folder of each base that exists only in this run. The folder is called `base`, or is numbered if there are several."""
    needed = sorted({policy.base for policy in chosen if policy.lora is not None} & set(unpublished))
    taken = {policy_folder(out, policy.name).name for policy in chosen} if len(chosen) > 1 else set()
    plain = "base" if len(needed) == 1 and "base" not in taken else None
    return {base: out / (plain or f"base-{number}") for number, base in enumerate(needed)}


def merged(model: LanguageModel, adapter: Path) -> dict[str, Tensor]:
    """Return the weights of a base model with an adapter merged into them. Raises ModelError if adapter and base do not match."""
    own, layers = model.base_parameters(), layers_of(model.model)
    if base_of(adapter) not in (None, hash_of_base(model)):
        raise ModelError(
            f"The adapter '{adapter}' was trained on base weights that differ from the current weights of '{model.name}'."
        )
    tensors, lora = read_adapter(adapter)
    found: dict[str, Tensor] = {name: tensor.detach() for name, tensor in own.items()}
    places = peft_places(adapted_layers(layers, lora.targets), layers.experts)
    paths = {place: path for path, place in places.items()}
    for key in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
        place = key.removesuffix(".lora_A.weight")
        name = path = paths.get(place, place.removeprefix("base_model.model."))
        name += "" if path in layers.experts else ".weight"
        if name not in found or not found[name].is_floating_point():
            raise ModelError(
                f"The adapter '{adapter}' changes '{name}', which '{model.name}' does not have in a floating-point type."
            )
        a_rI, b_Or = tensors[key].float(), tensors[key.replace(".lora_A.", ".lora_B.")].float()
        weight, module = found[name], model.model.get_submodule(path.rpartition(".")[0])
        if path in layers.experts:
            # Ranks of all experts: expert-major in A, rank-major in B.
            a_erI, b_Ore = (
                each.unflatten(axis, shape)
                for each, axis, shape in ((a_rI, 0, (len(weight), -1)), (b_Or, 1, (-1, len(weight))))
            )
            change = torch.einsum("ore,eri->eio" if module.is_transposed else "ore,eri->eoi", b_Ore, a_erI)
        else:
            change = b_Or @ a_rI
            if not isinstance(
                model.model.get_submodule(path), torch.nn.Linear
            ):  # GPT-2 stores transposed weights
                change = change.t()
        found[name] = (weight.float() + (lora.alpha / lora.rank) * change.to(weight.device)).to(weight.dtype)
    return found


def total(folder: Path) -> list[tuple[str, int]]:
    """Return every regular file of a folder with its size in bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]
