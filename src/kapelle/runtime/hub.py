"""Check in a few seconds whether the Hugging Face hub has a file, and find and download models of ModelScope.

Without a network connection, the Hugging Face client makes five attempts for each file, even if the file was already downloaded,
which takes minutes.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from kapelle.errors import ConfigError, EngineError, EpisodeError
from kapelle.runtime.credentials import authorization, without_secrets
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.http import Answer, exchange

SECONDS = 4.0
"""Maximum time in seconds for a response from the hub, from the DNS lookup to the last byte."""
TOKEN_SOURCES = "HF_TOKEN, `hf auth login`"  # noqa: S105 - the names of places
"""Description of the sources from which the hub's token is read."""


@contextmanager
def bars_for_people() -> Iterator[None]:
    """Make libraries that load models and data show progress bars only on a terminal or in a notebook.

    In a file or a pipe, each update of a progress bar would add a line.
    """
    if sys.stderr is None or sys.stderr.isatty() or "ipykernel" in sys.modules:
        yield
        return
    enable: list[Callable[[], None]] = []
    # Only libraries that have already been imported.
    transformers: Any = sys.modules.get("transformers.utils.logging")
    if transformers is not None and transformers.is_progress_bar_enabled():
        transformers.disable_progress_bar()
        enable.append(transformers.enable_progress_bar)
    datasets: Any = sys.modules.get("datasets")
    if datasets is not None and datasets.is_progress_bar_enabled():
        datasets.disable_progress_bars()
        enable.append(datasets.enable_progress_bars)
    try:
        yield
    finally:
        for show in enable:
            show()


@functools.lru_cache(maxsize=256)
def hub_fault(
    name: str, kind: Literal["models", "datasets"] = "models", file: str = "config.json"
) -> str | None:
    """Return the reason why the hub does not provide a file of a model or data set, or None if the hub provides the file.

    The environment variables of the hub's client are respected (HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN, proxies).
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not contacted"
    try:
        answer = query_hub("HEAD", f"{'' if kind == 'models' else '/datasets'}/{name}/resolve/main/{file}")
    except HubUnreachable as error:
        return str(error)
    if answer is None:
        return None
    hub = hub_address()
    key = f"the token that is set ({TOKEN_SOURCES})" if get_token() else f"no token ({TOKEN_SOURCES})"
    if answer.status == 401:
        return f"{hub} shows no repository of this name with {key}: HTTP 401"
    if answer.status == 403:
        return f"{hub} denies access with {key}; its owner has to grant it: HTTP 403"
    if answer.status == 404:
        return f"{hub} has no repository of this name, or the repository lacks this file: HTTP 404"
    if answer.status == 429 or answer.status >= 500:
        return f"{hub} answers HTTP {answer.status}"
    return None


def hub_address() -> str:
    """Return the address of the hub without a final slash, from HF_ENDPOINT or else the public address."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def get_token() -> str | None:
    """Return the token that the hub's client would send, or None if there is no token."""
    import huggingface_hub

    return huggingface_hub.get_token()


def query_hub(method: str, path: str) -> Answer | None:
    """Send a request to the hub and return the response within a few seconds.

    The result is None if there is a SOCKS proxy, which only the hub's client may support. Raises HubUnreachable if the hub does not
    respond or if the token would be sent without encryption.
    """
    import httpx

    hub, token = hub_address(), get_token()
    try:
        headers = authorization(token, "HF_TOKEN", hub) if token else {}
        return run_async(lambda: exchange(method, f"{hub}{path}", None, headers, SECONDS))
    except ImportError:
        return None
    except (ConfigError, EpisodeError) as error:
        raise HubUnreachable(hub, str(error).rstrip(".")) from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise HubUnreachable(hub, " ".join(str(error).split()).rstrip(".") or type(error).__name__) from None


class HubUnreachable(EngineError):
    """The hub does not respond. The message is a clause that states the reason."""

    def __init__(self, hub: str, reason: str) -> None:
        super().__init__(f"{without_secrets(hub)} cannot be reached: {reason}")
        self.reason = reason


@contextmanager
def offline_hub() -> Iterator[None]:
    """Make the hub's client use only downloaded files."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# -------- ModelScope: models that its package has downloaded or downloads now

MODELSCOPE = "modelscope:"
"""Prefix of the name of a model on ModelScope, as in `modelscope:Qwen/Qwen2.5-0.5B-Instruct`."""
SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Patterns of the files that contain a model's settings and tokeniser, but not its weights."""


def is_of_modelscope(path: str) -> bool:
    """Return whether a model's path is a name on ModelScope, but not a URL (`modelscope://…`)."""
    return path.startswith(MODELSCOPE) and not path.startswith(f"{MODELSCOPE}//")


def modelscope_cache() -> Path:
    """Return the download folder of the ModelScope package: MODELSCOPE_CACHE, or the default of the package."""
    return Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()


def modelscope_folder(name: str) -> Path | None:
    """Return the folder to which any version of the ModelScope package has downloaded a model, or None if there is no such folder.

    Since version 1.38, each revision has its own folder. Earlier versions replaced dots in the name by three underscores.
    """
    owner, _, own = name.partition("/")
    cache, safe = modelscope_cache(), own.replace(".", "___")
    snapshots = cache / "models" / f"{owner}--{own}" / "snapshots"
    revisions = list(snapshots.iterdir()) if snapshots.is_dir() else []
    usual = [snapshots / "master", snapshots / "main"]
    before = [
        cache / part / owner / each for part in ("models", "hub/models", "", "hub") for each in (safe, own)
    ]
    # A revision of another name counts only if it is the only revision.
    candidates = (*usual, *(revisions if len(revisions) == 1 else ()), *before)
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def modelscope_fault(name: str) -> str | None:
    """Return the reason why a missing model cannot be downloaded from ModelScope, or None if a download may be possible."""
    if find_spec("modelscope") is None:
        return "the package that fetches it is not installed: pip install 'kapelle[modelscope]'"
    if name.count("/") != 1 or not all(name.split("/")):
        return "names on ModelScope have the form OWNER/NAME"
    return None


def fetch_modelscope(name: str, *, weights: bool) -> Path:
    """Download a model, or only its settings and tokeniser if `weights` is false, and return its folder.

    Errors of the ModelScope package are not caught.
    """
    from modelscope import snapshot_download

    return Path(snapshot_download(name, **({} if weights else {"allow_patterns": list(SETTINGS)})))
