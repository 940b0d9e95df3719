"""Supervised warm-up of a base model on scripted demonstrations of the roles, cached by content.

A tiny, untrained model can do nothing. Before reinforcement learning it learns from demonstrations of each role
by the environment's script, with its stated flaws, so that it can partly do the task and there is
something left to learn. That is a separate stage (`warmup_stage.py`). Its result depends on the settings, and in its last bits
on the machine and its threads (`warmup_origin.py`); it is cached under a hash of the settings, with hashes of its files, which
are checked at every use.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kapelle.errors import CheckpointError, ModelError
from kapelle.models.checksums import verify_folder, write_checksums
from kapelle.models.language_model import DTYPES, LanguageModel, copy_language_model, hold_in
from kapelle.models.peft_folders import shapes_of
from kapelle.models.weights import save_model
from kapelle.settings.schema import RunConfig
from kapelle.team import Team
from kapelle.training.warmup_origin import record_origin
from kapelle.training.warmup_settings import cache_folder, warmup_is_cached, warmup_key
from kapelle.training.warmup_stage import ReportStep, train_stage


def warmed_up(
    config: RunConfig,
    progress: ReportStep | None = None,
    say: Callable[[str], None] = lambda _: None,
    hold: dict[str, LanguageModel] | None = None,
) -> Path:
    """Return the folder of the warmed-up model, training it unless it is cached.

    A cached model that has changed is deleted and trained anew, which is reported to `say`. If the disk has no room
    for it, the model itself is put into `hold`, by that folder's path, and reported too; without `hold` this is a
    CheckpointError.
    """
    assert config.warmup is not None
    folder = cache_folder() / "warmup" / warmup_key(config)
    if (folder / "config.json").is_file() and _is_sound(folder, say):
        return folder
    beside = _beside(folder)
    try:
        with _saving_in(folder.parent):  # before the work, so that it is not lost
            beside.mkdir(parents=True)
        model = train_stage(config, progress)
        try:
            with _saving_in(folder.parent):
                save_model(beside, model)
                record_origin(beside)
                _rename(beside, folder)
        except CheckpointError as error:
            if hold is None:
                raise
            say(f"{error} This run continues all the same, and the next one warms up anew.")
            hold[str(folder)] = copy_language_model(model, str(folder))
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def warmed_bases(
    config: RunConfig,
    team: Team,
    progress: ReportStep,
    say: Callable[[str, str], None],
    hold: dict[str, LanguageModel] | None = None,
) -> Mapping[str, str]:
    """Return the path of every base of a team, with the warmed-up model in place of the original.

    `say` gets the phase and its detail; `hold` takes a model that the cache has no room for. Without a warm-up the bases
    are the team's own.
    """
    if config.warmup is None:
        return team.bases
    cached = warmup_is_cached(config)
    say("warm-up", "cached" if cached else "teaching the tiny model its roles from scripts")
    folder = str(warmed_up(config, progress, lambda line: say("warm-up", line), hold))
    still = all(
        base not in team.trained_bases for base, path in team.bases.items() if path == config.model.path
    )
    if still and folder in (hold or {}):  # as if it were loaded
        hold_in((hold or {})[folder].model, DTYPES[config.model.dtype])
    return {base: folder if path == config.model.path else path for base, path in team.bases.items()}


def _is_sound(folder: Path, say: Callable[[str], None]) -> bool:
    """Return whether a cached model is as it was written; one that is not is removed."""
    try:
        if not verify_folder(folder):
            shapes_of(folder)  # raises for truncated files
            say("the cached one has no list of hashes; it is used, and checked from now on")
            with suppress(OSError):  # a read-only cache still works
                write_checksums(folder)
    except ModelError as error:
        say(f"the cached one is deleted and made anew: {error}")
        aside = _beside(folder)
        with _saving_in(folder.parent), suppress(FileNotFoundError):  # another process has just done the same
            folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        return False
    return True


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}")


def _rename(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:  # another process was faster; its model is the same
        if not (folder / "config.json").is_file():
            raise


@contextmanager
def _saving_in(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(
            f"The warmed-up model cannot be saved in {folder}: {reason}. Free some space there, or set KAPELLE_CACHE "
            "to a folder that can be written."
        ) from error
