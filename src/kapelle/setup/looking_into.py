"""What only `validate` does before weights are loaded, because a run does it when it loads them: looking into every file."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from kapelle.models.checksums import verify_folder
from kapelle.models.outline import Outline, outline_of_settings, read_settings
from kapelle.models.weight_files import check_files, folder_of
from kapelle.team import Team


def looked_into(team: Team, models: Mapping[str, Outline], given: Container[str]) -> Iterator[str]:
    """Yield what was found in the files of each model and adapter; ModelError for what could not be loaded."""
    for path, outline in {path: models[base] for base, path in team.bases.items()}.items():
        if path in given or path == "embedded":
            continue
        folder = folder_of(path)
        if folder is None:
            yield f"{path}: not downloaded yet, so its weights are not checked"
            continue
        unchanged = verify_folder(folder)
        yield f"{path}: {_tried(path, outline)}{', and as kapelle wrote it' if unchanged else ''}"
    for policy in team.every.values():
        if policy.past is not None and verify_folder(Path(policy.past)):
            yield f"{policy.past}: as kapelle wrote it"


def _tried(path: str, outline: Outline) -> str:
    """Return a phrase that says what was tried with a model's files."""
    later = [] if check_files(path, outline) else ["names and shapes (accelerate is not installed)"]
    if outline_of_settings(read_settings(path)) is None:
        from kapelle.models.loading_checks import check_architecture

        if not check_architecture(path):
            later.append("the output head (no small model can be made of these settings)")
    return (
        f"files whole; {' and '.join(later)} checked when it is loaded"
        if later
        else "files whole, weights fit"
    )
