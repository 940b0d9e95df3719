"""Creates a model card from the files of a run, with the algorithm, the settings, the training curve and the evaluation."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.errors import ConfigError, EngineError
from kapelle.runs.findings import measured, read_evaluated
from kapelle.runs.reader import read_evaluations
from kapelle.runs.summary import own_settings, settings_of
from kapelle.runtime.hub import TOKEN_SOURCES, HubUnreachable, get_token, hub_address, query_hub

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

ROWS = 20
"""The maximum number of rows of the training curve on a card."""

UNMEASURED = (
    "Not measured. Run `kapelle eval RUN` before the export to measure the team and, with the same "
    "number of tokens, one agent "
    "alone and a majority vote."
)


@dataclass(frozen=True, slots=True)
class Exported:
    """A policy in an export."""

    policy: str
    agents: Sequence[str]
    folder: str
    """The folder of the policy, relative to the export, or `.` if this is the only policy."""
    base: str
    form: str
    """The format of the policy, which is `peft`, `hf` or `gguf-ready`."""
    dtype: str


def model_card(
    run: Path, step: int, policies: Sequence[Exported], licence: str | None = None, *, team: bool = False
) -> str:
    """Return the model card for the policies of a run after `step` updates. Text is escaped, and paths are reduced to their names.

    The argument `licence` is the identifier of a licence on the Hub (such as `apache-2.0`). By default, the licence on
    the card of the base model is used, if it has one. The argument `team` states whether the export has a `team.yaml`,
    with which the whole team can be loaded.
    """
    settings = settings_of(run)
    name, algorithm = str(settings["name"]), str(settings["algorithm"]["name"])
    first = policies[0]
    lines = [
        *(_metadata(settings, policies, read_evaluated(run), licence), ""),
        *(f"# {_plain(name)}", ""),
        f"Trained with kapelle: {_plain(algorithm)} on {_plain(settings['environment']['name'])}, after {step} steps.",
        "",
    ]
    lines += _table(
        ("folder", "agents", "form", "type", "base"),
        [
            (each.folder, ", ".join(each.agents), each.form, each.dtype, _place(each.base))
            for each in policies
        ],
    )

    # How to load the first policy.
    if first.form in ("peft", "hf"):
        library, made = {
            "peft": ("peft", "AutoPeftModelForCausalLM"),
            "hf": ("transformers", "AutoModelForCausalLM"),
        }[first.form]
        lines += ["", "```python", f"from {library} import {made}"]
        lines += [f'model = {made}.from_pretrained("{first.folder}")', "```", ""]
    else:
        lines += ["", "```sh"]
        lines += [f"python convert_hf_to_gguf.py {first.folder} --outfile {first.policy}.gguf", "```", ""]

    if team:
        lines += [
            *("`team.yaml` in this folder loads the whole team:", "", "```sh"),
            *("kapelle chat .", "kapelle serve policy .", "kapelle eval ."),
            *("kapelle serve policy . --print vllm  # commands that serve each agent with vLLM", "```", ""),
        ]
    lines += ["## Evaluation at equal tokens", ""]
    evaluated = read_evaluated(run)
    if not evaluated:
        lines += [UNMEASURED, ""]
    else:
        row = evaluated[-1]
        rows = [("team", row.get("team", {}))]
        for each in [each for each in _listed(row.get("baselines")) if isinstance(each, Mapping)]:
            answers = each.get("answers", 1)
            agents = ", ".join(map(str, _listed(each.get("agents"))))
            rows.append((f"{agents} alone" if answers == 1 else f"{agents}, majority of {answers}", each))
        lines += [
            f"Evaluated after {row.get('steps')} steps on unseen problems of {_plain(row.get('environment'))}, with 95 % intervals.",
            "",
            *_table(
                ("who", "success", "interval", "scored", "tokens per problem"),
                [(who, *_measured(each)) for who, each in rows if isinstance(each, Mapping)],
            ),
            "",
        ]

    curve = read_evaluations(run)
    if curve:
        every = max(1, -(-len(curve) // ROWS))
        shown = [point for k, point in enumerate(reversed(curve)) if k % every == 0][::-1]
        lines += [
            *("## Curve", "", "Evaluations during training.", ""),
            *_table(
                ("step", "success", "interval", "scored", "tokens per problem"),
                [(str(point["step"]), *_measured(point)) for point in shown],
            ),
            "",
        ]

    lines += ["## Settings", "", "Settings that differ from the defaults.", ""]
    own = [
        (key, _place(value) if isinstance(value, str) else json.dumps(value))
        for key, (value, _) in own_settings(run).items()
    ]
    return "\n".join([*lines, *_table(("setting", "value"), own)])


def _metadata(
    settings: Mapping[str, Any],
    policies: Sequence[Exported],
    evaluated: Sequence[Mapping[str, Any]],
    licence: str | None,
) -> str:
    """Return the front matter between two lines of dashes, which the Hub uses to find a model and to show its results."""
    from huggingface_hub import ModelCardData

    environment = settings["environment"]
    hub = sorted({each.base for each in policies if each.base != "embedded" and _on_hub(each.base)})
    trained_on = str(environment.get("path") or "")
    results = []
    with suppress(KeyError, TypeError, AttributeError, ValueError):  # skip a damaged row
        results = eval_results(evaluated[-1:])
    data = ModelCardData(
        library_name="peft" if policies[0].form == "peft" else "transformers",
        pipeline_tag="text-generation",
        license=licence or next(iter(filter(None, map(licence_of, hub))), None),
        base_model=hub[0] if len(hub) == 1 else hub or None,
        datasets=[trained_on] if _on_hub(trained_on, owned=True) else None,
        tags=["kapelle", "multi-agent", "reinforcement-learning", str(settings["algorithm"]["name"])],
        model_name=str(settings["name"]) if results else None,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _on_hub(name: str, *, owned: bool = False) -> bool:
    """Return whether a name is a repository of the Hub and not a local file or folder; `owned` requires an owner."""
    owner = "" if owned else "?"
    return (
        bool(re.fullmatch(rf"([A-Za-z0-9][\w.-]*/){owner}[A-Za-z0-9][\w.-]*", name))
        and not Path(name).exists()
    )


def eval_results(rows: Sequence[Mapping[str, Any]]) -> list[EvalResult]:
    """Return the rates in evaluations (rows of `kapelle eval --json`) as results for the Hub, on the split `test`."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=own or row["environment"],
            dataset_name=own or row["environment"],
            dataset_split="test",
            metric_type=metric,
            metric_name=metric if error is None else f"{metric} (± {error:.4f} standard error)",
            metric_value=round(value, 6),
        )
        for row in rows
        for own, metric, value, error in measured(row)
    ]


def licence_of(base: str) -> str | None:
    """Return the licence on the card of a base model in the local cache of the Hub, or None. No request is sent."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    card = try_to_load_from_cache(base, "README.md")
    if not isinstance(card, str):
        return None
    with suppress(OSError, ValueError):
        found = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict().get("license")
        return found if isinstance(found, str) else None
    return None


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _measured(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    interval = row.get("interval")
    ends = (
        f"[{_number(interval[0])}, {_number(interval[1])}]"
        if isinstance(interval, list) and len(interval) == 2
        else "–"
    )
    scored = row.get("scored", row.get("problems"))
    return (
        _number(row.get("success")),
        ends,
        f"{scored} of {row.get('problems')}",
        _number(row.get("tokens"), 1),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(_plain(cell) for cell in row)} |" for row in rows)]


def _number(value: object, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) and not isinstance(value, bool) else "–"


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~", "."))


def _place(text: str) -> str:
    """Return the last component of a path on this machine. Other strings are returned unchanged."""
    return Path(text).name if _is_path(text) else text


def _plain(text: object) -> str:
    """Return a string on one line, escaped so that Markdown shows it literally."""
    words = " ".join(str(text).split())
    for mark in "\\`*_[]<>|#":
        words = words.replace(mark, f"\\{mark}")
    return words


# -------- Sending an export to a model hub with `huggingface_hub`: only with `--push`, and only the listed files.

NEVER = ("*.partial", ".*", "**/.*", "kapelle.json", "**/kapelle.json")
"""The files that are never uploaded."""


def check_push(repo: str, *, asking: bool = True) -> None:
    """Raise ConfigError or EngineError, within seconds, if an export cannot be uploaded.

    The hub is queried with the token. If `asking` is False, only the name and the environment variables are checked.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if repo.count("/") != 1:
        raise ConfigError(f"--push must be a repository of the form `OWNER/NAME`, but is '{repo}'.")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        why = " ".join(str(error).split()).removesuffix(f": '{repo}'.").rstrip(".")
        raise ConfigError(
            f"--push must be a repository of the form `OWNER/NAME`, but is '{repo}'. {why}."
        ) from None
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing is sent. Unset it, or remove --push.")
    if not asking:
        return
    if get_token() is None:
        raise ConfigError(
            f"Nothing was sent to '{repo}': there is no token. Set HF_TOKEN to a token with write "
            "access, or run `hf auth login`."
        )
    try:
        answer = query_hub("GET", "/api/whoami-v2")
    except HubUnreachable as error:
        raise EngineError(
            f"Nothing was sent to '{repo}': the hub cannot be reached ({error.reason})."
        ) from None
    if answer is not None and answer.status == 401:  # other hubs may not support this request
        raise ConfigError(
            f"Nothing was sent to '{repo}': {hub_address()} rejects the token that is set "
            f"({TOKEN_SOURCES}). Set a token with write access."
        )


def push(folder: Path, repo: str, *, public: bool = False) -> str:
    """Upload a folder to a model repository, which is created if it does not exist, and return the address of the repository.

    The hub is `HF_ENDPOINT` or the public hub. The token is `HF_TOKEN` or the token stored by `hf auth login`. Raises
    ConfigError if there is no token or the name is invalid, and EngineError if the hub cannot be reached or rejects the
    request. Both errors name the folder of the export.
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
        status, message = error.response.status_code, error.server_message
        meaning = {
            401: f"it rejects the token that is set ({TOKEN_SOURCES})",
            403: f"the token that is set ({TOKEN_SOURCES}) may not write there. Choose a repository of "
            "yours, or set a token with write access",
            404: f"the token that is set ({TOKEN_SOURCES}) can neither see nor create it",
        }.get(status, "the request failed")
        words = f" Its message: {' '.join(message.split())[:300].rstrip('.')}." if message else ""
        raise EngineError(
            f"The hub rejected '{repo}' ({status}): {meaning}.{words} Nothing was added. {kept}"
        ) from error
    except Exception as error:  # any HTTP client may raise its own errors
        what = f"Sending to '{repo}' was interrupted" if made else f"Nothing was sent to '{repo}'"
        raise EngineError(f"{what}: the hub cannot be reached ({type(error).__name__}). {kept}") from error
    return str(getattr(sent, "repo_url", None) or repo)
