"""Conversions of settings of other libraries whose units differ from kapelle's; `aliases.toml` refers to these functions.

Each function takes the value of another library's setting, the other settings of the run, and the name of the setting.
The return value is a mapping from the names of kapelle's settings to their values. Each function raises ValueError for
a value that has no counterpart in kapelle. TRL counts completions and optimiser steps, whereas kapelle counts tasks and
training steps. A task has `algorithm.group_size` completions, and a training step has `epochs · minibatches` optimiser
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from kapelle.errors import ConfigError
from kapelle.runtime.ranks import launched_rank
from kapelle.settings.base import Settings, fields_at, models_in
from kapelle.settings.overlays import COMMAND_LINE
from kapelle.settings.schema import RunConfig

DEFAULTS = {"engine": "local", "train_engine": "torch"}
"""The sections that a recipe may omit, with the default of their field `name`."""
BY_STEPS = ("max_steps", "trainer.total_training_steps")
BY_EPOCHS = ("num_train_epochs", "trainer.total_epochs", "epochs")
"""The names that set the length of a run in epochs in other libraries. If the same source sets both the epochs and the steps,
the steps take precedence, as in the other libraries."""
NOTHING: Any = object()
Found = Mapping[str, Any]


class PartialRun:
    """The settings of a run while the names from other libraries are being replaced by kapelle's names."""

    def __init__(
        self,
        values: dict[str, Any],
        origin: dict[str, str],
        order: Sequence[str],
        kinds: Mapping[str, Callable[[str], type]],
    ) -> None:
        """Create the settings from merged values, their sources, the order of the sources, and functions that find a section's class."""
        self.values, self.origin, self._kinds = values, origin, kinds
        self._order = {source: place for place, source in enumerate([*order, COMMAND_LINE])}
        self.theirs: dict[str, Any] = {}
        """The values that were set under names from other libraries, by name."""
        self.sources: dict[str, str] = {}
        """The source of each value that was set under a name from another library; empty for calls in Python."""

    def rank(self, source: str) -> int:
        """Return the position of a source in the order of merging; values of later sources replace those of earlier sources."""
        return self._order.get(source, 0)

    def source_of(self, path: str) -> str:
        """Return the name of the last source that set the given setting, or an empty string if no source is recorded."""
        found = [by for key, by in self.origin.items() if key == path or key.startswith(f"{path}.")]
        return max(found, key=self.rank, default="")

    def set(self, path: str) -> Any:
        """Return the value that was set for the setting at `path`, or `NOTHING` if its default applies."""
        at: Any = self.values
        for part in path.split("."):
            if isinstance(at, Settings) and part in at.model_fields_set:
                at = getattr(at, part)
            elif isinstance(at, Mapping) and part in at:
                at = at[part]
            else:
                return NOTHING
        return at

    def value(self, path: str) -> Any:
        """Return the value of a setting, which is its default if no value was set, or None if the run has no such setting."""
        place = next(filter(self.has, self._places(path)), path)
        found, key = self.set(place), place.rpartition(".")[2]
        fields = [each.model_fields[key] for each in self._classes(place) or () if key in each.model_fields]
        return fields[0].get_default() if found is NOTHING and fields else None if found is NOTHING else found

    def has(self, path: str, *, unknown: bool = True) -> bool:
        """Return whether the class of a section has the given setting, or `unknown` if the section's class is not known."""
        kinds, key = self._classes(path), path.rpartition(".")[2]
        return unknown if kinds is None else any(key in each.model_fields for each in kinds)

    def first(self, *paths: str) -> str:
        """Return the first of the given settings that this run has. Raises ValueError if the run has none of them."""
        for path in self._places(*paths):
            if self.has(path):
                return path
        section = paths[0].partition(".")[0]
        named = self.value(f"{section}.name") or DEFAULTS.get(section)
        raise ValueError(f"`{section}.name: {named}` has no {' and no '.join(f'`{path}`' for path in paths)}")

    def lacks(self, *paths: str) -> bool:
        """Return whether this run has none of the given settings."""
        return not any(map(self.has, self._places(*paths)))

    def takes_null(self, path: str) -> bool:
        """Return whether the given setting may be null."""
        fields = fields_at(self._classes(path) or [], path.rpartition(".")[2])
        return any(type(None) in get_args(annotation) for annotation in fields)

    def number(self, name: str, default: float = 1) -> float:
        """Return the number that was set under another library's name, or `default` if the value is null or missing."""
        found = self.theirs.get(name)
        return number(default if found is None else found, name)

    def _places(self, *paths: str) -> list[str]:
        """Return the given paths and, for CORY, the same paths inside `algorithm.base`, which holds the settings of the base algorithm."""
        inner = [path.replace(".", ".base.", 1) for path in paths if path.startswith("algorithm.")]
        return [*paths, *inner] if self.set("algorithm.base.name") is not NOTHING else [*paths]

    def _classes(self, path: str) -> Sequence[type[Settings]] | None:
        """Return the classes that may contain the setting at a path, or None if the section's `name` does not identify a class."""
        section, *inner = path.split(".")
        if not inner:
            return [RunConfig]
        if section not in self._kinds:
            kinds = models_in(RunConfig.model_fields[section].annotation)
        else:
            at, given = section, self.values.get(section)
            if section == "algorithm" and inner[0] == "base" and len(inner) > 1:
                at, inner, given = "algorithm.base", inner[1:], None
            name = self.set(f"{at}.name")
            if isinstance(given, Settings):
                kinds = [type(given)]
            else:
                try:
                    found = self._kinds[section](DEFAULTS.get(section, "") if name is NOTHING else str(name))
                except ConfigError:
                    return None  # reported when the section is created
                kinds = [found] if issubclass(found, Settings) else []
                if not kinds:
                    return None
        for part in inner[:-1]:
            kinds = [model for annotation in fields_at(kinds, part) for model in models_in(annotation)]
        return kinds


def number(value: Any, name: str) -> float:
    """Convert a value to a number, because YAML reads `1e-5` as a string. Raises ValueError if the value is not a number."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` cannot be {value!r}: write a number") from None


def _whole(count: float, of: str, by: str) -> int:
    if count != int(count) or count < 1:
        raise ValueError(f"{of} are {count:g} {by}; set numbers for which this is an integer")
    return int(count)


def _updates(run: PartialRun) -> float:
    """Return the number of optimiser steps in one training step."""
    counts = [f"algorithm.{name}" for name in ("epochs", "minibatches")]
    return math.prod(number(run.value(path) or 1, path) for path in counts)


def _group(run: PartialRun) -> float:
    """Return the number of completions per task. DPO pairs and SFT rows have one completion per task."""
    if run.value("algorithm.name") in ("dpo", "sft"):
        return 1
    return number(run.value("algorithm.group_size") or 1, "algorithm.group_size")


# -------- The size of a step


def tasks_of_devices(value: Any, run: PartialRun, name: str) -> Found:
    """Return the number of tasks per step, computed from the batch size per device, the number of devices and gradient accumulation."""
    started = launched_rank()
    ranks = int(run.number("num_processes")) if started is None else started.size
    each, accumulated = number(value, name) * ranks, run.number("gradient_accumulation_steps")
    batches = run.number("steps_per_generation", accumulated)
    if accumulated < 1:
        raise ValueError(
            f"`gradient_accumulation_steps` cannot be {accumulated:g}: set a number of at least 1"
        )
    generated = run.theirs.get("generation_batch_size")
    if generated is not None:
        if run.theirs.get("steps_per_generation") is not None:
            raise ValueError("`generation_batch_size` and `steps_per_generation` cannot be combined")
        of = f"{generated} completions generated at once, {each:g} in each batch ({value} per device × {ranks} processes),"
        batches = _whole(number(generated, "generation_batch_size") / each, of, "batches")
    if batches < accumulated:
        # One update learns from several generations, between which weights do not change, so they count as one generation.
        _whole(accumulated / batches, f"{accumulated:g} accumulated batches, {batches:g} at once,", "generations")  # fmt: skip
        if _updates(run) != 1:
            raise ValueError(
                "several updates on several generations have no counterpart. Raise `steps_per_generation` to `gradient_accumulation_steps`"
            )
        batches = accumulated
    count, group, parts = each * batches, _group(run), batches / accumulated
    of = f"{count:g} completions of a step ({value} per device × {batches:g} batches × {ranks} processes), {group:g} of each task,"
    tasks = {"training.tasks_per_step": _whole(count / group, of, "tasks")}
    return tasks if parts == 1 else {**tasks, "algorithm.minibatches": _whole(parts, "the updates of one generation", "minibatches")}  # fmt: skip


def part_of_batch_size(value: Any, run: PartialRun, name: str) -> Found:
    """Return no settings if `per_device_train_batch_size` is set, because the conversion of that setting already includes this factor."""
    if "per_device_train_batch_size" in run.theirs:
        return {}
    raise ValueError(
        "it needs `per_device_train_batch_size`. Set that too, or set `training.tasks_per_step`; "
        "`training.microbatch_tokens` limits memory"
    )


def tasks_of_generation(value: Any, run: PartialRun, name: str) -> Found:
    """Return the number of tasks per step, computed from the number of completions that are generated together."""
    if "per_device_train_batch_size" in run.theirs:
        return {}
    group = _group(run)
    of = f"{value} completions, {group:g} of each task,"
    return {"training.tasks_per_step": _whole(number(value, name) / group, of, "tasks")}


def tasks_of_turns(value: Any, run: PartialRun, name: str) -> Found:
    """Return the number of tasks per step, computed from the number of turns in CoMLRL's buffer."""
    turns = run.number("num_turns")
    return {"training.tasks_per_step": _whole(number(value, name) / turns, f"{value} samples of {turns:g} turns", "tasks")}  # fmt: skip


def minibatches(value: Any, run: PartialRun, name: str) -> Found:
    """Return the number of minibatches, computed from the number of prompts in each minibatch."""
    tasks, size = number(run.value("training.tasks_per_step"), "data.train_batch_size"), number(value, name)
    if size < 1:
        raise ValueError(f"`{name}` cannot be {value}: set a number of prompts of at least 1")
    return {"algorithm.minibatches": _whole(tasks / size, f"{tasks:g} tasks of a step in parts of {size:g}", "parts")}  # fmt: skip


# -------- The length of a run


def epochs(value: Any, run: PartialRun, name: str) -> Found:
    """Return the number of epochs, or no settings if the same source or a later source sets a number of steps."""
    rank = run.rank(run.sources[name])
    counted = [each for each in BY_STEPS if run.theirs.get(each, -1) not in (None, -1)]
    return {} if any(run.rank(run.sources[each]) >= rank for each in counted) else {"training.epochs": value}


def steps(value: Any, run: PartialRun, name: str, of_batches: bool = False) -> Found:
    """Return the number of training steps, computed from optimiser steps or batches, unless a later source sets a number of epochs."""
    rank, each = run.rank(run.sources[name]), 1 if of_batches else _updates(run)
    if any(run.rank(run.sources[other]) > rank for other in BY_EPOCHS if other in run.theirs):
        return {}
    count = number(value, name) / each
    of = f"{value} optimiser steps, {each:g} in each step,"
    by_epochs = run.set("training.epochs") not in (NOTHING, None)
    found = {"training.steps": value if each == 1 else _whole(count, of, "steps")}
    return {**found, "training.epochs": None} if by_epochs else found


def warmup_share(value: Any, run: PartialRun, name: str, steps: str = "") -> Found:
    """Return the warmup as a share of all steps if the run's length is set in epochs, and otherwise as a number of optimiser steps.

    If the setting named in `steps` has a value, that value takes precedence.
    """
    share = number(value, name)
    if not 0 <= share < 1:
        raise ValueError(
            f"`{name}` cannot be {value}: it must be a share of all steps, at least 0 and below 1"
        )
    if steps and run.number(steps, 0) > 0:
        return {}
    if share and run.value("training.epochs") is not None:
        return {"optimizer.warmup_share": share}
    total = number(run.value("training.steps"), "training.steps") * _updates(run)
    return {"optimizer.warmup_steps": math.ceil(share * total)}


def warmup_steps(value: Any, run: PartialRun, name: str) -> Found:
    """Return the number of warmup steps. As in transformers 5, a value below 1 is a share of all optimiser steps."""
    is_share = isinstance(value, float) and 0 < value < 1
    return warmup_share(value, run, name) if is_share else {"optimizer.warmup_steps": value}


def warmup_batches(value: Any, run: PartialRun, name: str) -> Found:
    """Return the number of warmup steps (in optimiser steps), computed from a number of batches."""
    return {"optimizer.warmup_steps": int(number(value, name) * _updates(run))}


def critic_warmup(value: Any, run: PartialRun, name: str) -> Found:
    """Return the number of steps in which only the critics are trained. The value in verl is larger by one, because verl counts from 1."""
    return {"training.critic_warmup": max(0, int(number(value, name)) - 1)}


def evaluation_steps(value: Any, run: PartialRun, name: str) -> Found:
    """Return the number of steps between evaluations. The setting `eval_strategy: no`, which YAML reads as false, takes precedence."""
    return {} if run.theirs.get("eval_strategy") in ("no", False) else {"evaluation.every": value}


# -------- Losses and optimisers


def both_sides(value: Any, run: PartialRun, name: str) -> Found:
    """Return the lower and upper clipping bounds of the probability ratio, except a bound that is set under its own name."""
    own = {
        "algorithm.loss.clip_low": f"{name}_low",
        "algorithm.loss.clip_high": f"{name}_high",
    }
    return {run.first(path): value for path, side in own.items() if run.theirs.get(side) is None}


def switched(value: Any, run: PartialRun, name: str, switch: str, coefficient: str, default: float) -> Found:
    """Return the coefficient that a switch enables, or 0 if the switch is off."""
    paths: tuple[str, ...] = ("algorithm.loss.kl_coefficient",)
    if "reward" in switch:
        paths = ("algorithm.gae.kl_in_reward", "algorithm.kl_in_reward")
    chosen = run.number(coefficient, default) if run.theirs.get(switch) else 0.0
    return {} if not chosen and run.lacks(*paths) else {run.first(*paths): chosen}


def betas(value: Any, run: PartialRun, name: str) -> Found:
    """Return both decay rates of Adam."""
    first, second = run.value("optimizer.betas")
    return {"optimizer.betas": [run.theirs.get("adam_beta1", first), run.theirs.get("adam_beta2", second)]}


def adapters(value: Any, run: PartialRun, name: str) -> Found:
    """Return the adapter settings that a mapping or PEFT's LoraConfig describes."""
    given = value if isinstance(value, Mapping) else getattr(value, "__dict__", {"peft_type": value})
    options = ("use_rslora", "use_dora", "modules_to_save", "rank_pattern", "target_parameters")
    unsupported = [f"`{key}`" for key in options if given.get(key)]
    if unsupported or ("peft_type" in given and "r" not in given):
        without = f" without {' and '.join(unsupported)}" * bool(unsupported)
        raise ValueError(
            f"adapters are LoRA{without}: `team.lora` has `rank`, `alpha`, `dropout` and `targets`"
        )
    found = {
        "team.sharing": "lora",
        "team.lora.rank": given.get("r", 8),
        "team.lora.alpha": given.get("lora_alpha", 8),
        "team.lora.dropout": given.get("lora_dropout", 0.0),
    }
    targets = given.get("target_modules")
    if targets is not None:
        found["team.lora.targets"] = targets if isinstance(targets, str) else sorted(targets)
    return found


# -------- Everything else


def turns(value: Any, run: PartialRun, name: str) -> Found:
    """Return the number of turns, which is one more than the number of rounds of tool calls because the final answer is also a turn."""
    return {run.first("environment.max_turns"): value + 1 if type(value) is int else value}


def overlong_prompts(value: Any, run: PartialRun, name: str) -> Found:
    """Return `context` as the maximum prompt length, which means the model's context, or no settings if a number is set."""
    if value is not True:
        raise ValueError(f"{value!r} is neither true nor false")
    given = "data.max_prompt_length" in run.theirs or isinstance(run.set("tasks.max_prompt_tokens"), int)
    return {} if given else {"tasks.max_prompt_tokens": "context"}


def system(value: Any, run: PartialRun, name: str) -> Found:
    """Return a team of one agent with the given system message."""
    if run.set("team.agents") not in (NOTHING, 1):
        raise ValueError("this team has several agents: set `system` for each of them in `team.agents`")
    return {"team.agents": [{"name": "agent_0", "system": value}]}


def trackers(value: Any, run: PartialRun, name: str) -> Found:
    """Return a tracker for each given name, with the project name from the other library's settings."""
    names = value if isinstance(value, list | tuple) else [value]
    projects = [
        run.theirs[each]
        for each in ("trainer.project_name", "wandb_project", "project")
        if each in run.theirs
    ]
    own = {"project": projects[0]} if projects else {}
    return {"trackers": [{"name": each, **own} for each in names if each not in ("none", "", "console", "file")]}  # fmt: skip


def vllm_mode(value: Any, run: PartialRun, name: str) -> Found:
    """Return no settings if the address of a server is set; raises ValueError otherwise."""
    if value != "server" or run.set("engine.server") in (NOTHING, None, ""):
        raise ValueError("supported: `colocate`, and `server` with `engine.server`")
    return {}


def tensor_parallel_size(value: Any, run: PartialRun, name: str) -> Found:
    """Return the options of vLLM with the number of GPUs per copy of a model."""
    if run.theirs.get("actor_rollout_ref.rollout.name") == "sglang":
        return {}
    if run.value("engine.name") != "vllm":
        raise ValueError("it applies only to vLLM: set `engine.name: vllm` too")
    options = run.set("engine.options")
    own = {} if options is NOTHING else options
    return {"engine.options": {**own, "tensor_parallel_size": int(number(value, name))}}


def train_files(value: Any, run: PartialRun, name: str) -> Found:
    """Return the path of the training file, or the folder and the names of verl's training and validation files."""
    return _folder_of_files(run) or {run.first("environment.path"): _one_file(value)}


def val_files(value: Any, run: PartialRun, name: str) -> Found:
    """Return the path of the validation file, or the folder and the names of verl's training and validation files."""
    if not run.lacks("environment.eval_path"):
        return {"environment.eval_path": _one_file(value)}
    found = _folder_of_files(run)
    if found is None:
        raise ValueError(
            f"`environment.name: {run.value('environment.name')}` has no `environment.eval_path`. Put both "
            "files in one folder, or add this file to `evaluation.sets`"
        )
    return found


def _one_file(value: Any) -> Any:
    if isinstance(value, list) and len(value) != 1:
        raise ValueError("it lists several files. Set only one file, or combine environments with `mixture`")
    return value[0] if isinstance(value, list) else value


def _folder_of_files(run: PartialRun) -> Found | None:
    """Return the folder and the names of verl's two files, or None if the files are in different folders or no folder can be read."""
    # An environment in siiRL's format takes its questions from another environment.
    at = "environment" if run.set("environment.questions") is NOTHING else "environment.questions"
    if at == "environment" and (run.lacks(f"{at}.test") or not run.lacks(f"{at}.eval_path")):
        return None
    files = [_one_file(run.theirs.get(each)) for each in ("data.train_files", "data.val_files")]
    places = [each.rpartition("/") for each in files if isinstance(each, str)]
    if len(places) < 2 or places[0][0] != places[1][0] or not places[0][1]:
        return None
    return {f"{at}.path": places[0][0] or "/", f"{at}.train": places[0][2], f"{at}.test": places[1][2]}
