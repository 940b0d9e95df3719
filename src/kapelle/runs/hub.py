"""Sending an export to a hub of models, by `huggingface_hub`: only when asked, and only what was listed."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kapelle.errors import ConfigError, EngineError
from kapelle.runtime.hub import TOKEN_SOURCES, HubUnreachable, ask_hub, get_token, hub_address

NEVER = ("*.partial", ".*", "**/.*", "kapelle.json", "**/kapelle.json")
"""What stays here."""


def check_push(repo: str, *, asking: bool = True) -> None:
    """Raise ConfigError or EngineError, within seconds, where nothing can be sent, before anything is read or computed.

    The hub is asked whose the token is, unless `asking` is False: then only the name is held against its rules.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if repo.count("/") != 1:
        raise ConfigError(f"--push takes a repository, `OWNER/NAME`, and got '{repo}'.")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        why = " ".join(str(error).split()).removesuffix(f": '{repo}'.").rstrip(".")
        raise ConfigError(f"--push takes a repository, `OWNER/NAME`, and got '{repo}'. {why}.") from None
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing is sent. Unset it, or leave out --push.")
    if not asking:
        return
    if get_token() is None:
        raise ConfigError(
            f"Nothing was sent to '{repo}': there is no token. Set HF_TOKEN to one that may write, or run `hf auth login`."
        )
    _check_token(repo)


def _check_token(repo: str) -> None:
    try:
        answer = ask_hub("GET", "/api/whoami-v2")
    except HubUnreachable as error:
        raise EngineError(
            f"Nothing was sent to '{repo}': the hub cannot be reached ({error.reason})."
        ) from None
    if answer is None or answer.status not in (200, 401):
        return  # not every hub knows this question, and what it says to the export is what counts
    if answer.status == 401 or _reads_only(answer.body):
        what = "does not know the token" if answer.status == 401 else "lets the token read only; it is"
        raise ConfigError(
            f"Nothing was sent to '{repo}': {hub_address()} {what} that is set ({TOKEN_SOURCES}). Give it one that may write."
        )


def _reads_only(body: bytes) -> bool:
    try:
        return bool(json.loads(body)["auth"]["accessToken"]["role"] == "read")
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def push(folder: Path, repo: str, *, public: bool = False) -> str:
    """Send a folder to a repository of models, which is made where it is missing, and return its address.

    The hub is `HF_ENDPOINT` or the public one; the token `HF_TOKEN` or that of `hf auth login`. Raises ConfigError without a
    token or for a name that is no repository, EngineError when the hub cannot be reached or refuses; both say what was kept.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    kept = f"The export is in {folder}; send it later with `hf upload {repo} {folder}`."
    try:
        check_push(repo)
    except (ConfigError, EngineError) as error:
        raise type(error)(f"{error} {kept}") from None
    api = HfApi(endpoint=hub_address(), token=get_token())
    made = False
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        made = True
        sent = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Export of a run", ignore_patterns=list(NEVER)
        )
    except HfHubHTTPError as error:
        raise EngineError(
            f"{_refusal(repo, error.response.status_code, error.server_message)} {kept}"
        ) from error
    except Exception as error:  # whichever client it uses
        what = f"Sending to '{repo}' was broken off" if made else f"Nothing was sent to '{repo}'"
        raise EngineError(f"{what}: the hub cannot be reached ({type(error).__name__}). {kept}") from error
    return str(getattr(sent, "repo_url", None) or repo)


def _refusal(repo: str, status: int, said: str | None) -> str:
    """Return what a status of the hub means for who sends, with the hub's own words."""
    meaning = {
        401: f"it does not know the token that is set ({TOKEN_SOURCES})",
        403: f"the token that is set ({TOKEN_SOURCES}) may not write there. Name a repository of your own or of an organisation that you "
        "write for, or set a token that may write",
        404: f"there is none of this name that the token that is set ({TOKEN_SOURCES}) can see or make",
    }.get(status, "it took nothing")
    words = f" It says: {' '.join(said.split())[:300].rstrip('.')}." if said else ""
    return f"The hub refused '{repo}' ({status}): {meaning}.{words} Nothing was added there."
