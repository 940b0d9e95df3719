"""Defines the content of a run's checkpoints, and functions that load it.

A checkpoint holds the state of the train engine, the step, the positions in the files of the run, and the states of the
random generators. A checkpoint also holds the hash of every base model, so that adapters are never loaded onto a
different base model. Other programs can load the trained policies and a trained verifier, which has the following
files:

    verifier/
      adapter_config.json, adapter_model.safetensors    the adapter as a PEFT folder, with checksums (`models.checksums`)
      value_head.safetensors                            `weight` [1, hidden] and `bias` [1]
      verifier.json                                     `base`: hash of its base model; `held_out`: accuracy of the
      verifier (`training.held_out.Judgement`), null if not measured
"""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from kapelle.engines.train.protocol import HEAD, KeepsParts, TrainEngine
from kapelle.errors import CheckpointError, DataError, ModelError, NumericsError
from kapelle.models.adapters import named
from kapelle.models.checksums import base_of, write_checksums
from kapelle.models.finite import learned, poisoned
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import copy_weights, layers_of
from kapelle.models.outline import check_same
from kapelle.models.weights import (
    hash_of_base,
    read_adapter,
    read_model,
    save_adapter,
    save_model,
)
from kapelle.runs import checkpoint
from kapelle.runs.checkpoint import Contents, held
from kapelle.runs.named_checkpoint import policy_folder
from kapelle.runs.writer import RunDirectory
from kapelle.runtime.files import step_of
from kapelle.runtime.randomness import capture_random, restore_random
from kapelle.runtime.ranks import ALONE, Peers, Ranks
from kapelle.runtime.tensors import load_tensors
from kapelle.team import ALL_LINEAR, VERIFIER, Critic, Team

LEARNED = "train"
"""The part of a checkpoint that all ranks write together, which is the state of the train engine."""


def prepare_checkpoint(
    checkpoints: Path,
    run: RunDirectory | None,
    step: int,
    engine: TrainEngine,
    team: Team,
    bases: Mapping[str, str],
    policies: Callable[[Path], None],
    credit: Mapping[str, object],
    ranks: Ranks = ALONE,
    *,
    copied: bool = False,
) -> Callable[[Peers], Path]:
    """Collect everything that is needed to resume exactly after `step`.

    Returns a function that saves the checkpoint and updates `latest`. The argument `credit` is the state that the
    algorithm keeps between steps, and the function `policies` writes the trained policies. If there are several
    `ranks`, only the first rank has the `run`, and each rank writes its share of the engine's state. If `copied` is
    true, a thread of each rank may save while training continues. The returned function takes the barrier of these
    threads. The returned function raises NumericsError, before anything is written, if a weight, an optimizer moment or
    another learned number is not finite.
    """
    taken: list[Contents] = []
    state: dict[str, object] = {LEARNED: engine.parts() if isinstance(engine, KeepsParts) else engine.state()}

    def take() -> bytes:
        if run is not None:
            state["credit"] = dict(credit)
            state["loop"] = {
                "step": step,
                "bases": dict(bases),
                "adapters": _adapters(team, engine),
                "positions": run.positions(),
                "random": capture_random(),
            }
        taken.append(Contents(state, ranks, [LEARNED], copied=copied))
        return b""

    ranks.all_gather("state", take)

    def check() -> bytes:
        wrong = poisoned(learned(taken[0].tensors))
        if wrong is not None:
            raise NumericsError(
                f"The checkpoint of step {step} was not written: {wrong}. Resume from the previous "
                "checkpoint with a lower "
                "`optimizer.lr`."
            )
        return b""

    def save(meeting: Peers) -> Path:
        meeting.all_gather("numbers", check)
        # safetensors leaves several reference cycles for each tensor: a collection of the youngest generation alone
        # frees them. If Python collected during the save, tensors in use would move to an older generation, which is collected
        # only after about a thousand steps.
        on = gc.isenabled()
        gc.collect(0)  # moves older objects to an older generation
        gc.disable()
        try:
            if run is None:
                return checkpoint.save(checkpoints, step, taken[0], ranks=meeting)
            folder = checkpoint.save(checkpoints, step, taken[0], policies, run.recheck, meeting)
        finally:
            if on:
                gc.enable()
                gc.collect(0)
        run.point_latest(folder)
        return folder

    return save


def _adapters(team: Team, engine: TrainEngine) -> dict[str, dict[str, object]]:
    """Return, for each learner, those settings of its adapter that affect the result but are not stored in its tensors."""
    adapters = {name: policy.lora for name, policy in team.policies.items() if policy.lora is not None}
    adapters |= {name: critic.lora for name, critic in team.critics.items() if critic.lora is not None}
    found: dict[str, dict[str, object]] = {}
    for name, lora in adapters.items():
        targets: Collection[str] = lora.targets
        if ALL_LINEAR in targets:  # the names of these layers must be saved
            weights = engine.weights(name)
            targets = {key.split(".")[-3] for key in weights if key.endswith(".lora_A.weight")}
        found[name] = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(targets)}
    return found


def find_checkpoint(folder: Path, warn: Callable[[str], None]) -> Path:
    """Return the newest valid checkpoint in a folder, or the folder itself if it is a checkpoint.

    The function `warn` is called with a message for each newer checkpoint that is damaged or holds non-finite numbers.
    Raises CheckpointError if there is no valid checkpoint.
    """
    if step_of(folder) is not None:
        checkpoint.verify(folder)
        _check_values(folder)
        return folder
    newest = checkpoint.newest_valid(folder, _check_values)
    for rejected in newest.rejected:
        fix = ""
        if newest.folder is not None:
            run = shlex.quote(str(newest.folder.parent.parent))
            fix = (
                f" `kapelle runs rollback {run} --to {step_of(newest.folder)}` moves it and the later "
                "rows aside."
            )
        warn(f"skipped a checkpoint: {rejected.reason}{fix}")
    if newest.folder is None:
        why = "".join(f" {rejected.reason}" for rejected in newest.rejected)
        raise CheckpointError(
            f"There is no complete checkpoint in {folder}.{why} Restore a checkpoint from a copy, or "
            "start a run in another --run-dir. "
            f"`kapelle runs show {shlex.quote(str(folder.parent))}` lists the files."
        )
    return newest.folder


def read_checkpoint(
    folder: Path,
    engine: TrainEngine,
    team: Team,
    bases: Mapping[str, str],
    take_credit: Callable[[Mapping[str, object]], None],
) -> Mapping[str, Any]:
    """Load a valid checkpoint into the engine, the state of the algorithm and the random generators, and return its part `loop`.

    The returned mapping also contains the `folder` of the checkpoint. Raises CheckpointError if the base weights or
    adapters of the checkpoint differ from those of the team.
    """
    state = checkpoint.read(folder, engine.room if isinstance(engine, KeepsParts) else None)
    loop: Mapping[str, Any] = state["loop"]
    if loop["bases"] != bases:
        raise CheckpointError(
            f"The checkpoint {folder} was trained with base weights that differ from those of "
            "`model.path`. Set `model.path` to the model that it was trained with. A warm-up with a "
            "different number of threads, version of torch or processor also results in a different "
            "model."
        )
    saved, now = loop.get("adapters", {}), _adapters(team, engine)
    for name in sorted(saved.keys() & now.keys()):
        if saved[name] != now[name]:
            raise CheckpointError(
                f"The checkpoint {folder} has the adapter '{name}' with {saved[name]}, but this team has "
                f"{now[name]}. Set `lora` and `critic_lora` to the values used when the checkpoint "
                "was written."
            )
    engine.load_state(state["train"])
    take_credit(state["credit"])
    restore_random(loop["random"])
    return {**loop, "folder": folder}


def _check_values(folder: Path) -> None:
    wrong = checkpoint.poison_in(folder)
    if wrong is not None:
        raise CheckpointError(f"Checkpoint {folder} is damaged: {wrong}.")


def copied_weights(team: Team, engine: TrainEngine) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return CPU copies of the weights that `write_policies` writes, by learner and by name."""
    verifier = VERIFIER in team.critics and team.critics[VERIFIER].trained
    return {
        name: {key: held(tensor, copied=True) for key, tensor in engine.weights(name).items()}
        for name in [*team.trained, *([VERIFIER] if verifier else [])]
    }


def write_policies(
    folder: Path,
    team: Team,
    models: Mapping[str, LanguageModel],
    engine: TrainEngine,
    bases: Mapping[str, str],
    held_out: Mapping[str, Any] | None = None,
    copies: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Write every trained policy to the folder `policies/`. Adapters are written as PEFT folders, and whole models with `save_pretrained`.

    A trained verifier is written to the folder `verifier`, with its accuracy (`held_out`). The argument `bases` holds
    the hash of the weights of each base model. If `copies` (the result of `copied_weights`) is given, these weights are
    written instead of the current weights.
    """
    from safetensors.torch import save_file

    weights = engine.weights if copies is None else copies.__getitem__
    if VERIFIER in team.critics and team.critics[VERIFIER].trained:
        critic, place = team.critics[VERIFIER], folder / "verifier"
        model, own = models[critic.base], weights(VERIFIER)
        assert critic.lora is not None, "a verifier is an adapter with its head"
        adapter = {key: tensor for key, tensor in own.items() if not key.startswith(HEAD)}
        save_adapter(place, adapter, named(layers_of(model.model), critic.lora), model.name)
        head = {
            key.removeprefix(HEAD): tensor.detach().cpu().contiguous()
            for key, tensor in own.items()
            if key not in adapter
        }
        save_file(head, place / "value_head.safetensors")
        made_of = {"base": hash_of_base(model), "held_out": held_out}
        (place / "verifier.json").write_text(json.dumps(made_of, indent=2) + "\n", "utf-8")
        write_checksums(place)
    for name in team.trained:
        policy = team.policies[name]
        model, place = models[policy.base], policy_folder(folder, name)
        if policy.lora is not None:
            layers = named(layers_of(model.model), policy.lora)
            save_adapter(place, weights(name), layers, model.name, bases[policy.base])
            continue
        if copies is None:
            copy_weights(model.base_parameters(), weights(name), f"policy '{name}'")
        save_model(place, model, None if copies is None else copies[name])


def load_policies(
    folders: Mapping[str, Path],
    team: Team,
    weights: Callable[[str], Mapping[str, torch.Tensor]],
    load_weights: Callable[[str, Mapping[str, torch.Tensor]], None],
    bases: Mapping[str, str],
) -> None:
    """Load weights from folders into policies, by name. The folders must have been checked by `models.outline.check_saved`.

    The functions `weights` and `load_weights` return and replace the weights of a policy, like the methods of a train
    engine. Raises ModelError if a folder was not written by kapelle, or if an adapter was trained on base weights other
    than those of this run. The hashes of the base weights are given in `bases`.
    """
    for name, folder in folders.items():
        policy = team.every[name]
        made_on = None if policy.lora is None else base_of(folder)
        if made_on not in (None, bases[policy.base]):
            raise ModelError(
                f"The adapter '{folder}' was trained on base weights that differ from those of "
                f"'{name}'. Use the same "
                "`model` and `warmup`."
            )
        found = read_adapter(folder)[0] if policy.lora is not None else read_model(folder, weights(name))
        wrong = poisoned(found)
        if wrong is not None:
            raise ModelError(f"Training cannot continue from the weights in '{folder}': {wrong}.")
        load_weights(name, {key: found[key] for key in weights(name)})


def load_verifier(
    folder: Path,
    critic: Critic,
    models: Mapping[str, LanguageModel],
    engine: TrainEngine,
    bases: Mapping[str, str] | None = None,
) -> None:
    """Load a verifier from a folder into a critic.

    The argument `bases` maps each base model to its hash at the time it was read. These hashes are needed if the base
    models have since been sharded across ranks. Raises ModelError if the folder is damaged or does not hold a verifier,
    or if the verifier was trained on another base model than that of the team.
    """
    model = models[critic.base]
    assert critic.lora is not None, "a verifier is an adapter with its head"
    layers = layers_of(model.model)
    tensors, lora = read_adapter(folder)
    check_same("The verifier", folder, layers, lora, critic.lora)
    try:
        head = load_tensors(folder / "value_head.safetensors")
        base = json.loads((folder / "verifier.json").read_text("utf-8"))["base"]
    except (DataError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"'{folder}' does not hold a verifier: {error!r}. Give the folder `verifier` in a "
            "checkpoint of a run with "
            "`algorithm.name: verifier`."
        ) from error
    if base != (hash_of_base(model) if bases is None else bases[critic.base]):
        raise ModelError(
            f"The verifier '{folder}' was trained on a different base model than this team's "
            f"'{model.name}'. Train it with the "
            "same `model` (including its `dtype`) and `warmup`, or run both as `stages` of one recipe."
        )
    shapes = {key: tuple(tensor.shape) for key, tensor in head.items()}
    if shapes != {"weight": (1, model.hidden_size), "bias": (1,)}:
        raise ModelError(
            f"The value head in '{folder}' has shapes {shapes}, but the model's hidden size is "
            f"{model.hidden_size}."
        )
    engine.load_weights(critic.name, {**tensors, **{f"{HEAD}{key}": head[key] for key in head}})
