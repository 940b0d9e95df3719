"""Whether the Hugging Face hub has a file, found out in a few seconds; what its libraries draw; where ModelScope's packages keep a model.

Where a network is down, the Hugging Face client asks five times for each file, which adds up to minutes, also for files that
were downloaded before.
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
"""For the hub to answer in, from looking up its name to the last byte."""
TOKEN_SOURCES = "HF_TOKEN, `hf auth login`"  # noqa: S105 - the names of places
"""Where its token comes from."""


@contextmanager
def bars_for_people() -> Iterator[None]:
    """Let libraries that read models and data draw progress bars where somebody watches: on a terminal, or in a notebook.

    In a file or a pipe each redraw would be a line of the log.
    """
    if sys.stderr is None or sys.stderr.isatty() or "ipykernel" in sys.modules:
        yield
        return
    enable: list[Callable[[], None]] = []
    # Asked of what is imported, so that nothing is.
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
        for again in enable:
            again()


@functools.lru_cache(maxsize=256)
def hub_fault(
    name: str, kind: Literal["models", "datasets"] = "models", file: str = "config.json"
) -> str | None:
    """Return why a file of a model or data set cannot be had from the hub now, as a clause; None where it can.

    The environment variables of the hub's own client are honoured (HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN, proxies).
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    try:
        answer = ask_hub("HEAD", f"{'' if kind == 'models' else '/datasets'}/{name}/resolve/main/{file}")
    except HubUnreachable as error:
        return str(error)
    if answer is None:
        return None
    hub = hub_address()
    key = f"the token that is set ({TOKEN_SOURCES})" if get_token() else f"no token ({TOKEN_SOURCES})"
    if answer.status == 401:
        return f"{hub} has none of this name that can be seen with {key}: HTTP 401"
    if answer.status == 403:
        return f"{hub} gives access only to whom its owner grants it, and was asked with {key}: HTTP 403"
    if answer.status == 404:
        return f"{hub} has none of this name, or it lacks that file: HTTP 404"
    if answer.status == 429 or answer.status >= 500:
        return f"{hub} answers HTTP {answer.status}"
    return None


def hub_address() -> str:
    """Return the hub's address without a slash at its end: HF_ENDPOINT, or the public one."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def get_token() -> str | None:
    """Return the token that the hub's own client would send."""
    import huggingface_hub

    return huggingface_hub.get_token()


def ask_hub(method: str, path: str) -> Answer | None:
    """Return what the hub answers, within seconds; None behind a proxy that perhaps its own client alone knows (SOCKS).

    Raises HubUnreachable, with the reason as a clause, where it does not answer or would get the token in the clear.
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
    """A hub that cannot be asked, for the reason that is given as a clause."""

    def __init__(self, hub: str, reason: str) -> None:
        super().__init__(f"{without_secrets(hub)} cannot be reached: {reason}")
        self.reason = reason


@contextmanager
def offline_hub() -> Iterator[None]:
    """Let the hub's client use nothing but what was downloaded before."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# -------- ModelScope: models that its package has downloaded, or downloads now

MODELSCOPE = "modelscope:"
"""Prefix of a model's name on ModelScope: `modelscope:Qwen/Qwen2.5-0.5B-Instruct`."""
SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files that say what a model is and how it reads text; its weights are in others."""


def is_of_modelscope(path: str) -> bool:
    """Return whether a model's path is a name on ModelScope; an address (`modelscope://…`) is none."""
    return path.startswith(MODELSCOPE) and not path.startswith(f"{MODELSCOPE}//")


def modelscope_cache() -> Path:
    """Return the folder in which ModelScope's package keeps what it downloads: MODELSCOPE_CACHE, or its default."""
    return Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()


def modelscope_folder(name: str) -> Path | None:
    """Return where a model was downloaded to by any version of ModelScope's package; None where it was not.

    Since 1.38 that is a folder for each revision, before one in which a dot of the name is written as three underscores.
    """
    owner, _, own = name.partition("/")
    cache, safe = modelscope_cache(), own.replace(".", "___")
    snapshots = cache / "models" / f"{owner}--{own}" / "snapshots"
    revisions = list(snapshots.iterdir()) if snapshots.is_dir() else []
    usual = [snapshots / "master", snapshots / "main"]
    before = [
        cache / part / owner / each for part in ("models", "hub/models", "", "hub") for each in (safe, own)
    ]
    # A revision of another name counts only where it is the one there is.
    candidates = (*usual, *(revisions if len(revisions) == 1 else ()), *before)
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def modelscope_fault(name: str) -> str | None:
    """Return why a model that was not downloaded cannot be had from ModelScope here, as a sentence; None where it can be tried."""
    if find_spec("modelscope") is None:
        return "the package that fetches it is not installed: pip install 'kapelle[modelscope]'"
    if name.count("/") != 1 or not all(name.split("/")):
        return "its names are OWNER/NAME"
    return None


def fetch_modelscope(name: str, *, weights: bool) -> Path:
    """Download a model, or without `weights` its settings and tokeniser; return its folder. Raises what the package raises."""
    from modelscope import snapshot_download

    return Path(snapshot_download(name, **({} if weights else {"allow_patterns": list(SETTINGS)})))
