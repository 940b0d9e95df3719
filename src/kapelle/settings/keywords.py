"""Keywords of `Trainer` and `kapelle.train` that do not exist: what was probably meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from kapelle.errors import ConfigError, did_you_mean
from kapelle.settings.messages import settings_named
from kapelle.settings.schema import RunConfig

ELSEWHERE = {
    "args": "training={'steps': …}",
    "learning_rate": "optimizer={'lr': …}",
    "max_completion_length": "team={'sampling': {'max_tokens': …}}",
    "num_generations": "algorithm={'name': 'grpo', 'group_size': …}",
    "per_device_train_batch_size": "training={'tasks_per_step': …}",
    "max_steps": "steps",
    "output_dir": "run_dir",
    "reward_fn": "reward",
    "reward_funcs": "reward",
    "train_dataset": "dataset",
}
"""Keywords of other libraries → ours."""
ONE_CALL = ("agents", "dataset", "eval_dataset", "reward", "rewards", "steps", *ELSEWHERE)
"""What is said to `kapelle.train`, and not to a `Trainer`."""


def check_keywords(call: Callable[..., Any], name: str, words: Iterable[str]) -> None:
    """Raise ConfigError for the first of the words that is neither a section of a run nor a keyword of the call."""
    kinds = inspect.signature(call).parameters.values()
    own = [each.name for each in kinds if each.kind is not each.VAR_KEYWORD and each.name != "self"]
    for word in words:
        if word not in RunConfig.model_fields:
            raise ConfigError(f"`{name}` has no keyword '{word}'.{_meant(word, own)}")


def _meant(word: str, own: Collection[str]) -> str:
    given = ELSEWHERE.get(word, "")
    if given and (given in own or "=" in given):
        return f" Did you mean `{given}`?"
    inside = [_as_keyword(key) for key in settings_named(word)]
    if "dataset" not in own and word in ONE_CALL:
        inside_too = f", or `{inside[0]}`" if inside else ""
        return f" `kapelle.train(model, dataset, reward)` takes it{inside_too}."
    hint = did_you_mean(word, [*own, *RunConfig.model_fields])
    if inside and not hint.startswith(" Did you mean"):
        hint = f" Did you mean {' or '.join(f'`{each}`' for each in inside)}?"
    return hint


def _as_keyword(setting: str) -> str:
    """Return a dotted setting as a keyword: `optimizer.lr` is `optimizer={'lr': …}`."""
    section, *inner = setting.split(".")
    value = "…"
    for key in reversed(inner):
        value = f"{{'{key}': {value}}}"
    return f"{section}={value}"
