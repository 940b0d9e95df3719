"""Names of before the modules moved into rooms: they go on for one release, with a warning that says the new one.

`import kapelle.configured` still gives the module, which is now `kapelle.settings.base`; it is the very same object,
so that a class imported both ways is one class. Where a package has taken the name of a module (`kapelle.rollout`),
the package hands over what the module held.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

MODULES: Mapping[str, str] = {
    "algorithms.credit_mixer": "algorithms.value_decomposition.credit_mixer",
    "algorithms.gae": "algorithms.shared.gae",
    "algorithms.groups": "algorithms.shared.groups",
    "algorithms.monte_carlo": "algorithms.shared.monte_carlo",
    "algorithms.orders": "algorithms.shared.orders",
    "algorithms.rewards": "algorithms.shared.rewards",
    "algorithms.surrogate": "algorithms.shared.surrogate",
    "algorithms.tree": "algorithms.shared.tree",
    "algorithms.umad": "algorithms.shared.umad",
    "answers": "runs.verifier_export",
    "assembly": "setup.team_builder",
    "baselines": "evaluation.baselines",
    "batch": "engines.train.batch",
    "blocking": "runtime.event_loop",
    "chat_requests": "runtime.http",
    "checkpoint": "runs.checkpoint",
    "checkpoint_folder": "runs.checkpoint_folder",
    "checks": "setup.validation",
    "collate": "training.collate",
    "collection": "runs.sft_export",
    "config": "settings.schema",
    "configured": "settings.base",
    "durable": "runtime.atomic_files",
    "engines.compose": "engines.rollout.compose",
    "engines.endpoint": "engines.rollout.endpoint",
    "engines.judging": "engines.rollout.judge",
    "engines.local": "engines.rollout.local.engine",
    "engines.scripted": "engines.rollout.scripted",
    "engines.torch_train": "engines.train.torch.engine",
    "environments.code_problems": "environments.code.problems",
    "environments.code_world": "environments.code.world",
    "environments.data_settings": "environments.data.settings",
    "environments.data_source": "environments.data.source",
    "environments.gymnasium": "environments.adapters.gymnasium",
    "environments.labelled": "environments.recorded.labelled",
    "environments.openspiel_games": "environments.openspiel.games",
    "environments.openspiel_opponents": "environments.openspiel.opponents",
    "environments.openspiel_rules": "environments.openspiel.rules",
    "environments.openspiel_world": "environments.openspiel.world",
    "environments.pettingzoo": "environments.adapters.pettingzoo",
    "environments.plain": "environments.adapters.plain",
    "environments.preferences": "environments.recorded.preferences",
    "environments.reasoning_gym": "environments.adapters.reasoning_gym",
    "environments.row_fields": "environments.data.row_fields",
    "environments.siirl_env": "environments.adapters.siirl_env",
    "environments.spaces": "environments.adapters.spaces",
    "environments.stepping": "environments.adapters.stepping",
    "environments.textarena": "environments.adapters.textarena",
    "environments.told": "environments.game_settings",
    "environments.tool_arguments": "environments.tools.arguments",
    "environments.tool_calculator": "environments.tools.calculator",
    "environments.tool_contract": "environments.tools.contract",
    "environments.tool_files": "environments.tools.files",
    "environments.tool_functions": "environments.tools.functions",
    "environments.tool_mcp": "environments.tools.mcp",
    "environments.tool_prompt": "environments.tools.prompt",
    "environments.tool_python": "environments.tools.python",
    "environments.tool_search": "environments.tools.search",
    "environments.tools_world": "environments.tools.world",
    "environments.trajectories": "environments.recorded.trajectories",
    "environments.usable": "environments.data.usable",
    "environments.web": "environments.tools.web",
    "episode_json": "runs.episode_json",
    "grading.algebra": "grading.math.algebra",
    "grading.argument": "grading.text.argument",
    "grading.choice": "grading.text.choice",
    "grading.code_calls": "grading.code.calls",
    "grading.code_output": "grading.code.output",
    "grading.code_tasks": "grading.code.tasks",
    "grading.code_text": "grading.code.text",
    "grading.code_verdict": "grading.code.verdict",
    "grading.exact": "grading.text.exact",
    "grading.extraction": "grading.text.extraction",
    "grading.json_answer": "grading.text.json_answer",
    "grading.judge_endpoint": "grading.judge.endpoint",
    "grading.numeric": "grading.math.numeric",
    "grading.regex": "grading.text.regex",
    "grading.tool_call": "grading.text.tool_call",
    "grading.tool_text": "grading.text.tool_text",
    "judging": "training.verifier_judging",
    "listener": "training.observer",
    "loading": "setup.model_loading",
    "loop": "training.loop",
    "playing": "evaluation.playing",
    "preparation": "environments.data.preparation",
    "randomness": "runtime.randomness",
    "recipe": "setup.recipe",
    "run_dir": "runs.writer",
    "run_files": "runs.reader",
    "seeds": "runtime.seeds",
    "stages": "training.stages",
    "statistics": "metrics.statistics",
    "tabular": "evaluation.exploitability",
    "timeline": "metrics.timeline",
    "trackers": "runs.trackers",
    "trainer": "training.trainer",
    "warmup": "training.warmup",
}
"""Former module → where it is now, both without `kapelle.`; of modules that code of yours may have imported."""

PACKAGES: Mapping[str, str] = {
    "rollout": "rollout.play",
    "evaluation": "evaluation.evaluate",
    "metrics": "metrics.definitions",
    "engines.rollout": "engines.rollout.protocol",
    "engines.train": "engines.train.protocol",
    "environments.code": "environments.code.environment",
    "environments.openspiel": "environments.openspiel.environment",
    "environments.recorded": "environments.recorded.base",
    "grading.math": "grading.math.grade",
    "grading.code": "grading.code.grade",
    "grading.judge": "grading.judge.grade",
}
"""Package with the name of a former module → where what the module held is now."""


NAMES: Mapping[str, Mapping[str, str]] = {
    "": {"Configured": "Settings"},
    "algorithm": {
        "CriticNeed": "CriticSpec",
        "Embedding": "rows:Embedding",
        "SENTENCES": "signals.embeddings:SENTENCES",
        "Estimates": "rows:Signals",
        "Signals": "rows:Signals",
        "TurnKey": "rows:TurnKey",
        "label_of": "rows:label_of",
        "turns_of": "rows:turns_of",
    },
    "engines.rollout.protocol": {"BUILTIN_ENGINES": "engines.rollout:BUILTIN"},
    "engines.train.protocol": {
        "embedder_name": "team:embedder_name",
        "reference_name": "team:reference_name",
    },
    "environment": {"BUILTIN_ENVIRONMENTS": "environments:BUILTIN"},
    "environments.game_settings": {"Told": "GameSettings"},
    "settings.base": {
        "Configured": "Settings",
        "find_class": "runtime.plugins:find_class",
        "load_file": "runtime.plugins:load_file",
    },
    "training.observer": {"Listener": "Observer"},
    "workflow": {"BUILTIN_WORKFLOWS": "workflows:BUILTIN", "told": "append_texts"},
    "workflows.play": {"Play": "PlayWorkflow"},
}
"""Module → former name in it → name of today, with `module:` before it where it has moved."""


class _Same:
    """Gives the module of the new name under the old one."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just put the old name's there


class FormerModules:
    """Finds modules by the names of before; asked only for what nobody else has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a former name, warning that it has a new one; None for every other name."""
        new = MODULES.get(fullname.removeprefix("kapelle."))
        if new is None or not fullname.startswith("kapelle."):
            return None
        _warn(fullname, f"kapelle.{new}")
        return ModuleSpec(fullname, cast("Loader", _Same(import_module(f"kapelle.{new}"))))


def install() -> None:
    """Let former module names be imported; once is enough."""
    if not any(isinstance(finder, FormerModules) for finder in sys.meta_path):
        sys.meta_path.append(FormerModules())


def contents_of(package: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package with the name of a former module."""
    home = f"kapelle.{PACKAGES[package.removeprefix('kapelle.')]}"

    def attribute(name: str) -> Any:
        # A submodule that is being imported is asked for here first, and is no former name.
        if not name.startswith("__") and find_spec(f"{package}.{name}") is None:
            module = import_module(home)
            if hasattr(module, name):
                _warn(f"{package}.{name}", f"{home}.{name}")
                return getattr(module, name)
        raise AttributeError(f"module '{package}' has no attribute {name!r}")

    return attribute


def renamed_in(module: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module some of whose names have changed."""
    names = NAMES[module.removeprefix("kapelle").removeprefix(".")]

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute {name!r}")
        home, _, today = names[name].rpartition(":")
        home = f"kapelle.{home}" if home else module
        _warn(f"{module}.{name}", f"{home}.{today}")
        return getattr(import_module(home), today)

    return attribute


def release_caches(engine: Any) -> None:
    """Ask a rollout engine to give back what it can make again; one of before calls that `rest`."""
    if not hasattr(engine, "release_caches") and hasattr(engine, "rest"):
        _warn(f"{type(engine).__name__}.rest", "release_caches")
        engine.rest()
    else:
        engine.release_caches()


def observer_of(sections: dict[str, Any], observer: Any) -> Any:
    """Return who watches a run: `observer`, or what stands among its sections under the former name `listener`."""
    if "listener" not in sections:
        return observer
    _warn("Trainer(listener=…)", "Trainer(observer=…)")
    return sections.pop("listener")


FIELDS: Mapping[str, str] = {
    "source": "data.source",
    "group_size": "data.group_size",
    "tree": "data.tree",
    "redraw": "data.redraw",
    "scores": "data.scores",
    "observations": "data.observations",
    "epochs": "update.epochs",
    "minibatches": "update.minibatches",
    "order": "update.order",
    "entropy": "update.entropy",
}
"""Former field of `Algorithm` → where it is now."""

SIGNALS: Mapping[str, tuple[str, str]] = {
    "critic": ("signals.critic_values:CriticValues", "critic"),
    "reference_every": ("signals.reference:ReferenceLogProbs", ""),
    "proximal": ("signals.proximal:ProximalLogProbs", ""),
    "greedy": ("signals.greedy:GreedyBaseline", ""),
    "embeddings": ("signals.embeddings:Embeddings", "reader"),
    "verifier": ("signals.verifier:VerifierScores", "folder"),
}
"""Former field of `Algorithm` → the signal that it asked for, and which field of that has its value."""

HOOKS: Mapping[str, str] = {
    "reference_every": "signals.reference:RefreshReferences",
    "swap_every": "algorithms.cory:Exchange",
}
"""Former field of `Algorithm` → what is done after the update, every so many steps."""


def former_fields(algorithm: type) -> None:
    """Let an `Algorithm` be made with the fields of before, changed by them (`replace`), and asked for them."""
    whole: Any = algorithm
    make = whole.__init__

    def init(self: Any, *args: Any, **given: Any) -> None:
        former = [name for name in (*FIELDS, *SIGNALS, *HOOKS, "least_auc") if name in given]
        make(self, *args, **(_of_today(whole, given) if former else given))

    def read(self: Any, name: str) -> Any:
        if name in FIELDS:
            section, field = FIELDS[name].split(".")
            _warn(f"Algorithm.{name}", f"Algorithm.{FIELDS[name]}")
            return getattr(getattr(self, section), field)
        if name in (*SIGNALS, *HOOKS, "least_auc"):
            _warn(f"Algorithm.{name}", "Algorithm.after_update" if name in HOOKS else "Algorithm.need")
            return _asked(self, name)
        raise AttributeError(f"'Algorithm' object has no attribute {name!r}")

    whole.__init__, whole.__getattr__ = init, read


def former_order(order: type) -> None:
    """Let an `Order` be made with `sequential` and `old`, which are HAPPO's `move` now."""
    whole: Any = order
    make = whole.__init__

    def init(self: Any, *args: Any, **given: Any) -> None:
        if old := {name: given.pop(name) for name in ("sequential", "old") if name in given}:
            _warn("Order(sequential=…)", "Order(move=…)")
            if old.get("sequential"):
                one_after_another = _class("algorithms.shared.orders:one_after_another")
                given["move"] = partial(one_after_another, old=old.get("old", "behaviour"))
        make(self, *args, **given)

    whole.__init__ = init


def former_column(targets: Any, column: str) -> Any:
    """Return a column of before that targets have for each sequence now: `pair`, or `heard`."""
    found = targets.pair_S if column == "pair" else targets.observed_S
    if column not in ("pair", "heard") or (found is None and column == "pair"):
        raise KeyError(column)
    _warn(f"targets['{column}']", "targets.pair_S" if column == "pair" else "targets.observed_S")
    spread_K = targets.mask_K * 0 if found is None else found[targets.segment_K]
    return spread_K.to(targets.mask_K.dtype)


def _of_today(algorithm: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an `Algorithm` with those of before where they belong now."""
    defaults = {field.name: field.default for field in fields(algorithm)}
    row = {name: value for name, value in given.items() if name in defaults}
    for name, place in FIELDS.items():
        if name in given:
            _warn(f"Algorithm({name}=…)", f"Algorithm.{place}", 5)
            section, field = place.split(".")
            row[section] = replace(row.get(section, defaults[section]), **{field: given[name]})
    for name, (signal, holds) in SIGNALS.items():
        if name in given:
            _warn(f"Algorithm({name}=…)", f"Algorithm(needs=({signal.split(':')[1]}(…),))", 5)
            # `reference_every: 0` asks for a reference that stays as it is.
            asked = given[name] is not None and given[name] is not False
            values = {holds: given[name]} if holds else {}
            row["needs"] = _exchanged(row.get("needs", ()), _class(signal), values if asked else None)
    if "least_auc" in given:
        scores = _class(SIGNALS["verifier"][0])
        held = [signal for signal in row.get("needs", ()) if isinstance(signal, scores)]
        values = {"least_auc": given["least_auc"]}
        row["needs"] = _exchanged(row.get("needs", ()), scores, values if held else None)
    for name, hook in HOOKS.items():
        if name in given:
            _warn(f"Algorithm({name}=…)", f"Algorithm(after_update=({hook.split(':')[1]}(…),))", 5)
            every = {"every": given[name]} if given[name] else None
            row["after_update"] = _exchanged(row.get("after_update", ()), _class(hook), every)
    return row


def _exchanged(pieces: Sequence[Any], kind: Any, values: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return the pieces with one of a kind that has these values, in the place of the one there was; None: with none."""
    if values is None:
        return tuple(piece for piece in pieces if not isinstance(piece, kind))
    if not any(isinstance(piece, kind) for piece in pieces):
        return (*pieces, kind(**values))
    return tuple(replace(piece, **values) if isinstance(piece, kind) else piece for piece in pieces)


def _asked(algorithm: Any, name: str) -> Any:
    """Return what a former field that is a signal or a hook now would say."""
    hooks = {type(hook): hook.every for hook in algorithm.after_update if hasattr(hook, "every")}
    every = hooks.get(_class(HOOKS[name]), 0) if name in HOOKS else None
    if name == "swap_every":
        return every
    signal, holds = ("signals.verifier:VerifierScores", name) if name == "least_auc" else SIGNALS[name]
    found = algorithm.need(_class(signal))
    if name == "reference_every":
        return None if found is None else every
    if not holds:
        return found is not None
    return None if found is None else getattr(found, holds)


def _class(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(f"kapelle.{module}"), name)


def _warn(old: str, new: str, level: int = 3) -> None:
    warnings.warn(
        f"`{old}` is now `{new}`; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=level,
    )
