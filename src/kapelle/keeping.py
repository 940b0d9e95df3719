"""What a run's checkpoints hold, and how they come back.

The state of the train engine, the step, the positions of the run's files, the random generators, and the
hash of every base model, so that adapters never wake up on another one. Beside it lie the trained policies as
other programs load them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kapelle import checkpoint
from kapelle.engines.torch_train import TorchTrainEngine
from kapelle.errors import CheckpointError
from kapelle.models.language_model import LanguageModel
from kapelle.models.weights import save_adapter, save_model
from kapelle.run_dir import RunDirectory
from kapelle.team import Team


def write_checkpoint(
    run: RunDirectory,
    step: int,
    engine: TorchTrainEngine,
    bases: Mapping[str, str],
    policies: Callable[[Path], None],
    credit: Mapping[str, object],
) -> Path:
    """Save everything that an exact resume after `step` needs and let `latest` name it.

    `credit` is what the algorithm remembers from step to step.
    """
    state = {
        "train": engine.state(),
        "credit": dict(credit),
        "loop": {
            "step": step,
            "bases": dict(bases),
            "positions": run.positions(),
            "random": checkpoint.capture_random(),
        },
    }
    folder = checkpoint.save(run.checkpoints, step, state, policies)
    run.point_latest(folder)
    return folder


def read_checkpoint(
    folder: Path,
    engine: TorchTrainEngine,
    bases: Mapping[str, str],
    say: Callable[[str], None],
    take_credit: Callable[[Mapping[str, object]], None],
) -> Mapping[str, Any]:
    """Load the newest whole checkpoint into the engine, the credit's memory and the generators; return its loop part.

    `say` hears which newer ones were damaged. Raises CheckpointError when there is none, or when it stands on
    other base weights.
    """
    newest = checkpoint.newest_valid(folder)
    for rejected in newest.rejected:
        say(f"passed over: {rejected.reason}")
    if newest.folder is None:
        raise CheckpointError(f"There is no whole checkpoint in {folder}.")
    state = checkpoint.read(newest.folder)
    loop: Mapping[str, Any] = state["loop"]
    if loop["bases"] != bases:
        raise CheckpointError(
            f"The checkpoint {newest.folder} stands on other base weights than `model.path` names now. Name the "
            "model that it was trained with."
        )
    engine.load_state(state["train"])
    take_credit(state["credit"])
    checkpoint.restore_random(loop["random"])
    return loop


def write_policies(
    folder: Path, team: Team, models: Mapping[str, LanguageModel], engine: TorchTrainEngine
) -> None:
    """Write every trained policy under `policies/`: adapters as PEFT folders, models by `save_pretrained`."""
    for name in team.trained:
        policy = team.policies[name]
        place = folder / "policies" / name.replace(":", "_").replace("/", "_")
        if policy.lora is not None:
            save_adapter(place, engine.weights(name), policy.lora, models[policy.base].name)
        else:
            save_model(place, models[policy.base])
