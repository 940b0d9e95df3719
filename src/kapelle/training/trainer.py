"""The trainer, which trains and evaluates a team and records the run.

trainer = Trainer.from_recipe("demo", "training.steps=50", run_dir="runs/mine")
trainer.train()
print(trainer.evaluate(problems=500))
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.environment import InMemory, offers
from kapelle.errors import ConfigError, KapelleError, ParityError, did_you_mean
from kapelle.functional.statistics import finite
from kapelle.models.language_model import LanguageModel
from kapelle.rollout.evaluation.evaluate import Evaluation
from kapelle.runs.blamed import Blame
from kapelle.runs.named_checkpoint import named_checkpoint, split_run
from kapelle.runs.rank_log import rank_log
from kapelle.runs.summary import in_words, telling, verdict_of
from kapelle.runs.verdict import ADVICE
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.interrupts import StopRequested, catch_interrupts, stop_if_requested, stop_requested
from kapelle.runtime.machine import long_lived_apart
from kapelle.runtime.process_tree import RANK_LOG, doing
from kapelle.runtime.ranks import broadcast
from kapelle.settings.base import (
    Settings,
    parts_of,
)
from kapelle.settings.messages import in_python, names_settings, unknown_keywords
from kapelle.settings.schema import (
    RunConfig,
)
from kapelle.setup.model_loading import name_model
from kapelle.setup.preparation import excluded_rows, in_training, prepare
from kapelle.setup.recipe import Recipe, derived, from_keywords, given_origin, laid_origin, load_recipe
from kapelle.training.blaming import blame_team
from kapelle.training.console import Logged
from kapelle.training.held_out import HeldOut
from kapelle.training.observer import Observer, Silent
from kapelle.training.progress import Progress
from kapelle.training.provenance import config_of_run, note_start
from kapelle.training.records import open_records
from kapelle.training.stages import check_weights
from kapelle.training.starting import check_same_run, join_ranks, load_pieces
from kapelle.training.step_report import IdleSteps, Step
from kapelle.types import Episode, Group, as_table

# -------- Arguments of `Trainer` other than the sections of a run


def engine_of(sections: dict[str, Any], engine: Any, run_dir: Any, observer: Any) -> Any:
    """Return the engine that was passed, or None if engine settings were passed, which are added to `sections`.

    Raises ConfigError for invalid arguments.
    """
    if run_dir is not None and not isinstance(run_dir, str | Path):
        raise ConfigError(f"`run_dir` is {run_dir!r}. Give the path of a folder.")
    if run_dir == "":
        raise ConfigError(
            "`run_dir` is an empty string. Give the path of a folder, or None to write nothing."
        )
    missing = [name for name in ("phase", "warmup", "step", "evaluation") if not hasattr(observer, name)]
    if missing:
        raise ConfigError(
            f"`observer` is {type(observer).__name__}, which has no `{missing[0]}`. Give an observer as described in `kapelle.training.observer`."
        )
    if isinstance(engine, str | Mapping | Settings):
        sections["engine"] = {"name": engine} if isinstance(engine, str) else engine
        return None
    if engine is not None and not hasattr(engine, "generate"):
        raise ConfigError(
            f"`engine` is {type(engine).__name__}, which has no `generate`. Give an engine, or its settings: {{'name': 'local'}}."
        )
    return engine


# -------- The result of a run


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a call of `Trainer.train`. `print` displays it in five lines."""

    steps: int
    """The number of steps for which the weights have been trained."""
    before: Evaluation | None
    after: Evaluation | None
    stopped_by: int
    """The exit code of the signal that stopped training (130 or 143), or 0 if training was not stopped."""
    seconds: float = 0.0
    """The wall time of the call in seconds, including evaluations."""
    run_dir: Path | None = None
    """The run directory, or None if there is none."""
    last: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last step of the call. The mapping is empty if no step was taken."""
    idle: str = ""
    """The reason why the last step had no learning signal. The string is empty if there was a learning signal."""

    def __str__(self) -> str:
        """Return five lines: the steps, the evaluations before and after training, the metrics of the last step, and the run directory."""
        ended = f"stopped, exit code {self.stopped_by}" if self.stopped_by else "done"
        learned = [f"nothing to learn from: {self.idle}"] if self.idle else []
        lines = {
            "steps": f"{self.steps}, {ended}, {self.seconds:.1f} s",
            "before": "not measured" if self.before is None else str(self.before),
            "after": "not measured" if self.after is None else str(self.after),
            "last step": "  ".join([*learned, in_words(telling(self.last))]).rstrip()
            if self.last
            else "none taken",
            "run": "not saved: set `run_dir` to save it" if self.run_dir is None else str(self.run_dir),
        }
        return "\n".join(f"{name:11}{text}" for name, text in lines.items())

    def _repr_html_(self) -> str:
        """Return the result as an HTML table for notebooks."""
        measured = [
            (name, str(each)) for name, each in (("before", self.before), ("after", self.after)) if each
        ]
        stopped = [("stopped by signal", f"exit code {self.stopped_by}")] if self.stopped_by else []
        return as_table([("steps", str(self.steps)), *measured, *stopped])


# -------- Custom metrics: a function of a step's episodes; its numbers are recorded as `custom/NAME`

Metrics = Callable[[Sequence[Episode]], Mapping[str, float]]
"""A function from the episodes of a step (including failed episodes) to numbers by name."""
CUSTOM = "custom/"
"""The prefix of the names of custom metrics."""


class CustomMetrics:
    """Compute custom metrics with a user's function. Each error of the function is reported once, and the run continues."""

    def __init__(self, function: Metrics | None, say: Callable[[str], None]) -> None:
        """Set the function, if there is one.

        Errors of the function are reported to `say`. Raises ConfigError if `function` is not callable.
        """
        if function is not None and not callable(function):
            raise ConfigError(
                f"`metrics` is {type(function).__name__}. Give a function that takes a list of episodes and returns a mapping from names to numbers."
            )
        self._function = function
        self._report = say
        self._reported: set[str] = set()

    def of(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the custom metrics of the groups. The names of the metrics begin with the prefix `custom/`."""
        if self._function is None:
            return {}
        try:
            found = dict(self._function([episode for group in groups for episode in group.episodes]))
        except Exception as error:  # noqa: BLE001 - user code must not cost a step
            self._once(f"raised {reason(error)}")
            return {}
        row: dict[str, float] = {}
        for name, value in found.items():
            number = finite(value)
            if number is not None:
                row[f"{CUSTOM}{name}"] = number
            else:
                self._once(f"returned {str(value)[:40]!r} for '{name}', not a finite number")
        return row

    def _once(self, what: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._report(f"the function of `metrics=` {what}; these numbers are not recorded")


def _recipe(
    config: RunConfig | None,
    sections: Mapping[str, Any],
    given: dict[str, LanguageModel],
    origin: Mapping[str, str] | None,
) -> Recipe:
    """Return the settings of a run from a config or from sections, with their origins.

    Raises ConfigError if both or neither are given.
    """
    if isinstance(config, str):
        raise ConfigError(
            f"`Trainer` does not accept the name of a recipe. Write Trainer.from_recipe({config!r})."
        )
    if config is not None and not isinstance(config, RunConfig):
        raise ConfigError(
            f"Trainer takes the settings of a run, not {type(config).__name__}. Sections are keywords: "
            "Trainer(model=…, environment=…), or Trainer(**sections)."
        )
    if config is not None and sections:
        _refuse("Trainer", next(iter(sections)), _options())
    if config is not None:
        return Recipe(config, given_origin(config, config, "config") if origin is None else dict(origin))
    unknown = partial(unknown_keywords, Trainer.__init__, "Trainer")
    found = from_keywords(name_model(sections, given), unknown, derived(origin or {}))
    return replace(found, origin=laid_origin(found.origin, origin or {}))


def _options(*decided: str) -> list[str]:
    """Return the keywords that a trainer accepts together with a whole recipe or run, except the keywords in `decided`."""
    aside = {"self", "config", "sections", *decided}
    return [each for each in signature(Trainer.__init__).parameters if each not in aside]


def _check_options(call: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError if an option is not a keyword that is allowed together with a whole recipe or run."""
    word = next((word for word in options if word not in known), None)
    if word is not None:
        _refuse(call, word, known)


def _refuse(call: str, word: str, known: Sequence[str]) -> NoReturn:
    """Raise ConfigError for a keyword that is not allowed together with a whole recipe or run: a setting or an unknown keyword."""
    hint = did_you_mean(word, known)
    meant = hint.startswith(" Did you mean") and word not in RunConfig.model_fields
    if meant or not names_settings(word):
        raise ConfigError(f"`{call}` has no keyword '{word}'.{hint}")
    what, example = "recipe", 'Trainer.from_recipe("demo", "training.steps=3", run_dir="runs/mine")'
    if call == "Trainer.from_run":
        what, example = "run", 'Trainer.from_run("runs/mine", "evaluation.problems=100")'
    raise ConfigError(
        f"`{word}` cannot be combined with a whole {what}. Write settings of a {what} as strings: {example}."
    )


def _check_count(name: str, count: object, least: int) -> None:
    """Raise ConfigError if an argument is neither None nor an integer of at least `least`."""
    if count is not None and (type(count) is not int or count < least):
        raise ConfigError(f"`{name}` is {count!r:.40}. Give a whole number of at least {least}, or omit it.")


P = ParamSpec("P")
R = TypeVar("R")


SEVERAL = 20
"""The minimum number of steps for which long-lived objects are excluded from garbage collection. The exclusion takes a third
of a second, which is more than it saves in fewer steps."""


class Trainer:
    """A trainer for one team. Use the trainer as a context manager, or call `close` at the end."""

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        models: Mapping[str, LanguageModel] | None = None,
        engine: RolloutEngine | None = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        observer: Observer | None = None,
        origin: Mapping[str, str] | None = None,
        start_from: str | Mapping[str, str | Path] | None = None,
        metrics: Metrics | None = None,
        **sections: Any,
    ) -> None:
        """Check all settings, load the models and build the run. Raises errors of `kapelle.errors`.

        Settings are given as a `config`, or as sections in keyword arguments (`environment=…, workflow=…, algorithm=…,
        team=…`). A section is an object of typed settings (`kapelle.settings.schema.TeamConfig(…)`) or a dict. The section
        `model` may also be a path or a `LanguageModel`. The argument `models` maps values of `model.path` or of an agent's
        `model` to models in memory. `engine` replaces the rollout engine of the recipe. `start_from` names initial weights in
        addition to the setting; a `Path` is the folder of a single policy. `origin` describes, by dotted setting, where
        values come from. If `run_dir` is None, no files are written. The function `metrics` is called with the episodes of
        each step, and the numbers that it returns are recorded as `custom/NAME`.
        """
        given, sections = dict(models or {}), dict(sections)
        with in_python():
            self.observer = observer or Silent()
            self._warns = isinstance(self.observer, Silent)
            engine = engine_of(sections, engine, run_dir, self.observer)
            recipe = _recipe(config, sections, given, origin)
            self.config = recipe.config
            for note in recipe.notes:
                self._note(note, observer)
            logged = Logged(self.observer)
            if run_dir is not None:
                self.observer = logged
            if run_dir is None and self.config.trackers:
                raise ConfigError(
                    f"The tracker '{self.config.trackers[0].name}' needs a run directory, whose metrics it shows. Set "
                    '`run_dir="runs/mine"`, or remove `trackers`.'
                )
            self._idle = IdleSteps(
                self._tell, self.config.model_dump(), lambda text: self.observer.phase("learning", text)
            )
            self._custom = CustomMetrics(metrics, partial(self.observer.phase, "metrics"))
            with recipe.read.explained():
                prepared = prepare(self.config, given)
            self.config, self.algorithm, self.team = prepared.config, prepared.algorithm, prepared.team
            if prepared.config.training.steps != recipe.config.training.steps:
                counted = {"training.steps": "counted from training.epochs"}
                recipe = replace(recipe, origin={**recipe.origin, **counted})
            for line in prepared.notes:
                self.observer.phase("tasks", line)
            for line in prepared.doubts:
                self.observer.phase("note", line)
            rows = excluded_rows(self.config)
            for line in rows:
                self.observer.phase("data", line)
            starts = check_weights(prepared, start_from, run_dir)
            ranks = self.ranks = join_ranks(self.config)
            if ranks.rank:
                self.observer = Silent()
            self.observer.phase("weights", f"trained: {in_training(self.config, self.team)}")
            check_same_run(ranks, self.config, self.team, starts)
            self._records = open_records(
                run_dir, self.config, recipe.origin, self.observer, resume=resume, ranks=ranks
            )
            self._closing = ExitStack()
            self._closing.callback(self._records.close)
            run = self._records.run
            try:
                if run is not None:
                    logged.open(run.log)
                if run_dir is not None:
                    self._closing.enter_context(rank_log(Path(run_dir), ranks))
                doing("loading the models")
                report = partial(self._records.phase, 0)
                place = None if run_dir is None else Path(run_dir)
                made = load_pieces(prepared, engine, starts, self.observer.warmup, report, ranks, place)
                self._closing.push(made.closing)
                self.models, self.base_hashes = made.models, made.base_hashes
                self.engine, self.setup, self.loop = made.engine, made.setup, made.loop
                self._held_out = HeldOut(self.config, self.algorithm, made)
                damaged = partial(self.observer.phase, "checkpoint")
                self._progress = Progress(self.config, made, self._held_out, run, damaged, ranks)
                self._closing.callback(self._progress.end)
                self._records.track(self.config)
                if broadcast(ranks, "resume", lambda: run is not None and run.resumed):
                    self._progress.go_back()
                if run is not None:
                    for _, part in parts_of(self.config.environment):
                        if offers(part, InMemory):
                            part.keep(run.path)
                    excluded = (*prepared.excluded, *rows)
                    note_start(
                        run,
                        self.config,
                        self.team,
                        self.done,
                        starts,
                        self.observer,
                        excluded,
                        warns=observer is None,
                    )
            except BaseException as error:
                RANK_LOG.error("did not start", exc_info=error)
                self._records.leave(error)
                self.close()
                raise

    @classmethod
    def from_recipe(
        cls, name: str, *settings: str, overlays: tuple[str, ...] = (), real: bool = False, **options: Any
    ) -> Trainer:
        """Create a trainer from a built-in recipe or a YAML file, with additional settings in the form `key.path=value`.

        If `real` is true, the values of the recipe for a pretrained model are used. Values that do not suit `model.path` are
        reported to the observer, or as a warning.
        """
        with in_python():
            _check_options("Trainer.from_recipe", options, _options("origin"))
            recipe = load_recipe(name, overlays, settings, real=real)
            observer: Observer | None = options.get("observer")
            for note in recipe.notes:
                cls._note(note, observer)
            with recipe.read.explained():
                return cls(recipe.config, origin=recipe.origin, **options)

    @staticmethod
    def _note(note: str, observer: Observer | None) -> None:
        """Report a note about the settings to the observer, or as a warning if there is no observer."""
        if observer is None:
            warnings.warn(note, stacklevel=3)
        else:
            observer.phase("recipe", note)

    @classmethod
    def from_run(cls, path: str | Path, *settings: str, **options: Any) -> Trainer:
        """Create a trainer with the newest intact checkpoint of a run, to evaluate the team or collect episodes.

        Another checkpoint is selected by `RUN@best` or by its step, for example `RUN@12`. The run directory is only read.
        """
        with in_python():
            _check_options("Trainer.from_run", options, _options())
            run, which = split_run(str(path))
            config, named = config_of_run(run, settings), named_checkpoint(run, which)
            less: dict[str, Any] = {"start_from": {}}
            if options.get("run_dir") is None:
                less["trackers"] = ()
            options.setdefault("origin", {})  # all settings come from the run
            trainer = cls(config.model_copy(update=less), **options)
            trainer.load_checkpoint(run / "checkpoints" if named is None else named)
            return trainer

    @property
    def done(self) -> int:
        """The number of steps for which the weights have been trained."""
        return self._progress.done

    def steps(self, count: int | None = None) -> Iterator[Step]:
        """Take `count` more steps, or all remaining steps by default. Yield each step after it is recorded."""
        _check_count("count", count, least=0)
        taken = self._taken(count)
        while True:
            with in_python():  # ends before the caller continues
                step = next(taken, None)
            if step is None:
                return
            yield step

    def _taken(self, count: int | None) -> Iterator[Step]:
        every, progress = self.config.checkpoint.every, self._progress
        progress.restore()
        progress.keep_start()
        last = self.config.training.steps if count is None else self.done + count
        # A run that was stopped before or during an evaluation repeats it first.
        if progress.owed:
            stop_if_requested()
            self._measure(last)
            if self.algorithm.judges and self.done % every == 0 < self.done:
                self.save()
            progress.owed = False  # no evaluation at the start and the end
        with long_lived_apart() if last - self.done >= SEVERAL else nullcontext():
            while self.done < last:
                stop_if_requested()
                try:
                    step = progress.step(partial(self._record, last))
                except ParityError as error:
                    raise self._explained(error) from error
                # Evaluate before saving, because the value decides whether this checkpoint is the best one.
                measured = self._measure(last)
                if progress.kept and (self.done % every == 0 or (measured and progress.is_best())):
                    if self.config.checkpoint.background:
                        self._judge()
                        progress.begin_save()
                    else:
                        self.save()
                yield step

    def _explained(self, error: ParityError) -> ParityError:
        """Return the error that ends a run.

        If the metrics show that the run diverges, the error says so, because the sampler is then not the cause.
        """
        run = self._records.run
        verdict = None if run is None else verdict_of(run.path)
        found = [] if verdict is None else [each for each in verdict.evidence if each.word == "diverging"]
        if not found:
            return error
        return ParityError(
            f"The run diverges: {found[0].sentence}. {ADVICE['diverging'].remedy} It ended here: {error}"
        )

    def _record(self, last: int, step: Step) -> Step:
        """Record a step, and return the step with custom metrics."""
        step = replace(step, metrics={**step.metrics, **self._custom.of(step.groups)})
        self._records.step(step, last)
        self._idle.note(step)
        return step

    def _measure(self, last: int) -> bool:
        """Evaluate if an evaluation is due, and return whether an evaluation was done."""
        every = self.config.evaluation.every
        due = every > 0 and self.done % every == 0 and 0 < self.done < last
        if not due:
            return False
        self._progress.owed = True  # it stays due after a stop
        if stop_requested():
            return False
        self.evaluate(self.config.evaluation.problems_while_training)
        self._progress.owed = False
        return True

    @in_python()
    def train(self, steps: int | None = None) -> Summary:
        """Evaluate, train and evaluate again.

        The first Ctrl-C or SIGTERM stops training after the current step and saves a checkpoint.
        """
        _check_count("steps", steps, least=0)
        before = after = None
        last: Mapping[str, float] = {}
        idle = ""
        start = time.monotonic()
        measured = self.config.evaluation.before_and_after
        self._progress.restore()
        with catch_interrupts(
            lambda number: self.observer.phase("stopping", self._progress.when_stopped(number))
        ) as stopped:
            try:
                before = self.evaluate() if self.done == 0 and measured else None
                total = self.config.training.steps
                has_ended = steps is None and 0 < total <= self.done
                self._phase(
                    "training",
                    f"all {total} steps are done; to continue, raise `training.steps`"
                    if has_ended
                    else f"{self.algorithm.name} on {self.setup.environment.name}",
                )
                for step in self.steps(steps):
                    last, idle = step.metrics, step.idle
                    stop_if_requested()
                self._save_new()
                after = self.evaluate() if measured else None
            except StopRequested:
                self._save_new()
            except Exception as error:
                self._records.fail(error)
                raise
            self._records.end(self.done, stopped=stopped.received is not None)
        return Summary(
            self.done,
            before,
            after,
            stopped.exit_code,
            time.monotonic() - start,
            self._records.run.path if self._records.run is not None else None,
            last,
            idle,
        )

    @in_python()
    def evaluate(self, problems: int | None = None, greedy: bool | None = None) -> Evaluation:
        """Evaluate the team (or the trained verifier) on held-out problems, and record the result."""
        _check_count("problems", problems, least=1)
        problems = problems or self.config.evaluation.problems
        self._progress.restore()
        if (known := self._held_out.known(self.done, problems)) is not None:
            return known
        self._progress.keep_start()
        stop_if_requested()
        self._phase("evaluation", "unseen problems")
        try:
            result = self._held_out.measure(self.done, problems, greedy)
        except KapelleError:
            self._records.report_end_repeated()
            raise
        self._records.evaluation(self.done, result)
        if not self._records.report_end_repeated():
            self._phase("training", "")
        return result

    @in_python()
    def blame(
        self, episodes: int = 50, samples: int = 8, split: str = "eval", seed: int | None = None
    ) -> Blame:
        """Return the blame of each turn in evaluation episodes with the current weights.

        See `kapelle.blame` for the blame of a saved run. If there is a run directory, the result is stored in its folder
        `blame`.
        """
        run = self._records.run
        return blame_team(self, None if run is None else run.path, (), episodes, samples, split, seed)

    def _tell(self, text: str) -> None:
        """Report a line to the observer, and as a Python warning if no observer was passed."""
        if self._warns and not self.ranks.rank:
            warnings.warn(text, stacklevel=3)
        self.observer.phase("learning", text)

    def _phase(self, name: str, detail: str) -> None:
        doing(f"{name} after step {self.done}")
        self._records.phase(self.done, name, detail)

    @in_python()
    def save(self) -> Path:
        """Write a checkpoint to the run directory. Raises ConfigError if there is no run directory."""
        if not self._progress.kept:
            raise ConfigError(
                'A checkpoint needs a run directory. Create the trainer with `run_dir="runs/mine"`, or write only the policies: '
                '`trainer.save_policies(Path("mine"))`.'
            )
        self._judge()
        return self._progress.save()

    def _judge(self) -> None:
        """Evaluate a trained verifier before it is saved, because its judgement is saved with it."""
        if self.algorithm.judges and self._held_out.judgement(self.done) is None and not stop_requested():
            self.evaluate()

    def _save_new(self) -> None:
        self._progress.settle(wait=True)
        if self._progress.is_new:
            self.save()

    @in_python()
    def save_policies(self, folder: str | Path) -> None:
        """Write every trained policy in a standard format: adapters as PEFT folders, and whole models as written by `save_pretrained`."""
        self._progress.check_finished()
        self._progress.write_policies(Path(folder))

    @in_python()
    def load_checkpoint(self, folder: str | Path) -> Mapping[str, Any]:
        """Load a checkpoint, or the newest intact checkpoint in a folder, and return the state of the loop.

        Damaged checkpoints are reported.
        """
        return self._progress.load(Path(folder))

    def close(self) -> None:
        """Release the run directory, the trackers and the engines.

        An `engine` that was passed to the trainer is closed by the caller.
        """
        self._closing.close()

    def close_at_exit(self) -> None:
        """Close the trainer automatically when it is garbage-collected, or at the latest when Python exits."""
        weakref.finalize(self, self._closing.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None = None, *_: object
    ) -> None:
        if raised is not None:
            RANK_LOG.error("ended by an error", exc_info=raised)
        try:
            self._progress.end(drop=kind is KeyboardInterrupt)  # before the directory is released
        except KapelleError as error:
            if kind is None:
                raised = error
                raise
        finally:
            self._records.leave(raised)
            self.close()
