"""Settings by the names that other libraries have for them: `learning_rate` of TRL is read as `optimizer.lr`.

`TABLE` has every such name, with what it is called here. `read_aliases` replaces them in the settings of a run, in a recipe, on the
command line and in Python alike, when everything that was said is known: a name whose unit differs is converted by what the other
settings say, so that TRL's `per_device_train_batch_size`, which counts completions, becomes the number of tasks that have as many.
What cannot be said here is refused with the reason. docs/coming_from/names.md is made of the table.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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
        named = self.set(f"{section}.name")
        raise ValueError(
            f"`{section}.name: {DEFAULTS.get(section) if named is NOTHING else named}` has no {' and no '.join(f'`{p}`' for p in paths)}"
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
        """Return a number by another library's name; null is unset."""
        found = self.theirs.get(name)
        return number(default if found is None else found, name)

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
    ranks = int(names.number("num_processes")) if started is None else started.size
    each = number(value, "per_device_train_batch_size") * ranks
    accumulated = names.number("gradient_accumulation_steps")
    batches = names.number("steps_per_generation", accumulated)
    if accumulated < 1:
        raise ValueError(
            f"`gradient_accumulation_steps` cannot be {accumulated:g}: it is a number of batches from 1"
        )
    generated = names.theirs.get("generation_batch_size")
    if generated is not None:
        if names.theirs.get("steps_per_generation") is not None:
            raise ValueError("`generation_batch_size` and `steps_per_generation` say the same; leave one out")
        said = f"{generated} completions generated at once, {each:g} in each batch ({value} per device × {ranks} processes),"
        batches = _whole(number(generated, "generation_batch_size") / each, said, "batches")
    if batches < accumulated:
        # One update learns from several generations, between which no weights change: they are one.
        _whole(
            accumulated / batches, f"{accumulated:g} accumulated batches, {batches:g} at once,", "generations"
        )
        if _updates(names) != 1:
            raise ValueError(
                "an update that learns from several generations, and from each of them several times, has no counterpart here. Raise "
                "`steps_per_generation` to `gradient_accumulation_steps`"
            )
        batches = accumulated
    count, group = each * batches, _group(names)
    said = f"{count:g} completions of a step ({value} per device × {batches:g} batches × {ranks} processes), {group:g} of each task,"
    tasks = _whole(count / group, said, "tasks")
    return {"training.tasks_per_step": tasks, **_parts(batches / accumulated)}


def _parts(parts: float) -> Mapping[str, Any]:
    said = "the updates of one generation"
    return {} if parts == 1 else {"algorithm.minibatches": _whole(parts, said, "minibatches")}


def _accumulated(value: Any, names: Names) -> Mapping[str, Any]:
    if value is None or "per_device_train_batch_size" in names.theirs:
        return {}  # multiplied there
    raise ValueError(
        "alone it says nothing here, as results do not depend on how a batch is split. Set `training.tasks_per_step`, or "
        "`per_device_train_batch_size` too; `training.microbatch_tokens` bounds memory"
    )


def _generated(value: Any, names: Names) -> Mapping[str, Any]:
    if value is None or "per_device_train_batch_size" in names.theirs:
        return {}  # divided there
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


def _warmup_steps(value: Any, names: Names) -> Mapping[str, Any]:
    """A number of optimiser steps; below 1 it is a share of them, as transformers 5 has it."""
    if isinstance(value, float) and 0 < value < 1:
        return _warmup("warmup_steps", "")(value, names)
    return {"optimizer.warmup_steps": value}


def _scale(value: Any, names: Names) -> Mapping[str, Any]:
    """`batch` asks for nothing where the algorithm scales by its batch anyway."""
    if value == "batch" and names.value("algorithm.name") == "reinforce_plus_plus":
        return {}
    words = {True: "std", "group": "std", False: "none", "none": "none"}
    return _one_of("algorithm.scale", words, ". For `batch` set `algorithm.name: reinforce_plus_plus`")(value, names)  # fmt: skip


def _vllm_mode(value: Any, names: Names) -> Mapping[str, Any]:
    if value == "server" and names.set("engine.server") not in (NOTHING, None, ""):
        return {}
    return _one_of("engine.server", {"colocate": {}}, ". For a server set `engine.server` too")(value, names)


def _betas(value: Any, names: Names) -> Mapping[str, Any]:
    first, second = names.value("optimizer.betas")
    return {
        "optimizer.betas": [names.theirs.get("adam_beta1", first), names.theirs.get("adam_beta2", second)]
    }


def _clip(upper: str, lower: str = "") -> Convert:
    """One bound for both sides, unless a side has its own."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        sides = {lower: "algorithm.loss.clip_low", upper: "algorithm.loss.clip_high"}
        return {names.first(path): value for own, path in sides.items() if names.theirs.get(own) is None}

    return convert


PROJECTS = ("trainer.project_name", "wandb_project", "project")


def _trackers(silent: Sequence[str]) -> Convert:
    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        known = ("tensorboard", "wandb", "mlflow", "trackio")
        asked = [value] if isinstance(value, str) else list(value or ())
        kept = [each for each in asked if each not in silent]
        for each in kept:
            if each not in known:
                raise ValueError(f"{each!r} is no tracker of kapelle.{did_you_mean(str(each), known)}")
        project = next((names.theirs[each] for each in PROJECTS if each in names.theirs), None)
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


def _one_file(value: Any) -> Any:
    """Return the file in a list of one, and what is no list as it is."""
    if isinstance(value, list) and len(value) != 1:
        raise ValueError(
            "several files are several environments: name `environment: {name: mixture}`, or one file that holds all rows"
        )
    return value[0] if isinstance(value, list) else value


def _train_files(value: Any, names: Names) -> Mapping[str, Any]:
    found = _one_folder(names)
    return {names.first("environment.path"): _one_file(value)} if found is None else found


def _val_files(value: Any, names: Names) -> Mapping[str, Any]:
    value = _one_file(value)
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
    files = [_one_file(names.theirs.get(each)) for each in ("data.train_files", "data.val_files")]
    # An environment in siiRL's form asks the questions of another one.
    at = "environment" if names.set("environment.questions") is NOTHING else "environment.questions"
    if at == "environment" and (names.lacks(f"{at}.test") or not names.lacks(f"{at}.eval_path")):
        return None
    places = [each.rpartition("/") for each in files if isinstance(each, str)]
    if len(places) < 2 or places[0][0] != places[1][0] or not places[0][1]:
        return None
    return {f"{at}.path": places[0][0] or "/", f"{at}.train": places[0][2], f"{at}.test": places[1][2]}


def _machines(name: str) -> Convert:
    """A number of machines or devices, which whoever starts the processes says here."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        count = number(value, name)
        if count < 1 or count != int(count):
            raise ValueError(f"`{name}` cannot be {value}: it is a whole number from 1")
        return {}

    return convert


ROLLOUT = "actor_rollout_ref.rollout"


def _bounded(*paths: str) -> Convert:
    """A bound that is left out where nothing here could reach it."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        return {} if names.lacks(*paths) else _is(*paths)(value, names)

    return convert


def _vllm_size(value: Any, names: Names) -> Mapping[str, Any]:
    if number(value, "tensor_parallel_size") == 1 or names.theirs.get(f"{ROLLOUT}.name") == "sglang":
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


def _discount(value: Any, names: Names) -> Mapping[str, Any]:
    try:
        return _is("algorithm.gae.gamma_turn", nothing=(1,))(value, names)
    except ValueError as error:
        raise ValueError(
            f"{error}: rewards of later turns count in full there. Leave it out, or take `algorithm.name: mappo`"
        ) from None


def _batches_of_warmup(value: Any, names: Names) -> Mapping[str, Any]:
    count = -1 if value is None else number(value, "lr_warmup_steps")
    return {} if count == -1 else {"optimizer.warmup_steps": int(count * _updates(names))}


def _peft(value: Any, names: Names) -> Mapping[str, Any]:
    """Return the adapters that a mapping, or PEFT's LoraConfig, describes; null trains all weights."""
    if value is None:
        return {"team.sharing": "shared"}
    given = value if isinstance(value, Mapping) else getattr(value, "__dict__", {"peft_type": value})
    refused = [
        key
        for key in ("use_rslora", "use_dora", "modules_to_save", "rank_pattern", "target_parameters")
        if given.get(key)
    ]
    if ("peft_type" in given and "r" not in given) or refused:
        raise ValueError(
            f"adapters here are LoRA{f', without `{refused[0]}`' if refused else ''}: `team.lora` has `rank`, `alpha`, `dropout` and `targets`"
        )
    targets = given.get("target_modules")
    lora = {
        "rank": given.get("r", 8),
        "alpha": given.get("lora_alpha", 8),
        "dropout": given.get("lora_dropout", 0.0),
    }
    lora |= {} if targets is None else {"targets": targets if isinstance(targets, str) else sorted(targets)}
    return {"team.sharing": "lora", **{f"team.lora.{key}": each for key, each in lora.items()}}


def _lora_rank(value: Any, names: Names) -> Mapping[str, Any]:
    if number(value, "lora_rank") == 0:
        return {"team.sharing": "shared"}
    return {"team.lora.rank": value}


# -------- The table. Rows are read in this order: a conversion sees what the rows above it have set.


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _listed(library: str) -> tuple[list[Alias], list[Alias]]:
    """Return what `aliases.toml` has of a library: settings that mean the same, and names that are left out or refused."""
    kinds = _DATA[library]
    same, others = [], []
    for name, ours in _flat(kinds["same"]):
        path, *nothing = [ours] if isinstance(ours, str) else ours
        same.append(Alias(name, (path,), library, _is(path, nothing=nothing)))
    for why, names in kinds.get("left_out", {}).items():
        others += [Alias(name, (), library, _left_out, why) for name in names]
    for why, values in kinds.get("refused", {}).items():
        for name, nothing in values.items():
            asked = ", ".join(f"`{str(each).lower()}`" for each in nothing) or "unset"
            others.append(Alias(name, (), library, _only(None, *nothing, why=why), f"{asked} alone: {why}"))
    return same, others


def _flat(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _overlong(value: Any, names: Names) -> Mapping[str, Any]:
    """True leaves out what does not fit the model, unless a number says what is too long; false leaves out nothing more."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")  # noqa: TRY004 (said to the user as what is wrong with a value)
    path = "tasks.max_prompt_tokens"
    given = "data.max_prompt_length" in names.theirs or isinstance(names.set(path), int)
    return {path: "context"} if value and not given else {}


def _unless_no(value: Any, names: Names) -> Mapping[str, Any]:
    """Return a number of steps, which counts only where a strategy does not say `no`; YAML reads that as false."""
    return {} if names.theirs.get("eval_strategy") in ("no", False) else {"evaluation.every": value}


def _system(value: Any, names: Names) -> Mapping[str, Any]:
    agents = names.set("team.agents")
    if value is None:
        return {}
    if agents is not NOTHING and agents != 1:
        raise ValueError("this team names its agents: set `system` of each in `team.agents`")
    return {"team.agents": [{"name": "agent_0", "system": value}]}


def _every() -> Iterator[Alias]:
    """What kapelle itself calls by a short name."""
    said = "passes over the tasks of training"
    yield Alias("epochs", ("training.epochs",), "kapelle", _epochs("epochs"), said)


def _trl() -> Iterator[Alias]:
    """Names of TRL, and of the transformers and PEFT arguments that come with it."""
    yield Alias("use_vllm", ("engine.name",), "TRL", _truth("engine.name", "vllm"), "true is `vllm`")
    same, others = _listed("TRL")
    yield from same
    yield Alias("enable_thinking", ("model.chat_template_kwargs",), "TRL", lambda value, _: {"model.chat_template_kwargs": {"enable_thinking": value}}, "an argument of the chat template")  # fmt: skip
    yield Alias("max_prompt_length", ("tasks.max_prompt_tokens",), "TRL", _is("tasks.max_prompt_tokens"), "a task with a longer prompt is left out; none is cut")  # fmt: skip
    yield Alias("max_tool_calling_iterations", ("environment.max_turns",), "TRL", _rounds_of_calls, "one more here: it counts the answer after the last calls too")  # fmt: skip
    yield Alias("top_k", ("team.sampling.top_k",), "TRL", _unless("team.sampling.top_k", None, -1, becomes=0), "no top-k is 0 here")  # fmt: skip
    yield Alias("beta", ("algorithm.loss.kl_coefficient", "algorithm.beta"), "TRL", _is("algorithm.beta", "algorithm.loss.kl_coefficient", nothing=(0,)), "the penalty's coefficient; with `dpo` its β")  # fmt: skip
    yield Alias("epsilon", ("algorithm.loss.clip_low", "algorithm.loss.clip_high"), "TRL", _clip("epsilon_high"), "both, unless `epsilon_high` is given")  # fmt: skip
    high = "algorithm.loss.clip_high"
    yield Alias("epsilon_high", (high,), "TRL", _unless(high, None))
    yield Alias("loss_type", ("algorithm.loss.aggregation", "algorithm.loss.kind", "algorithm.kind"), "TRL", _loss_type, "`dapo` and `bnpo`: `token_mean`; `grpo`: `sequence_mean`; `dr_grpo`: `sequence_sum` over `team.sampling.max_tokens`; `cispo`, `sapo`; of `dpo`: `sigmoid`, `ipo`")  # fmt: skip
    yield Alias("scale_rewards", ("algorithm.scale",), "TRL", _scale, "`group` is `std`; `batch` is left to `reinforce_plus_plus`")  # fmt: skip
    yield Alias("mask_truncated_completions", ("algorithm.truncated",), "TRL", _truth("algorithm.truncated", "mask", "keep", nothing=(False,)), "true is `mask`")  # fmt: skip
    # Completions → tasks: the group's size is known by now.
    yield Alias("per_device_train_batch_size", ("training.tasks_per_step", "algorithm.minibatches"), "TRL", _completions, "it counts completions: times `gradient_accumulation_steps` and processes, divided by `num_generations`")  # fmt: skip
    yield Alias("num_processes", (), "TRL", _machines("num_processes"), "multiplied into `per_device_train_batch_size`; processes are started by `--launch torchrun --processes N`")  # fmt: skip
    yield Alias("gradient_accumulation_steps", ("training.tasks_per_step",), "TRL", _accumulated, "multiplied into `per_device_train_batch_size`")  # fmt: skip
    yield Alias("steps_per_generation", ("algorithm.minibatches",), "TRL", _accumulated, "multiplied into `per_device_train_batch_size` in place of a smaller `gradient_accumulation_steps`; their quotient is `algorithm.minibatches`")  # fmt: skip
    yield Alias("generation_batch_size", ("training.tasks_per_step",), "TRL", _generated, "it counts completions: divided by `num_generations`; beside `per_device_train_batch_size` it sets `steps_per_generation`")  # fmt: skip
    yield Alias("num_train_epochs", ("training.epochs",), "TRL", _epochs("num_train_epochs"), "passes over the tasks; `max_steps` comes first")  # fmt: skip
    yield Alias("max_steps", ("training.steps",), "TRL", _steps("max_steps"), "optimiser steps: divided by those in one step of ours; -1 goes by epochs")  # fmt: skip
    yield Alias("warmup_ratio", ("optimizer.warmup_steps", "optimizer.warmup_share"), "TRL", _warmup("warmup_ratio", "warmup_steps"), "a share of all optimiser steps; with epochs it is `optimizer.warmup_share`")  # fmt: skip
    yield Alias("warmup_steps", ("optimizer.warmup_steps", "optimizer.warmup_share"), "TRL", _warmup_steps, "a number; below 1 a share, as `warmup_ratio`")  # fmt: skip
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
        yield Alias(name, ("model.dtype",), "TRL", _one_of("model.dtype", {"auto": {}, **{each: each for each in ("float32", "bfloat16", "float16")}}), "`auto` is left out")  # fmt: skip
    yield Alias("load_in_4bit", ("model.quantization",), "TRL", _truth("model.quantization", "nf4"), "true is `nf4`")  # fmt: skip
    yield Alias("load_in_8bit", (), "TRL", _truth("model.quantization", _refused("frozen weights are held in 4 bits here (`model.quantization: nf4`) or whole")), "true is refused: `model.quantization: nf4` has 4 bits")  # fmt: skip
    yield Alias("use_peft", ("team.sharing",), "TRL", _truth("team.sharing", "lora", "shared"), "true is `lora`, false `shared`: all weights")  # fmt: skip
    yield Alias("peft_config", ("team.lora", "team.sharing"), "TRL", _peft, "`r`, `lora_alpha`, `lora_dropout`, `target_modules`, with PEFT's defaults; null is `team.sharing: shared`")  # fmt: skip
    optimizers = "the section `optimizer` says which, with `lr` and `schedule`"
    yield Alias(
        "optimizers", (), "TRL", _only(None, (None, None), why=optimizers), f"unset alone: {optimizers}"
    )
    yield Alias("vllm_mode", (), "TRL", _vllm_mode, "`colocate` is the default; `server` goes with `vllm_server_base_url`")  # fmt: skip
    yield Alias("vllm_tensor_parallel_size", ("engine.options",), "TRL", _vllm_size, "`{tensor_parallel_size: N}`")  # fmt: skip
    yield Alias("report_to", ("trackers",), "TRL", _trackers(("none", "")), "a name or a list; `none` is no tracker; kept on this machine unless `trackers.0.offline: false`")  # fmt: skip
    yield Alias("sync_ref_model", ("algorithm.reference_every",), "TRL", _truth("algorithm.reference_every", _refused("theirs mixes the policy into the reference. Here `algorithm.reference_every: N` copies it every N steps")), "true is refused: `algorithm.reference_every` copies, theirs mixes")  # fmt: skip
    yield Alias("eval_strategy", ("evaluation.every",), "TRL", _one_of("evaluation.every", {"steps": {}, "no": 0, False: 0}, ". Set `evaluation.every`, in steps"), "`no` is 0")  # fmt: skip
    yield Alias("eval_steps", ("evaluation.every",), "TRL", _unless_no, "unless `eval_strategy` is `no`")
    yield Alias("eval_on_start", ("evaluation.before_and_after",), "TRL", _truth("evaluation.before_and_after", True), "true alone; after training too")  # fmt: skip
    yield Alias("save_strategy", (), "TRL", _one_of("checkpoint.every", {each: {} for each in ("steps", "epoch", "no", False)}, ". Set `checkpoint.best`"), "checkpoints are always kept, every `checkpoint.every` steps")  # fmt: skip
    for name in ("use_cpu", "no_cuda"):
        yield Alias(name, ("model.device",), "TRL", _truth("model.device", "cpu"), "true is `cpu`")
    yield Alias("system_prompt", ("team.agents",), "TRL", _system, "the `system` of a single agent")
    for name in ("wandb_project", "project"):
        yield Alias(name, ("trackers",), "TRL", _left_out, "the project of the trackers in `report_to`")
    yield Alias("push_to_hub", (), "TRL", _truth("", _refused("`kapelle export RUN --push OWNER/NAME` sends a run's weights with a model card")), "false alone: `kapelle export RUN --push OWNER/NAME` sends")  # fmt: skip
    yield Alias("use_liger_kernel", (), "TRL", _truth("", _refused("`model.kernels: auto` takes what is installed")), "false alone: `model.kernels`")  # fmt: skip
    yield from others


def _comlrl() -> Iterator[Alias]:
    """Names of CoMLRL that TRL has not."""
    same, others = _listed("CoMLRL")
    yield from same
    yield from _listed("OpenRLHF")[0]
    yield Alias("discount", ("algorithm.gae.gamma_turn",), "CoMLRL", _discount, "of algorithms with a critic; others sum what follows without one")  # fmt: skip
    yield Alias("advantage_normalization", ("algorithm.scale",), "CoMLRL", _truth("algorithm.scale", "std", "none"), "true is `std`")  # fmt: skip
    yield Alias("advantage_mode", (), "CoMLRL", _one_of("algorithm.name", {"mean": {}}, ". For others set `algorithm.name`: `rloo`, `remax`"), "`mean` is the default")  # fmt: skip
    yield Alias("reference_kl_enabled", ("algorithm.loss.kl_coefficient",), "CoMLRL", _kl("reference_kl_coef", "reference_kl_enabled", 0.1), "false is 0")  # fmt: skip
    yield Alias("reference_kl_coef", ("algorithm.loss.kl_coefficient",), "CoMLRL", _kl("reference_kl_coef", "reference_kl_enabled", 0.1), "0 unless `reference_kl_enabled`")  # fmt: skip
    yield Alias("rollout_buffer_size", ("training.tasks_per_step",), "CoMLRL", _buffer, "it counts turns: divided by `num_turns`")  # fmt: skip
    yield Alias("parallel_training", (), "CoMLRL", _one_of("team", {"none": {}, None: {}}, ". Set `team.agents[].weights.device`"), "`none`; otherwise `team.agents[].weights.device`")  # fmt: skip
    yield from others


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
    estimators: dict[str, Any] = {"gae": "ppo", "gae_marft": "marft", "reinforce_plus_plus_baseline": group}
    estimators |= {each: each for each in ("grpo", "rloo", "remax", "opo", "reinforce_plus_plus")}
    yield Alias("algorithm.adv_estimator", ("algorithm.name",), "verl", _one_of("algorithm.name", estimators), "`gae` is `ppo`, siiRL's `gae_marft` is `marft`; others by the same name")  # fmt: skip
    yield Alias(f"{rollout}.name", ("engine.name",), "verl", _one_of("engine.name", {"vllm": "vllm", "hf": "local", "sglang": {}}, ". Set `engine.name`: `local` or `vllm`"), "`hf` is `local`; `sglang` is left out: set `engine.name`")  # fmt: skip
    yield Alias(f"{actor}.strategy", ("train_engine.name",), "verl", _one_of("train_engine.name", {"fsdp": "fsdp", "fsdp2": "fsdp"}))  # fmt: skip
    same, others = _listed("verl")
    yield from same
    turns = ("environment.max_turns", "workflow.max_assistant_turns")
    yield Alias(f"{rollout}.multi_turn.max_assistant_turns", turns, "verl", _bounded(*turns), "of `tools` or `dag`; left out where agents take the turns of the workflow")  # fmt: skip
    yield Alias(f"{rollout}.multi_turn.use_all_traj", ("workflow.use_all_traj",), "siiRL", _bounded("workflow.use_all_traj"), "of `dag`")  # fmt: skip
    yield Alias(f"{rollout}.agent.rewards_with_env", ("environment.rewards_with_env",), "siiRL", _bounded("environment.rewards_with_env"), "of `siirl_env`; other environments give the reward")  # fmt: skip
    yield Alias("data.train_files", ("environment.path", "environment.train"), "verl", _train_files, "beside `data.val_files` of the same folder: that folder, and the file in it")  # fmt: skip
    yield Alias("data.val_files", ("environment.eval_path", "environment.test"), "verl", _val_files, "of `rewarded`; of others the file of that name in the folder of both")  # fmt: skip
    yield Alias("algorithm.gamma", ("algorithm.gae.gamma_token",), "verl", _is("algorithm.gae.gamma_token", nothing=(1,)), "of tokens; between turns it is `algorithm.gae.gamma_turn`")  # fmt: skip
    yield Alias("algorithm.norm_adv_by_std_in_grpo", ("algorithm.scale",), "verl", _truth("algorithm.scale", "std", "none", nothing=(True, False)), "true is `std`; of algorithms that compare attempts")  # fmt: skip
    for name in ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"):
        yield Alias(name, ("algorithm.gae.kl_in_reward", "algorithm.kl_in_reward"), "verl", _kl_in_reward, "the coefficient where `algorithm.use_kl_in_reward` is true, else 0")  # fmt: skip
    for name in (f"{actor}.use_kl_loss", f"{actor}.kl_loss_coef"):
        yield Alias(name, ("algorithm.loss.kl_coefficient",), "verl", _kl(f"{actor}.kl_loss_coef", f"{actor}.use_kl_loss", 0.001), "the coefficient where `use_kl_loss` is true, else 0")  # fmt: skip
    yield Alias(f"{actor}.kl_loss_type", ("algorithm.loss.kl_estimator",), "verl", _one_of("algorithm.loss.kl_estimator", {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}), "`low_var_kl` is `k3`, `mse` is `k2`")  # fmt: skip
    yield Alias(f"{actor}.clip_ratio", ("algorithm.loss.clip_low", "algorithm.loss.clip_high"), "verl", _clip(f"{actor}.clip_ratio_high", f"{actor}.clip_ratio_low"), "both sides, of which neither has its own")  # fmt: skip
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
    for name in ("warmup_style", "lr_scheduler_type"):
        yield Alias(f"{actor}.optim.{name}", ("optimizer.schedule",), "verl", _one_of("optimizer.schedule", {None: {}, "constant": "constant", "cosine": "cosine"}))  # fmt: skip
    yield Alias("trainer.critic_warmup", ("training.critic_warmup",), "verl", lambda value, _: {"training.critic_warmup": max(0, int(number(value, "trainer.critic_warmup")) - 1)}, "verl counts steps from 1: n leaves out n − 1")  # fmt: skip
    yield Alias("trainer.save_freq", ("checkpoint.every",), "verl", _unless("checkpoint.every", -1), "-1 is unset: checkpoints are always kept")  # fmt: skip
    yield Alias("trainer.test_freq", ("evaluation.every",), "verl", _unless("evaluation.every", -1, becomes=0), "-1 is 0 here")  # fmt: skip
    yield Alias("trainer.logger", ("trackers",), "verl", _trackers(("console", "file")), "the console and files are always there")  # fmt: skip
    yield Alias("trainer.project_name", ("trackers",), "verl", _left_out, "the project of the trackers in `trainer.logger`")  # fmt: skip
    for name in ("trainer.nnodes", "trainer.n_gpus_per_node"):
        yield Alias(name, (), "verl", _machines(name), "processes are started by `--launch torchrun --processes N`")  # fmt: skip
    offloaded = [f"{part}.fsdp_config.{what}_offload" for part in (actor, "critic", "critic.model") for what in ("param", "grad", "optimizer")]  # fmt: skip
    for name in (f"{actor}.fsdp_config.offload_policy", *offloaded):
        yield Alias(name, ("train_engine.cpu_offload",), "verl", _offload, "one setting for weights, gradients and moments; false asks for nothing")  # fmt: skip
    yield Alias("data.filter_overlong_prompts", ("tasks.max_prompt_tokens",), "verl", _overlong, "true is `context`, what the model reads less `max_tokens`; beside a number, such as `data.max_prompt_length`, that number holds")  # fmt: skip
    yield from others


TABLE: tuple[Alias, ...] = (*_verl(), *_trl(), *_comlrl(), *_every())
"""Every name of another library that is read."""
ARGUMENTS = {
    "train_dataset": "dataset",
    "dataset_name": "dataset",
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
    said += _adapters(names)
    known = [alias.name for alias in TABLE]
    for root in ROOTS.intersection(values):
        for key in leaves(values[root], root):
            hint = did_you_mean(key, [each for each in known if each.startswith(f"{root}.")])
            hint = hint if "mean" in hint else " docs/coming_from/names.md has all that are read."
            faults.append(ConfigError(f"No setting is called '{key}'{_set_in(names.source_of(key))}, and it is no name of another library that is read.{hint}"))  # fmt: skip
        del values[root]
    return Reading((", ".join(said),) if said else (), by, tuple(faults))


WHOLE = {"TRL": "`peft_config`", "verl": "`lora_rank`"}
"""Libraries that train all weights, unless this names adapters."""


def _adapters(names: Names) -> list[str]:
    """Return what to say where settings of such a library leave open what trains, which is adapters here."""
    chosen = names.set("team.sharing"), names.set("team.lora"), names.set("team.agents")
    theirs = [WHOLE[each.library] for each in TABLE if each.name in names.theirs and each.library in WHOLE]
    if not theirs or chosen[:2] != (NOTHING, NOTHING) or "weights" in str(chosen[2]):
        return []
    return [
        f"adapters train, as nothing says what does (without {theirs[0]} it is all weights there: `team.sharing: shared`)"
    ]


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
