"""Settings by the names that other libraries have for them: `learning_rate` of TRL is read as `optimizer.lr`.

`TABLE` has every such name, with what it is called here. `read_aliases` replaces them in the settings of a run, in a recipe, on the
command line and in Python alike, when everything that was said is known: a name whose unit differs is converted by what the other
settings say, so that TRL's `per_device_train_batch_size`, which counts completions, becomes the number of tasks that have as many.
What cannot be said here is refused with the reason. docs/coming_from/names.md is made of the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

from kapelle.errors import EACH, ConfigError, did_you_mean
from kapelle.runtime.ranks import launched_rank
from kapelle.settings.base import Settings, models_in
from kapelle.settings.overlays import COMMAND_LINE, PLUGGED, leaves, merge, replace_origin
from kapelle.settings.schema import RunConfig

Convert = Callable[[Any, "Names"], Mapping[str, Any]]
"""A value under the other library's name, and everything else that was said → values by our names. ValueError says why it cannot be."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A setting's name in another library."""

    name: str
    """Theirs, dotted where they nest it."""
    ours: tuple[str, ...]
    """What it may become here, dotted; empty where it has no counterpart."""
    library: str
    """Whose name it is."""
    convert: Convert
    says: str = ""
    """How a value is converted, or why it is refused or left out."""


DEFAULTS = {"engine": "local", "train_engine": "torch"}
"""Sections that a recipe may leave out, and the `name` that they then get."""


class Names:
    """What was said of a run, by our names and by others, while aliases are read."""

    def __init__(
        self,
        values: dict[str, Any],
        origin: dict[str, str],
        order: Sequence[str],
        kinds: Mapping[str, Callable[[str], type]],
    ) -> None:
        """Take merged values and the source of each, sources in their order, and how the class of a section is found."""
        self.values, self.origin, self._kinds = values, origin, kinds
        self._order = {source: place for place, source in enumerate([*order, COMMAND_LINE])}
        self.theirs: dict[str, Any] = {}
        """Values by names of other libraries."""
        self.sources: dict[str, str] = {}
        """Where each of these was set; empty in Python."""

    def rank(self, source: str) -> int:
        """Return how late a source is laid over the others."""
        return self._order.get(source, 0)

    def source_of(self, path: str) -> str:
        """Return which source set a setting, the last one where several did; empty where none is recorded."""
        found = [by for key, by in self.origin.items() if key == path or key.startswith(f"{path}.")]
        return max(found, key=self.rank, default="")

    def set(self, path: str) -> Any:
        """Return what was set by our name; `NOTHING` where a default holds."""
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
        """Return a setting of ours as it will hold: what was set, or the default of its class."""
        found = self.set(path)
        if found is not NOTHING:
            return found
        if (
            path.startswith("algorithm.")
            and not self.has(path)
            and self.has(inner := path.replace(".", ".base.", 1))
        ):
            return self.value(inner)
        kinds = self._classes(path)
        key = path.rpartition(".")[2]
        return next(
            (each.model_fields[key].get_default() for each in kinds if key in each.model_fields), None
        )

    def has(self, path: str, *, unknown: bool = True) -> bool:
        """Return whether the class of a section has a setting; `unknown` where no class is named."""
        kinds, key = self._classes(path), path.rpartition(".")[2]
        return any(key in each.model_fields for each in kinds) if kinds else unknown

    def first(self, *paths: str) -> str:
        """Return the first of our settings that this run has; ValueError where it has none."""
        # What CORY plays with stands in its `base`, as everything that other algorithms have.
        places = [*paths]
        if self.set("algorithm.base.name") is not NOTHING:
            places += [each.replace(".", ".base.", 1) for each in paths if each.startswith("algorithm.")]
        for path in places:
            if self.has(path):
                return path
        section = paths[0].partition(".")[0]
        raise ValueError(
            f"`{section}.name: {self.set(f'{section}.name')}` has no {' and no '.join(f'`{p}`' for p in paths)}"
        )

    def lacks(self, *paths: str) -> bool:
        """Return whether this run has none of our settings."""
        try:
            self.first(*paths)
        except ValueError:
            return True
        return False

    def takes_null(self, path: str) -> bool:
        """Return whether one of our settings may be null."""
        key = path.rpartition(".")[2]
        fields = [each.model_fields[key] for each in self._classes(path) if key in each.model_fields]
        return any(type(None) in get_args(field.annotation) for field in fields)

    def number(self, name: str, default: float = 1) -> float:
        """Return a number by another library's name."""
        return number(self.theirs.get(name, default), name)

    def _classes(self, path: str) -> list[type[Settings]]:
        """Return the classes of settings that hold a path's last part; none where a section's `name` is missing."""
        section, *inner = path.split(".")
        if not inner:
            return [RunConfig]
        if section in self._kinds:
            given = self.values.get(section)
            name = self.set(f"{section}.name")
            if section == "algorithm" and inner[0] == "base" and len(inner) > 1:
                given, name, inner = None, self.set("algorithm.base.name"), inner[1:]
            name = DEFAULTS.get(section) if name is NOTHING else name
            if isinstance(given, Settings):
                kinds = [type(given)]
            elif isinstance(name, str):
                try:
                    found = self._kinds[section](name)
                except ConfigError:
                    return []  # said when the section is made
                kinds = [found] if issubclass(found, Settings) else []
            else:
                return []
        else:
            kinds = models_in(RunConfig.model_fields[section].annotation)
        for part in inner[:-1]:
            fields = [each.model_fields[part].annotation for each in kinds if part in each.model_fields]
            kinds = [model for annotation in fields for model in models_in(annotation)]
            if not kinds:
                return [Settings]
        return kinds


NOTHING: Any = object()


def number(value: Any, name: str) -> float:
    """Return a number that YAML may have read as text (`1e-5`); ValueError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` cannot be {value!r}: write a number") from None


# -------- Conversions


def _is(*paths: str, nothing: Sequence[Any] = ()) -> Convert:
    """The same value, under the first of these names that the run's algorithm, environment or workflow has.

    Where it has none of them, values that ask for nothing there are left out. So is null where ours cannot be null: theirs is unset.
    """

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        if names.lacks(*paths) and _among(value, (None, *nothing)):
            return {}
        path = names.first(*paths)
        return {} if value is None and not names.takes_null(path) else {path: value}

    return convert


def _among(value: Any, values: Sequence[Any]) -> bool:
    """Return whether a value is one of these; true and false are no numbers, and YAML reads `1e-5` as text."""
    return any(
        value is each
        or (None not in (value, each) and bool not in (type(value), type(each)) and _equal(value, each))
        for each in values
    )


def _only(*values: Any, why: str) -> Convert:
    """Values that ask for nothing are left out; others are refused with the reason."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        if _among(value, values):
            return {}
        raise ValueError(why)

    return convert


def _one_of(path: str, words: Mapping[Any, Any], instead: str = "") -> Convert:
    """Another word for the same thing."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        key = value.lower() if isinstance(value, str) else value
        if not isinstance(key, str | bool | int | None) or key not in words:
            listed = ", ".join(str(each) for each in words)
            raise ValueError(f"{value!r} has no counterpart here; of theirs these have: {listed}{instead}")
        found = words[key]
        if isinstance(found, Mapping):
            return found
        return {names.first(path): found}

    return convert


def _unless(path: str, *nothing: Any, becomes: Any = NOTHING) -> Convert:
    """The same value; those that mean "not set" there are left out, or become something."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        if any(value is each or (each is not None and value == each) for each in nothing):
            return {} if becomes is NOTHING else {names.first(path): becomes}
        return {names.first(path): value}

    return convert


def _rounds_of_calls(value: Any, names: Names) -> Mapping[str, Any]:
    """Rounds of calls become turns: the answer after the last round is a turn, too."""
    return _is("environment.max_turns")(value + 1 if type(value) is int else value, names)


def _left_out(value: Any, names: Names) -> Mapping[str, Any]:
    return {}


def _refused(why: str) -> Convert:
    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        raise ValueError(why)

    return convert


def _updates(names: Names) -> float:
    """Return the optimiser steps in one step of ours."""
    epochs, parts = names.value("algorithm.epochs"), names.value("algorithm.minibatches")
    return number(epochs or 1, "algorithm.epochs") * number(parts or 1, "algorithm.minibatches")


def _group(names: Names) -> float:
    """Return the completions of one task that a library counts one by one: a pair of DPO and a row of SFT count once."""
    if names.value("algorithm.name") in ("dpo", "sft"):
        return 1
    return number(names.value("algorithm.group_size") or 1, "algorithm.group_size")


def _whole(count: float, of: str, by: str) -> int:
    if count != int(count) or count < 1:
        raise ValueError(f"{of} are {count:g} {by}; give numbers that make it whole")
    return int(count)


def _completions(value: Any, names: Names) -> Mapping[str, Any]:
    """Return the tasks of a step, from completions per device, devices and accumulated batches."""
    started = launched_rank()
    ranks = 1 if started is None else started.size
    accumulated = names.number("gradient_accumulation_steps")
    batches = names.number("steps_per_generation", accumulated)
    if accumulated < 1:
        raise ValueError(
            f"`gradient_accumulation_steps` cannot be {accumulated:g}: it is a number of batches from 1"
        )
    count = number(value, "per_device_train_batch_size") * ranks * batches
    group = _group(names)
    said = f"{count:g} completions of a step ({value} per device × {batches:g} batches × {ranks} processes), {group:g} of each task,"
    tasks = _whole(count / group, said, "tasks")
    return {"training.tasks_per_step": tasks, **_parts(batches / accumulated)}


def _parts(parts: float) -> Mapping[str, Any]:
    return (
        {}
        if parts == 1
        else {"algorithm.minibatches": _whole(parts, "the updates of one generation", "minibatches")}
    )


def _accumulated(value: Any, names: Names) -> Mapping[str, Any]:
    number(value, "gradient_accumulation_steps")
    if "per_device_train_batch_size" in names.theirs:
        return {}  # multiplied there
    raise ValueError(
        "alone it says nothing here, as results do not depend on how a batch is split. Set `training.tasks_per_step`, or "
        "`per_device_train_batch_size` too; `training.microbatch_tokens` bounds memory"
    )


def _generated(value: Any, names: Names) -> Mapping[str, Any]:
    if "per_device_train_batch_size" in names.theirs:
        raise ValueError("`per_device_train_batch_size` says the same; leave one out")
    group = _group(names)
    return {"training.tasks_per_step": _whole(number(value, "generation_batch_size") / group, f"{value} completions, {group:g} of each task,", "tasks")}  # fmt: skip


_BY_STEPS = ("max_steps", "trainer.total_training_steps")
BY_EPOCHS = ("num_train_epochs", "trainer.total_epochs", "epochs")
"""Names of the two ways to say how long a run is. Where one source says both, steps count, as they do there."""


def _epochs(name: str) -> Convert:
    """Passes over the tasks, unless a number of steps counts."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        rank = names.rank(names.sources[name])
        if any(
            not _among(names.theirs.get(each), (None, -1)) and names.rank(names.sources[each]) >= rank
            for each in _BY_STEPS
        ):
            return {}
        return {"training.epochs": value}

    return convert


def _steps(name: str, *, optimiser: bool = True) -> Convert:
    """Optimiser steps, or batches → steps of ours, of which each may take several; -1 goes by epochs."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        count, each = -1 if value is None else number(value, name), _updates(names) if optimiser else 1
        rank = names.rank(names.sources[name])
        if count == -1 or any(
            names.rank(names.sources[other]) > rank for other in BY_EPOCHS if other in names.theirs
        ):
            return {}
        steps = (
            value
            if each == 1
            else _whole(count / each, f"{value} optimiser steps, {each:g} in each step,", "steps")
        )
        return {"training.steps": steps, **_by_steps(names)}

    return convert


def _by_steps(names: Names) -> Mapping[str, Any]:
    """Return what lets the number of steps count where a recipe goes by epochs; there too it comes first."""
    return {} if names.set("training.epochs") in (NOTHING, None) else {"training.epochs": None}


def _warmup(name: str, steps_name: str) -> Convert:
    """A share of all optimiser steps → their number, or the share where epochs say how many there are; a number of theirs comes first."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        share = 0.0 if value is None else number(value, name)
        if not 0 <= share < 1:
            raise ValueError(f"`{name}` cannot be {value}: it is a share of all steps, from 0 to below 1")
        if number(names.theirs.get(steps_name) or 0, steps_name) > 0:
            return {}
        if share and names.value("training.epochs") is not None:
            return {"optimizer.warmup_share": share}
        steps = number(names.value("training.steps"), "training.steps") * _updates(names)
        return {"optimizer.warmup_steps": math.ceil(share * steps)}

    return convert


def _betas(value: Any, names: Names) -> Mapping[str, Any]:
    first, second = names.value("optimizer.betas")
    return {
        "optimizer.betas": [names.theirs.get("adam_beta1", first), names.theirs.get("adam_beta2", second)]
    }


def _clip(upper: str) -> Convert:
    """One bound for both sides, unless the upper one has its own."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        low, high = names.first("algorithm.loss.clip_low"), names.first("algorithm.loss.clip_high")
        return {low: value} if names.theirs.get(upper) is not None else {low: value, high: value}

    return convert


def _trackers(silent: Sequence[str]) -> Convert:
    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        known = ("tensorboard", "wandb", "mlflow", "trackio")
        asked = [value] if isinstance(value, str) else list(value or ())
        kept = [each for each in asked if each not in silent]
        for each in kept:
            if each not in known:
                raise ValueError(f"{each!r} is no tracker of kapelle.{did_you_mean(str(each), known)}")
        project = names.theirs.get("trainer.project_name")
        more = {} if project is None else {"project": project}
        return {"trackers": [{"name": each, **more} for each in kept]}

    return convert


def _loss_type(value: Any, names: Names) -> Mapping[str, Any]:
    if names.value("algorithm.name") == "dpo":
        return _one_of("algorithm.kind", {"sigmoid": "dpo", "ipo": "ipo"})(value, names)
    at = "algorithm.loss"
    kinds: dict[Any, Any] = {
        "dapo": {f"{at}.aggregation": "token_mean"},
        "bnpo": {f"{at}.aggregation": "token_mean"},
        "grpo": {f"{at}.aggregation": "sequence_mean"},
        "cispo": {f"{at}.kind": "cispo"},
        "sapo": {f"{at}.kind": "sapo", f"{at}.aggregation": "sequence_mean"},
    }
    if value == "dr_grpo":
        length = names.value("team.sampling.max_tokens")
        kinds["dr_grpo"] = {f"{at}.aggregation": "sequence_sum", f"{at}.constant": length}
    names.first(f"{at}.aggregation")
    return _one_of(f"{at}.aggregation", kinds)(value, names)


def _kl(coefficient: str, switch: str, default: float) -> Convert:
    """A coefficient that counts only where a switch is on."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        return _switched("algorithm.loss.kl_coefficient", switch=switch, coefficient=coefficient, default=default, names=names)  # fmt: skip

    return convert


def _kl_in_reward(value: Any, names: Names) -> Mapping[str, Any]:
    paths = ("algorithm.gae.kl_in_reward", "algorithm.kl_in_reward")
    return _switched(*paths, switch="algorithm.use_kl_in_reward", coefficient="algorithm.kl_ctrl.kl_coef", default=0.001, names=names)  # fmt: skip


def _switched(*paths: str, switch: str, coefficient: str, default: float, names: Names) -> Mapping[str, Any]:
    """Return a coefficient, 0 while its switch is off: nothing to set where the run has no such setting."""
    chosen = names.theirs.get(coefficient, default) if names.theirs.get(switch, False) else 0.0
    if names.lacks(*paths) and _among(chosen, (0, None)):
        return {}
    return {names.first(*paths): chosen}


def _minibatches(value: Any, names: Names) -> Mapping[str, Any]:
    tasks, size = (
        number(names.value("training.tasks_per_step"), "data.train_batch_size"),
        number(value, "ppo_mini_batch_size"),
    )
    if size < 1:
        raise ValueError(f"`ppo_mini_batch_size` cannot be {value}: it is a number of prompts from 1")
    return {"algorithm.minibatches": _whole(tasks / size, f"{tasks:g} tasks of a step in parts of {size:g}", "parts")}  # fmt: skip


def _truth(path: str, yes: Any, no: Any = NOTHING, *, nothing: Sequence[bool] = ()) -> Convert:
    """True becomes a value, or is refused; false becomes another one, or what holds anyway.

    Where the run has no such setting, truths that ask for `nothing` there are left out.
    """

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")  # noqa: TRY004 (said to the user as what is wrong with a value)
        if value in nothing and names.lacks(path):
            return {}
        chosen = yes if value else no
        if callable(chosen):
            refused: Mapping[str, Any] = chosen(value, names)
            return refused
        return {} if chosen is NOTHING else {names.first(path): chosen}

    return convert


def _offload(value: Any, names: Names) -> Mapping[str, Any]:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")  # noqa: TRY004 (said to the user as what is wrong with a value)
    if value and names.lacks("train_engine.cpu_offload"):
        raise ValueError("it is `train_engine.cpu_offload`, of `fsdp`: set `train_engine.name: fsdp` too")
    return {"train_engine.cpu_offload": True} if value else {}


def _train_files(value: Any, names: Names) -> Mapping[str, Any]:
    found = _one_folder(names)
    return {names.first("environment.path"): value} if found is None else found


def _val_files(value: Any, names: Names) -> Mapping[str, Any]:
    if not names.lacks("environment.eval_path"):
        return {"environment.eval_path": value}
    found = _one_folder(names)
    if found is None:
        raise ValueError(
            f"`environment.name: {names.set('environment.name')}` has no `environment.eval_path`. Put both files in one folder, or add "
            "this one to `evaluation.sets`"
        )
    return found


def _one_folder(names: Names) -> Mapping[str, Any] | None:
    """Return the folder of verl's two files and what each is for, where the run's environment reads a folder; else None."""
    files = [names.theirs.get(each) for each in ("data.train_files", "data.val_files")]
    if names.lacks("environment.test") or not names.lacks("environment.eval_path"):
        return None
    places = [each.rpartition("/") for each in files if isinstance(each, str)]
    if len(places) < 2 or places[0][0] != places[1][0] or not places[0][1]:
        return None
    return {
        "environment.path": places[0][0] or "/",
        "environment.train": places[0][2],
        "environment.test": places[1][2],
    }


def _machines(name: str) -> Convert:
    """A number of machines or devices, which whoever starts the processes says here."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        count = number(value, name)
        if count < 1 or count != int(count):
            raise ValueError(f"`{name}` cannot be {value}: it is a whole number from 1")
        return {}

    return convert


def _vllm_size(value: Any, names: Names) -> Mapping[str, Any]:
    if number(value, "tensor_parallel_size") == 1:
        return {}
    if names.value("engine.name") != "vllm":
        raise ValueError("it is for vLLM: set `engine.name: vllm` too")
    options = names.set("engine.options")
    return {"engine.options": {**({} if options is NOTHING else options), "tensor_parallel_size": int(value)}}


def _buffer(value: Any, names: Names) -> Mapping[str, Any]:
    turns = names.number("num_turns")
    tasks = _whole(
        number(value, "rollout_buffer_size") / turns, f"{value} samples of {turns:g} turns", "tasks"
    )
    return {"training.tasks_per_step": tasks}


def _batches_of_warmup(value: Any, names: Names) -> Mapping[str, Any]:
    count = -1 if value is None else number(value, "lr_warmup_steps")
    return {} if count == -1 else {"optimizer.warmup_steps": int(count * _updates(names))}


def _lora_rank(value: Any, names: Names) -> Mapping[str, Any]:
    if number(value, "lora_rank") == 0:
        return {"team.sharing": "shared"}
    return {"team.lora.rank": value}


# -------- The table. Rows are read in this order: a conversion sees what the rows above it have set.


def _same(library: str, *rows: tuple[Any, ...]) -> Iterator[Alias]:
    """Yield names of settings that mean the same and count in the same unit: theirs, ours, values that ask for nothing."""
    for name, path, *nothing in rows:
        yield Alias(name, (path,), library, _is(path, nothing=nothing))


def _overlong(value: Any, names: Names) -> Mapping[str, Any]:
    """True leaves out what does not fit the model, unless a number says what is too long; false leaves out nothing more."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")  # noqa: TRY004 (said to the user as what is wrong with a value)
    path = "tasks.max_prompt_tokens"
    given = "data.max_prompt_length" in names.theirs or isinstance(names.set(path), int)
    return {path: "context"} if value and not given else {}


def _ignored(library: str, why: str, *names: str) -> Iterator[Alias]:
    """Yield names that change nothing here."""
    for name in names:
        yield Alias(name, (), library, _left_out, why)


def _every() -> Iterator[Alias]:
    """What kapelle itself calls by a short name."""
    yield Alias(
        "epochs", ("training.epochs",), "kapelle", _epochs("epochs"), "passes over the tasks of training"
    )


def _trl() -> Iterator[Alias]:
    """Names of TRL, and of the transformers and PEFT arguments that come with it."""
    yield Alias("use_vllm", ("engine.name",), "TRL", _truth("engine.name", "vllm"), "true is `vllm`")
    yield from _same(
        "TRL",
        ("model_name_or_path", "model.path"),
        ("dataset_name", "environment.path"),
        ("learning_rate", "optimizer.lr"),
        ("num_generations", "algorithm.group_size"),
        ("max_completion_length", "team.sampling.max_tokens"),
        ("temperature", "team.sampling.temperature"),
        ("top_p", "team.sampling.top_p"),
        ("num_iterations", "algorithm.epochs", 1),
        ("delta", "algorithm.loss.dual_clip"),
        ("importance_sampling_level", "algorithm.loss.level", "token"),
        ("entropy_coef", "algorithm.loss.entropy_coefficient", 0),
        ("off_policy_mask_threshold", "algorithm.loss.sequence_mask"),
        ("sapo_temperature_pos", "algorithm.loss.tau_positive"),
        ("sapo_temperature_neg", "algorithm.loss.tau_negative"),
        ("label_smoothing", "algorithm.label_smoothing", 0),
        ("weight_decay", "optimizer.weight_decay"),
        ("adam_epsilon", "optimizer.eps"),
        ("warmup_steps", "optimizer.warmup_steps"),
        ("gradient_checkpointing", "training.gradient_checkpointing"),
        ("tf32", "model.tf32"),
        ("lora_r", "team.lora.rank"),
        ("lora_alpha", "team.lora.alpha"),
        ("lora_dropout", "team.lora.dropout"),
        ("lora_target_modules", "team.lora.targets"),
        ("save_total_limit", "checkpoint.keep"),
        ("save_steps", "checkpoint.every"),
        ("eval_steps", "evaluation.every"),
        ("run_name", "name"),
    )
    yield Alias("max_prompt_length", ("tasks.max_prompt_tokens",), "TRL", _is("tasks.max_prompt_tokens"), "a task with a longer prompt is left out; none is cut")  # fmt: skip
    yield Alias("max_tool_calling_iterations", ("environment.max_turns",), "TRL", _rounds_of_calls, "one more here: it counts the answer after the last calls too")  # fmt: skip
    yield Alias("top_k", ("team.sampling.top_k",), "TRL", _unless("team.sampling.top_k", None, -1, becomes=0), "no top-k is 0 here")  # fmt: skip
    yield Alias("beta", ("algorithm.loss.kl_coefficient", "algorithm.beta"), "TRL", _is("algorithm.beta", "algorithm.loss.kl_coefficient", nothing=(0,)), "the penalty's coefficient; with `dpo` its β")  # fmt: skip
    yield Alias("epsilon", ("algorithm.loss.clip_low", "algorithm.loss.clip_high"), "TRL", _clip("epsilon_high"), "both, unless `epsilon_high` is given")  # fmt: skip
    yield Alias(
        "epsilon_high", ("algorithm.loss.clip_high",), "TRL", _unless("algorithm.loss.clip_high", None)
    )
    yield Alias("loss_type", ("algorithm.loss.aggregation", "algorithm.loss.kind", "algorithm.kind"), "TRL", _loss_type, "`dapo` and `bnpo`: `token_mean`; `grpo`: `sequence_mean`; `dr_grpo`: `sequence_sum` over `team.sampling.max_tokens`; `cispo`, `sapo`; of `dpo`: `sigmoid`, `ipo`")  # fmt: skip
    yield Alias("scale_rewards", ("algorithm.scale",), "TRL", _one_of("algorithm.scale", {True: "std", "group": "std", False: "none", "none": "none"}, ". For `batch` set `algorithm.name: reinforce_plus_plus`"), "`group` is `std`")  # fmt: skip
    yield Alias("mask_truncated_completions", ("algorithm.truncated",), "TRL", _truth("algorithm.truncated", "mask", "keep", nothing=(False,)), "true is `mask`")  # fmt: skip
    # Completions → tasks: the group's size is known by now.
    yield Alias("per_device_train_batch_size", ("training.tasks_per_step", "algorithm.minibatches"), "TRL", _completions, "it counts completions: times `gradient_accumulation_steps` and processes, divided by `num_generations`")  # fmt: skip
    yield Alias("gradient_accumulation_steps", ("training.tasks_per_step",), "TRL", _accumulated, "multiplied into `per_device_train_batch_size`")  # fmt: skip
    yield Alias("steps_per_generation", ("algorithm.minibatches",), "TRL", _accumulated, "multiplied into `per_device_train_batch_size` in place of `gradient_accumulation_steps`; their quotient is `algorithm.minibatches`")  # fmt: skip
    yield Alias("generation_batch_size", ("training.tasks_per_step",), "TRL", _generated, "it counts completions: divided by `num_generations`")  # fmt: skip
    yield Alias("num_train_epochs", ("training.epochs",), "TRL", _epochs("num_train_epochs"), "passes over the tasks; `max_steps` comes first")  # fmt: skip
    yield Alias("max_steps", ("training.steps",), "TRL", _steps("max_steps"), "optimiser steps: divided by those in one step of ours; -1 goes by epochs")  # fmt: skip
    yield Alias("warmup_ratio", ("optimizer.warmup_steps", "optimizer.warmup_share"), "TRL", _warmup("warmup_ratio", "warmup_steps"), "a share of all optimiser steps; with epochs it is `optimizer.warmup_share`")  # fmt: skip
    yield Alias("adam_beta1", ("optimizer.betas",), "TRL", _betas, "the first of two")
    yield Alias("adam_beta2", ("optimizer.betas",), "TRL", _betas, "the second of two")
    yield Alias("max_grad_norm", ("optimizer.max_grad_norm",), "TRL", _unless("optimizer.max_grad_norm", 0, becomes=None), "0 is null here")  # fmt: skip
    yield Alias("lr_scheduler_type", ("optimizer.schedule",), "TRL", _one_of("optimizer.schedule", {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}))  # fmt: skip
    eight = dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit")
    paged = dict.fromkeys(("paged_adamw_8bit", "paged_adamw_bnb_8bit"), "paged_adamw_8bit")
    plain = dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused"), "adamw")
    yield Alias("optim", ("optimizer.name",), "TRL", _one_of("optimizer.name", plain | eight | paged), "`adamw_torch` is `adamw`")  # fmt: skip
    yield Alias("bf16", ("model.dtype",), "TRL", _truth("model.dtype", "bfloat16"), "true is `bfloat16`")
    yield Alias("fp16", ("model.dtype",), "TRL", _truth("model.dtype", "float16"), "true is `float16`")
    for name in ("dtype", "torch_dtype"):
        yield Alias(name, ("model.dtype",), "TRL", _one_of("model.dtype", {each: each for each in ("float32", "bfloat16", "float16")}))  # fmt: skip
    yield Alias("load_in_4bit", ("model.quantization",), "TRL", _truth("model.quantization", "nf4"), "true is `nf4`")  # fmt: skip
    yield Alias("load_in_8bit", (), "TRL", _truth("model.quantization", _refused("frozen weights are held in 4 bits here (`model.quantization: nf4`) or whole")), "true is refused: `model.quantization: nf4` has 4 bits")  # fmt: skip
    yield Alias("use_peft", ("team.sharing",), "TRL", _truth("team.sharing", "lora", "shared"), "true is `lora`, false `shared`: all weights")  # fmt: skip
    yield Alias("vllm_mode", (), "TRL", _one_of("engine.server", {"colocate": {}}, ". For a server set `engine.server`"), "`colocate` is the default; for a server set `engine.server`")  # fmt: skip
    yield Alias("vllm_tensor_parallel_size", ("engine.options",), "TRL", _vllm_size, "`{tensor_parallel_size: N}`")  # fmt: skip
    yield Alias("report_to", ("trackers",), "TRL", _trackers(("none", "")), "a name or a list; `none` is no tracker; kept on this machine unless `trackers.0.offline: false`")  # fmt: skip
    yield Alias("sync_ref_model", ("algorithm.reference_every",), "TRL", _truth("algorithm.reference_every", _refused("theirs mixes the policy into the reference. Here `algorithm.reference_every: N` copies it every N steps")), "true is refused: `algorithm.reference_every` copies, theirs mixes")  # fmt: skip
    yield Alias("eval_strategy", ("evaluation.every",), "TRL", _one_of("evaluation.every", {"steps": {}, "no": 0}, ". Set `evaluation.every`, in steps"), "`no` is 0")  # fmt: skip
    yield Alias("save_strategy", (), "TRL", _one_of("checkpoint.every", {"steps": {}}, ". Set `checkpoint.every`, in steps"), "checkpoints are always kept")  # fmt: skip
    yield Alias("min_p", (), "TRL", _only(None, 0, why="`team.sampling.top_p` and `team.sampling.top_k` cut what is sampled from"), "unset alone: there are `top_p` and `top_k`")  # fmt: skip
    yield Alias("repetition_penalty", (), "TRL", _only(None, 1, why="nothing is sampled with a penalty here, so that what trains has the probabilities that were sampled"), "1 alone")  # fmt: skip
    yield Alias("push_to_hub", (), "TRL", _truth("", _refused("`kapelle export RUN --push OWNER/NAME` sends a run's weights with a model card")), "false alone: `kapelle export RUN --push OWNER/NAME` sends")  # fmt: skip
    yield Alias("use_liger_kernel", (), "TRL", _truth("", _refused("`model.kernels: auto` takes what is installed")), "false alone: `model.kernels`")  # fmt: skip
    yield Alias("deepspeed", (), "TRL", _only(None, "", why="several processes are `train_engine.name: fsdp` or `ddp`, started by `--launch torchrun --processes N`"), "unset alone: `train_engine.name: fsdp`")  # fmt: skip
    yield from _ignored("TRL", "every step is recorded", "logging_steps", "logging_strategy", "logging_first_step", "log_completions", "log_on_each_node", "num_completions_to_print")  # fmt: skip
    yield from _ignored("TRL", "evaluations take as much at once as fits", "per_device_eval_batch_size")
    yield from _ignored("TRL", "nothing here depends on it", "remove_unused_columns", "disable_tqdm", "dataloader_num_workers", "dataloader_pin_memory", "gradient_checkpointing_kwargs", "ddp_find_unused_parameters", "ds3_gather_for_generation")  # fmt: skip
    yield from _ignored("TRL", "`engine.kv_gib` bounds vLLM's cache, in GiB", "vllm_gpu_memory_utilization")


def _comlrl() -> Iterator[Alias]:
    """Names of CoMLRL that TRL has not."""
    yield from _same(
        "CoMLRL",
        ("num_agents", "team.agents"),
        ("agent_learning_rate", "optimizer.lr"),
        ("critic_learning_rate", "optimizer.critic_lr"),
        ("joint_mode", "algorithm.joint"),
        ("num_turns", "workflow.rounds"),
        ("discount", "algorithm.gae.gamma_turn", 1),
        ("max_new_tokens", "team.sampling.max_tokens"),
        ("value_clip_range", "algorithm.value_loss.clip"),
        ("value_loss_coef", "algorithm.value_loss.coefficient"),
        ("dpo_beta", "algorithm.beta"),
        ("preference_num_candidates", "algorithm.group_size"),
        ("eval_interval", "evaluation.every"),
        ("eval_num_samples", "evaluation.problems_while_training"),
    )
    yield Alias("advantage_normalization", ("algorithm.scale",), "CoMLRL", _truth("algorithm.scale", "std", "none"), "true is `std`")  # fmt: skip
    yield Alias("advantage_mode", (), "CoMLRL", _one_of("algorithm.name", {"mean": {}}, ". For others set `algorithm.name`: `rloo`, `remax`"), "`mean` is the default")  # fmt: skip
    yield Alias("reference_kl_enabled", ("algorithm.loss.kl_coefficient",), "CoMLRL", _kl("reference_kl_coef", "reference_kl_enabled", 0.1), "false is 0")  # fmt: skip
    yield Alias("reference_kl_coef", ("algorithm.loss.kl_coefficient",), "CoMLRL", _kl("reference_kl_coef", "reference_kl_enabled", 0.1), "0 unless `reference_kl_enabled`")  # fmt: skip
    yield Alias("rollout_buffer_size", ("training.tasks_per_step",), "CoMLRL", _buffer, "it counts turns: divided by `num_turns`")  # fmt: skip
    yield Alias("parallel_training", (), "CoMLRL", _one_of("team", {"none": {}, None: {}}, ". Set `team.agents[].weights.device`"), "`none`; otherwise `team.agents[].weights.device`")  # fmt: skip


def _verl() -> Iterator[Alias]:
    """Names of verl, dotted."""
    actor, rollout, model = (
        "actor_rollout_ref.actor",
        "actor_rollout_ref.rollout",
        "actor_rollout_ref.model",
    )
    group = {
        "algorithm.name": "reinforce_plus_plus",
        "algorithm.baseline": "group",
    }  # compares attempts: `rollout.n` says how many
    estimators: dict[str, Any] = {"gae": "ppo", "reinforce_plus_plus_baseline": group}
    estimators |= {each: each for each in ("grpo", "rloo", "remax", "opo", "reinforce_plus_plus")}
    yield Alias("algorithm.adv_estimator", ("algorithm.name",), "verl", _one_of("algorithm.name", estimators), "`gae` is `ppo`; others by the same name")  # fmt: skip
    yield Alias(f"{rollout}.name", ("engine.name",), "verl", _one_of("engine.name", {"vllm": "vllm", "hf": "local"}), "`hf` is `local`")  # fmt: skip
    yield Alias(f"{actor}.strategy", ("train_engine.name",), "verl", _one_of("train_engine.name", {"fsdp": "fsdp", "fsdp2": "fsdp"}))  # fmt: skip
    yield from _same(
        "verl",
        (f"{model}.path", "model.path"),
        ("data.train_batch_size", "training.tasks_per_step"),
        ("data.max_response_length", "team.sampling.max_tokens"),
        (f"{rollout}.n", "algorithm.group_size"),
        (f"{rollout}.temperature", "team.sampling.temperature"),
        (f"{rollout}.top_p", "team.sampling.top_p"),
        (f"{actor}.ppo_epochs", "algorithm.epochs", 1),
        (f"{actor}.ppo_max_token_len_per_gpu", "training.microbatch_tokens"),
        (f"{actor}.clip_ratio_c", "algorithm.loss.dual_clip"),
        (f"{actor}.entropy_coeff", "algorithm.loss.entropy_coefficient", 0),
        (f"{actor}.optim.lr", "optimizer.lr"),
        (f"{actor}.optim.weight_decay", "optimizer.weight_decay"),
        (f"{actor}.grad_clip", "optimizer.max_grad_norm"),
        (f"{model}.lora_alpha", "team.lora.alpha"),
        (f"{model}.target_modules", "team.lora.targets"),
        (f"{model}.enable_gradient_checkpointing", "training.gradient_checkpointing"),
        (f"{rollout}.val_kwargs.n", "evaluation.samples"),
        (f"{rollout}.multi_turn.max_assistant_turns", "environment.max_turns"),
        (f"{rollout}.multi_turn.format", "environment.form"),
        ("algorithm.lam", "algorithm.gae.lam", 1),
        ("critic.optim.lr", "optimizer.critic_lr"),
        ("critic.model.path", "team.critic_model"),
        ("critic.cliprange_value", "algorithm.value_loss.clip"),
        ("trainer.experiment_name", "name"),
        ("trainer.val_before_train", "evaluation.before_and_after"),
        ("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    )
    yield Alias("data.train_files", ("environment.path", "environment.train"), "verl", _train_files, "beside `data.val_files` of the same folder: that folder, and the file in it")  # fmt: skip
    yield Alias("data.val_files", ("environment.eval_path", "environment.test"), "verl", _val_files, "of `rewarded`; of others the file of that name in the folder of both")  # fmt: skip
    yield from _same("verl", ("data.prompt_key", "environment.question_field", "prompt"))
    yield Alias("algorithm.gamma", ("algorithm.gae.gamma_token",), "verl", _is("algorithm.gae.gamma_token", nothing=(1,)), "of tokens; between turns it is `algorithm.gae.gamma_turn`")  # fmt: skip
    yield Alias("algorithm.norm_adv_by_std_in_grpo", ("algorithm.scale",), "verl", _truth("algorithm.scale", "std", "none", nothing=(True, False)), "true is `std`; of algorithms that compare attempts")  # fmt: skip
    for name in ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"):
        yield Alias(name, ("algorithm.gae.kl_in_reward", "algorithm.kl_in_reward"), "verl", _kl_in_reward, "the coefficient where `algorithm.use_kl_in_reward` is true, else 0")  # fmt: skip
    for name in (f"{actor}.use_kl_loss", f"{actor}.kl_loss_coef"):
        yield Alias(name, ("algorithm.loss.kl_coefficient",), "verl", _kl(f"{actor}.kl_loss_coef", f"{actor}.use_kl_loss", 0.001), "the coefficient where `use_kl_loss` is true, else 0")  # fmt: skip
    yield Alias(f"{actor}.kl_loss_type", ("algorithm.loss.kl_estimator",), "verl", _one_of("algorithm.loss.kl_estimator", {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}), "`low_var_kl` is `k3`, `mse` is `k2`")  # fmt: skip
    yield Alias(f"{actor}.clip_ratio", ("algorithm.loss.clip_low", "algorithm.loss.clip_high"), "verl", _clip(f"{actor}.clip_ratio_high"), "both, unless `clip_ratio_high` is given")  # fmt: skip
    yield from _same("verl", (f"{actor}.clip_ratio_low", "algorithm.loss.clip_low"), (f"{actor}.clip_ratio_high", "algorithm.loss.clip_high"))  # fmt: skip
    loss = "algorithm.loss"
    means: dict[str, Any] = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
    means["seq-mean-token-sum"] = {f"{loss}.aggregation": "sequence_sum", f"{loss}.constant": 1}
    yield Alias(f"{actor}.loss_agg_mode", (f"{loss}.aggregation",), "verl", _one_of(f"{loss}.aggregation", means), "`seq-mean-token-mean` is `sequence_mean`")  # fmt: skip
    yield Alias(f"{actor}.ppo_mini_batch_size", ("algorithm.minibatches",), "verl", _minibatches, "a size, in prompts, there; a number of parts here")  # fmt: skip
    yield Alias(f"{rollout}.top_k", ("team.sampling.top_k",), "verl", _unless("team.sampling.top_k", -1, becomes=0), "no top-k is 0 here")  # fmt: skip
    yield Alias(f"{rollout}.val_kwargs.do_sample", ("evaluation.greedy",), "verl", _truth("evaluation.greedy", False, True), "its opposite")  # fmt: skip
    yield Alias(f"{rollout}.tensor_model_parallel_size", ("engine.options",), "verl", _vllm_size, "`{tensor_parallel_size: N}`")  # fmt: skip
    yield Alias(f"{model}.lora_rank", ("team.lora.rank", "team.sharing"), "verl", _lora_rank, "0 is `team.sharing: shared`: all weights")  # fmt: skip
    yield Alias("data.max_prompt_length", ("tasks.max_prompt_tokens",), "verl", _is("tasks.max_prompt_tokens"), "a task with a longer prompt is left out")  # fmt: skip
    yield Alias("trainer.total_epochs", ("training.epochs",), "verl", _epochs("trainer.total_epochs"), "passes over the tasks; `trainer.total_training_steps` comes first")  # fmt: skip
    yield Alias("trainer.total_training_steps", ("training.steps",), "verl", _steps("trainer.total_training_steps", optimiser=False), "steps of one batch each, as here")  # fmt: skip
    yield Alias(f"{actor}.optim.lr_warmup_steps", ("optimizer.warmup_steps",), "verl", _batches_of_warmup, "steps of one batch each there, optimiser steps here; -1 is unset")  # fmt: skip
    yield Alias(f"{actor}.optim.lr_warmup_steps_ratio", ("optimizer.warmup_steps", "optimizer.warmup_share"), "verl", _warmup(f"{actor}.optim.lr_warmup_steps_ratio", f"{actor}.optim.lr_warmup_steps"), "a share of all optimiser steps; with epochs it is `optimizer.warmup_share`")  # fmt: skip
    yield Alias(f"{actor}.optim.warmup_style", ("optimizer.schedule",), "verl", _one_of("optimizer.schedule", {"constant": "constant", "cosine": "cosine"}))  # fmt: skip
    yield Alias("trainer.critic_warmup", ("training.critic_warmup",), "verl", lambda value, _: {"training.critic_warmup": max(0, int(number(value, "trainer.critic_warmup")) - 1)}, "verl counts steps from 1: n leaves out n − 1")  # fmt: skip
    yield Alias("trainer.save_freq", ("checkpoint.every",), "verl", _unless("checkpoint.every", -1), "-1 is unset: checkpoints are always kept")  # fmt: skip
    yield Alias("trainer.test_freq", ("evaluation.every",), "verl", _unless("evaluation.every", -1, becomes=0), "-1 is 0 here")  # fmt: skip
    yield Alias("trainer.logger", ("trackers",), "verl", _trackers(("console", "file")), "the console and files are always there")  # fmt: skip
    yield Alias("trainer.project_name", ("trackers",), "verl", _left_out, "the project of the trackers in `trainer.logger`")  # fmt: skip
    for name in ("trainer.nnodes", "trainer.n_gpus_per_node"):
        yield Alias(name, (), "verl", _machines(name), "processes are started by `--launch torchrun --processes N`")  # fmt: skip
    offloaded = [f"{part}.fsdp_config.{what}_offload" for part in (actor, "critic.model") for what in ("param", "grad", "optimizer")]  # fmt: skip
    for name in (f"{actor}.fsdp_config.offload_policy", *offloaded):
        yield Alias(name, ("train_engine.cpu_offload",), "verl", _offload, "one setting for weights, gradients and moments; false asks for nothing")  # fmt: skip
    yield from _same("verl", (f"{actor}.fsdp_config.reshard_after_forward", "train_engine.reshard_after_forward", True))  # fmt: skip
    yield from _ignored("verl", "a reference lies where its policy does: `train_engine.cpu_offload`", "actor_rollout_ref.ref.fsdp_config.param_offload")  # fmt: skip
    for name in (f"{actor}.ulysses_sequence_parallel_size", "actor_rollout_ref.ref.ulysses_sequence_parallel_size"):  # fmt: skip
        yield Alias(name, (), "verl", _only(1, why="each text is computed in one process; `train_engine.tensor_parallel` splits products"), "1 alone: each text is computed in one process")  # fmt: skip
    yield Alias("trainer.resume_mode", (), "verl", _only("auto", "disable", why="`--resume RUN` goes on with a run"), "`--resume RUN` goes on with a run")  # fmt: skip
    yield Alias("trainer.default_local_dir", (), "verl", _only(None, why="`--run-dir DIR` says where a run is kept"), "refused: `--run-dir DIR` says where a run is kept")  # fmt: skip
    yield Alias("reward_model.enable", (), "verl", _truth("reward_model", _refused("name its checkpoint, `reward_model.path`")), "false alone: one is named, `reward_model.path`")  # fmt: skip
    functions = "functions that pay are `environment.rewards`, of the environment `rewarded`"
    yield Alias("reward_model.reward_manager", (), "verl", _only("naive", why=f"the environment grades; {functions}"), f"`naive` alone; {functions}")  # fmt: skip
    for name in ("custom_reward_function.path", "custom_reward_function.name"):
        yield Alias(name, (), "verl", _only(None, why=f"{functions}: `FILE.py:FUNCTION`"), f"refused: {functions}")  # fmt: skip
    split = "results do not depend on how a batch is split; `training.microbatch_tokens` bounds memory"
    yield from _ignored("verl", split, f"{actor}.ppo_micro_batch_size_per_gpu", f"{actor}.use_dynamic_bsz", f"{rollout}.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu", f"{actor}.ppo_micro_batch_size", f"{rollout}.log_prob_micro_batch_size", "actor_rollout_ref.ref.log_prob_micro_batch_size", "critic.ppo_micro_batch_size", f"{rollout}.log_prob_use_dynamic_bsz", "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", f"{rollout}.log_prob_max_token_len_per_gpu", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "data.val_batch_size", "trainer.balance_batch")  # fmt: skip
    yield from _ignored("verl", "`engine.options` holds vLLM's own arguments", *(f"{rollout}.{each}" for each in ("enforce_eager", "free_cache_engine", "enable_chunked_prefill", "max_num_batched_tokens", "max_num_seqs", "load_format", "layered_summon", "mode", "dtype")))  # fmt: skip
    yield from _ignored("verl", "nothing here depends on it", f"{actor}.use_torch_compile", "data.return_raw_chat")  # fmt: skip
    yield from _ignored("verl", "texts are never padded here", f"{model}.use_remove_padding")
    yield from _ignored(
        "verl", "`engine.kv_gib` bounds vLLM's cache, in GiB", f"{rollout}.gpu_memory_utilization"
    )
    yield Alias("data.filter_overlong_prompts", ("tasks.max_prompt_tokens",), "verl", _overlong, "true is `context`, what the model reads less `max_tokens`; beside a number, such as `data.max_prompt_length`, that number holds")  # fmt: skip
    yield from _ignored("verl", "`tasks.max_prompt_tokens` leaves long prompts out; none is cut", "data.truncation")  # fmt: skip


TABLE: tuple[Alias, ...] = (*_verl(), *_trl(), *_comlrl(), *_every())
"""Every name of another library that is read."""
ARGUMENTS = {
    "train_dataset": "dataset",
    "reward_funcs": "reward",
    "reward_fn": "reward",
    "output_dir": "run_dir",
    "num_agents": "agents",
}
"""Arguments of TRL's trainers → those of `kapelle.train`, which are no settings."""
ROOTS = frozenset(alias.name.partition(".")[0] for alias in TABLE) - RunConfig.model_fields.keys()
"""Keys beside the sections of a run, below which theirs stand."""


# -------- Reading them


@dataclass(frozen=True, slots=True)
class Reading:
    """How names of other libraries were read."""

    notes: tuple[str, ...]
    """One line that says so; none where there were none."""
    by: Mapping[str, str]
    """Our name → theirs."""
    faults: tuple[ConfigError, ...] = ()
    """What cannot be read, and why."""

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Let errors about a setting of ours say by which name it was given."""
        try:
            yield
        except ConfigError as error:
            said = EACH.join(map(self._with_names, str(error).split(EACH)))
            if said == str(error):
                raise
            raise ConfigError(said) from None

    def _with_names(self, said: str) -> str:
        given = [f"`{name}` is read as `{path}`" for path, name in self.by.items() if re.search(rf"[`']{re.escape(path)}\b", said) and name not in said]  # fmt: skip
        return f"{said} ({'; '.join(given)}.)" if given else said


NOTHING_READ = Reading((), {})
"""Of settings that have our names alone."""


def read_aliases(
    values: dict[str, Any],
    origin: dict[str, str],
    order: Sequence[str],
    kinds: Mapping[str, Callable[[str], type]],
) -> Reading:
    """Replace names of other libraries in merged values by ours, in place, and return how they were read.

    `origin` has the source of each value, `order` the sources from the first to the last, `kinds` how the class of a section is
    found by its `name`. Of a name and ours the later source counts. Faults are one source that gives both where they disagree, a value
    without a counterpart, and a name below one of theirs that is not known; they are returned, and their values taken out.
    """
    names, by = Names(values, origin, order, kinds), dict[str, str]()
    said, faults = list[str](), list[ConfigError]()
    # What names a section's class comes first: by it the others are known to be ours or theirs.
    naming = [alias for alias in TABLE if any(path.endswith(".name") for path in alias.ours)]
    for rows in (naming, [alias for alias in TABLE if alias not in naming]):
        for alias in rows:
            _collect(alias, names)
        for alias in rows:
            if alias.name in names.theirs:
                try:
                    said.append(_read(alias, names, by))
                except ConfigError as error:
                    faults.append(error)
    known = [alias.name for alias in TABLE]
    for root in ROOTS.intersection(values):
        for key in leaves(values[root], root):
            hint = did_you_mean(key, [each for each in known if each.startswith(f"{root}.")])
            hint = hint if "mean" in hint else " docs/coming_from/names.md has all that are read."
            faults.append(ConfigError(f"No setting is called '{key}'{_set_in(names.source_of(key))}, and it is no name of another library that is read.{hint}"))  # fmt: skip
        del values[root]
    return Reading((", ".join(said),) if said else (), by, tuple(faults))


def _collect(alias: Alias, names: Names) -> None:
    """Take a name out of the values, where it stands for a setting of theirs and for none of ours."""
    *above, key = alias.name.split(".")
    at: Any = names.values
    if alias.name in at:
        above, key = [], alias.name
    elif above and above[0] in RunConfig.model_fields and names.has(alias.name, unknown=False):
        return
    passed = []
    for part in above:
        if not isinstance(at, dict) or part not in at:
            return
        passed.append((at, part))
        at = at[part]
    if not isinstance(at, dict) or key not in at:
        return
    path = ".".join([*above, key])
    names.theirs[alias.name], names.sources[alias.name] = at.pop(key), names.source_of(path)
    for place in [each for each in names.origin if each == path or each.startswith(f"{path}.")]:
        del names.origin[place]
    for outer, part in reversed(passed):
        if not outer[part]:
            del outer[part]


def _read(alias: Alias, names: Names, by: dict[str, str]) -> str:
    """Set what an alias stands for; return how it was read."""
    value, source = names.theirs[alias.name], names.sources[alias.name]
    try:
        found = alias.convert(value, names)
        if "algorithm.name" not in found:
            found = {names.first(path) if path.startswith("algorithm.") else path: each for path, each in found.items()}  # fmt: skip
    except ValueError as error:
        raise ConfigError(
            f"`{alias.name}` ({alias.library}{_set_in(source)}) cannot be read: {error}."
        ) from None
    read = []
    for path, wanted in found.items():
        current, holder = names.set(path), names.source_of(path)
        if current is not NOTHING and names.rank(holder) > names.rank(source):
            continue  # laid over it later
        same_place = names.rank(holder) == names.rank(source)
        if current is not NOTHING and same_place and not _equal(current, wanted):
            other = f"`{by[path]}` reads as {current}" if path in by else f"`{path}` is {current}"
            raise ConfigError(f"`{alias.name}: {value}` is read as `{path}: {wanted}`, and {other}{_set_in(source, ', both')}. Leave one out.")  # fmt: skip
        _put(path, wanted, source, names)
        by[path] = alias.name
        read.append(path if _equal(value, wanted) else f"{path}={_short(wanted)}")
    return (
        f"{alias.name} is read as {' and '.join(read)}"
        if read
        else f"{alias.name} is left out ({alias.says or 'nothing to set'})"
    )


def _put(path: str, value: Any, source: str, names: Names) -> None:
    """Lay a value over the others; another `name` of a section leaves out what earlier sources said of it."""
    section, *inner = path.split(".")
    held = names.values.get(section)
    if isinstance(held, Settings):
        names.values[section] = _changed(held, inner, value)
        return
    nested: Any = value
    for part in reversed(inner):
        nested = {part: nested}
    if inner == ["name"] and section in PLUGGED and isinstance(held, dict) and held.get("name") != value:
        later = {key: each for key, each in held.items() if key != "name" and names.rank(names.source_of(f"{section}.{key}")) >= names.rank(source)}  # fmt: skip
        sources = {key: names.source_of(f"{section}.{key}") for key in later}
        merge(names.values, {section: nested}, source, names.origin)
        for key, each in later.items():
            names.values[section][key] = each
            replace_origin(names.origin, f"{section}.{key}", each, sources[key])
        return
    if inner and not isinstance(names.values.get(section, {}), Mapping):
        return  # no section: its own message says so
    merge(names.values, {section: nested}, source, names.origin)


def _changed(settings: Settings, inner: Sequence[str], value: Any) -> Settings:
    """Return settings with one of them replaced, however deep."""
    values = settings.model_dump(exclude_unset=True)
    at = values
    for part in inner[:-1]:
        at = at.setdefault(part, {})
    at[inner[-1]] = value
    return type(settings).model_validate(values)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same setting; YAML reads `1e-5` as text."""
    try:
        return bool(one == other) or float(one) == float(other)
    except (TypeError, ValueError):
        return False


def _set_in(source: str, prefix: str = "") -> str:
    return f"{prefix}, {'on the' if source == COMMAND_LINE else 'in'} {source}" if source else ""


def _short(value: Any) -> str:
    return str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}…"
