"""Check in a few seconds whether the Hugging Face hub has a file; find and download models of ModelScope.

Without a network, the Hugging Face client tries five times for each file, even for downloaded files, which takes minutes.
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
"""Seconds for an answer from the hub, from the DNS lookup to the last byte."""
TOKEN_SOURCES = "HF_TOKEN, `hf auth login`"  # noqa: S105 - the names of places
"""Sources of the hub's token."""


@contextmanager
def bars_for_people() -> Iterator[None]:
    """Let libraries that read models and data draw progress bars only on a terminal or in a notebook.

    In a file or a pipe each redraw would be a line of the log.
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
    """Return why the hub does not offer a file of a model or data set, as a clause; None if it does.

    The environment variables of the hub's client apply (HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN, proxies).
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
    """Return the hub's address without a final slash: HF_ENDPOINT, or the public one."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def get_token() -> str | None:
    """Return the token that the hub's client would send."""
    import huggingface_hub

    return huggingface_hub.get_token()


def query_hub(method: str, path: str) -> Answer | None:
    """Return the hub's answer within seconds; None behind a proxy (SOCKS) that only the hub's client may support.

    Raises HubUnreachable, with the reason as a clause, if the hub does not answer or the token would be sent in the clear.
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
    """A hub that does not answer; the reason is a clause."""

    def __init__(self, hub: str, reason: str) -> None:
        super().__init__(f"{without_secrets(hub)} cannot be reached: {reason}")
        self.reason = reason


@contextmanager
def offline_hub() -> Iterator[None]:
    """Let the hub's client use only downloaded files."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# -------- ModelScope: models that its package has downloaded or downloads now

MODELSCOPE = "modelscope:"
"""Prefix of a model's name on ModelScope: `modelscope:Qwen/Qwen2.5-0.5B-Instruct`."""
SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files with a model's settings and tokeniser, without its weights."""


def is_of_modelscope(path: str) -> bool:
    """Return whether a model's path is a name on ModelScope, and not an address (`modelscope://…`)."""
    return path.startswith(MODELSCOPE) and not path.startswith(f"{MODELSCOPE}//")


def modelscope_cache() -> Path:
    """Return the download folder of ModelScope's package: MODELSCOPE_CACHE, or its default."""
    return Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()


def modelscope_folder(name: str) -> Path | None:
    """Return the folder to which any version of ModelScope's package has downloaded a model, or None.

    Since version 1.38 each revision has its own folder; earlier versions replaced dots in the name by three underscores.
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
    """Return why a missing model cannot be downloaded from ModelScope, as a clause; None if it may be possible."""
    if find_spec("modelscope") is None:
        return "the package that fetches it is not installed: pip install 'kapelle[modelscope]'"
    if name.count("/") != 1 or not all(name.split("/")):
        return "names on ModelScope have the form OWNER/NAME"
    return None


def fetch_modelscope(name: str, *, weights: bool) -> Path:
    """Download a model, or without `weights` its settings and tokeniser, and return its folder; does not catch the package's errors."""
    from modelscope import snapshot_download

    return Path(snapshot_download(name, **({} if weights else {"allow_patterns": list(SETTINGS)})))
