"""Which folders of weights training starts from: `start_from` of a recipe, by agent, read as folders by policy.

start_from: runs/mine                                    every trained policy, from the run's newest checkpoint
start_from: {"*": runs/mine@best, critic: adapters/c}    and one agent's own; a PEFT folder or a model
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kapelle.errors import ConfigError, did_you_mean
from kapelle.runs.checkpoint_folder import list_checkpoints
from kapelle.runs.saved_weights import check_start, check_verifier, weights_of
from kapelle.settings.keeping import EVERYONE
from kapelle.setup.preparation import Prepared
from kapelle.signals.verifier import VerifierScores
from kapelle.team import Team


def check_weights(
    prepared: Prepared,
    given: str | Mapping[str, str | Path] | None = None,
    run_dir: str | Path | None = None,
    *,
    staged: bool = False,
) -> dict[str, Path]:
    """Return what `start_folders` does, and raise the first error of those folders and of a verifier's; loads nothing.

    The verifier of a run that is one of several stages (`staged`) may not be trained yet, and is left alone.
    """
    folders = start_folders(prepared.config.start_from, given, prepared.team, run_dir)
    verifier = None if staged else prepared.algorithm.need(VerifierScores)
    check_start(folders, prepared.team, prepared.outlines, None if verifier is None else verifier.folder)
    if verifier is not None and verifier.least_auc is not None:
        check_verifier(Path(verifier.folder), verifier.least_auc)
    return folders


def start_folders(
    settings: Mapping[str, str],
    given: str | Mapping[str, str | Path] | None,
    team: Team,
    run_dir: str | Path | None,
) -> dict[str, Path]:
    """Return, by trained policy, the folder that it starts from; of a run with a checkpoint only those `given` as paths.

    Raises ConfigError for an agent that is not trained or a name that is no run, adapter or model, CheckpointError for a
    run without a whole checkpoint.
    """
    also = {EVERYONE: given} if isinstance(given, str) else dict(given or {})
    folders = {policy: folder for policy, folder in also.items() if isinstance(folder, Path)}
    named = {**settings, **{agent: source for agent, source in also.items() if isinstance(source, str)}}
    if run_dir is not None and list_checkpoints(Path(run_dir) / "checkpoints"):
        return folders
    wanted = dict.fromkeys(team.trained, named[EVERYONE]) if EVERYONE in named else {}
    for agent, source in named.items():
        if agent != EVERYONE:
            wanted |= dict.fromkeys(_policies_of(agent, team), source)
    return {policy: weights_of(policy, source, "start_from") for policy, source in wanted.items()} | folders


def _policies_of(name: str, team: Team) -> list[str]:
    own = team.turns_of.get(name) or (team.policy_of.get(name, name),)
    found = [policy for policy in team.trained if policy in own]
    if not found:
        known = [
            *(agent for agent, policy in team.policy_of.items() if policy in team.trained),
            *team.trained,
        ]
        raise ConfigError(
            f"`start_from` names '{name}', which is no agent that this team trains.{did_you_mean(name, known)}"
        )
    return found
