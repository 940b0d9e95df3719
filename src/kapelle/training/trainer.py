"""The trainer: a team, what it plays and how it learns, with all records of a run.

trainer = Trainer.from_recipe("demo", "training.steps=50", run_dir="runs/mine")
trainer.train()
print(trainer.evaluate(problems=500))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.errors import KapelleError
from kapelle.evaluation.evaluate import Evaluation
from kapelle.former_names import observer_of
from kapelle.models.language_model import LanguageModel
from kapelle.runtime.interrupts import StopRequested, catch_interrupts, stop_asked, stop_if_asked
from kapelle.runtime.ranks import told
from kapelle.settings.schema import RunConfig
from kapelle.setup.model_loading import name_model
from kapelle.setup.preparation import prepare, rows_left_out
from kapelle.setup.recipe import load_recipe, resolve
from kapelle.training.circumstances import note_start
from kapelle.training.held_out import HeldOut
from kapelle.training.joining import check_same_run, join_ranks, of_the_first
from kapelle.training.loop import Step
from kapelle.training.observer import Observer, Silent, report_notes
from kapelle.training.progress import Progress
from kapelle.training.records import open_records
from kapelle.training.resuming import config_of_run
from kapelle.training.starting import begin_with, check_weights, load_pieces
from kapelle.training.summary import Summary


class Trainer:
    """Trains one team; use it as a context manager, or `close` it."""

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
        start_from: Mapping[str, Path] | None = None,
        **sections: Any,
    ) -> None:
        """Check everything, then build it.

        `config`, or its sections as keywords (`environment=…, workflow=…, algorithm=…, team=…`), where `model` may
        also be a path or a `LanguageModel` made of a transformers model and its tokeniser. `models` maps
        the value of `model.path` or an agent's `model` to models in memory. `engine` replaces the recipe's rollout
        engine. `start_from` names folders of weights, by policy, that training
        starts from. Without `run_dir` nothing is written. Raises the errors of `errors.py`.
        """
        given = dict(models or {})
        self.observer = observer_of(sections, observer) or Silent()
        self.config = config if config is not None else resolve(name_model(sections, given))
        prepared = prepare(self.config, given)
        self.algorithm, self.team = prepared.algorithm, prepared.team
        for line in rows_left_out(self.config):
            self.observer.phase("data", line)
        check_weights(prepared, start_from or {})
        ranks = self.ranks = join_ranks(self.config)
        if ranks.rank:
            self.observer = Silent()
        check_same_run(ranks, self.config, self.team, start_from or {})
        opened = partial(open_records, run_dir, self.config, origin or {}, self.observer, resume=resume)
        self._records = of_the_first(ranks, opened)
        self._closing = ExitStack()
        self._closing.callback(self._records.close)
        try:
            made = load_pieces(prepared, engine, self.observer.warmup, partial(self._records.phase, 0), ranks)
            self._closing.push(made.closing)
            self.models, self.base_hashes = made.models, made.base_hashes
            self.engine, self.play, self._loop = made.engine, made.play, made.loop
            self._held_out = HeldOut(self.config, self.algorithm, made)
            run, say = self._records.run, partial(self.observer.phase, "checkpoint")
            self._progress = Progress(self.config, made, self._held_out, run, say, ranks)
            self._closing.callback(self._progress.end)
            if start_from:
                begin_with(start_from, made, self.algorithm)
            self._records.track(self.config)
            if told(ranks, "resume", lambda: run is not None and run.resumed):
                self._progress.go_back()
            if run is not None:
                note_start(run, self.config, self.team, self.done, start_from or {}, self.observer)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_recipe(
        cls, name: str, *settings: str, overlays: tuple[str, ...] = (), real: bool = False, **options: Any
    ) -> Trainer:
        """Build a trainer from a built-in recipe or a YAML file, with `key.path=value` settings.

        `real` takes the recipe's values for a pretrained model. The observer, or a warning, reports what of the recipe
        does not suit `model.path`.
        """
        recipe = load_recipe(name, overlays, settings, real=real)
        report_notes(recipe.notes, options.get("observer"))
        return cls(recipe.config, origin=recipe.origin, **options)

    @classmethod
    def from_run(cls, path: str | Path, *settings: str, **options: Any) -> Trainer:
        """Load a run's newest whole checkpoint to evaluate or collect; the run directory is only read."""
        trainer = cls(config_of_run(Path(path), settings), **options)
        trainer.load_checkpoint(Path(path) / "checkpoints")
        return trainer

    @property
    def done(self) -> int:
        """Steps behind the weights."""
        return self._progress.done

    def steps(self, count: int | None = None) -> Iterator[Step]:
        """Take `count` more steps (by default all that are left), yielding each when it is recorded."""
        last = self.config.training.steps if count is None else self.done + count
        every, progress = self.config.checkpoint.every, self._progress
        progress.refuse_torn()
        progress.keep_start()
        if progress.owed:
            self._measure(last)
            if self.algorithm.judges and self.done % every == 0 < self.done:
                self.save()
            progress.owed = False
        while self.done < last:
            step = progress.step()
            self._records.step(step, last)
            self._measure(last)
            if progress.kept and self.done % every == 0:
                self._save_on_the_way()
            yield step

    def _measure(self, last: int) -> None:
        every = self.config.evaluation.every
        if every and self.done % every == 0 and 0 < self.done < last:
            self.evaluate(self.config.evaluation.problems_while_training)

    def train(self, steps: int | None = None) -> Summary:
        """Evaluate, train, evaluate; the first Ctrl-C or SIGTERM interrupts the current step, undoes it and saves."""
        before = after = None
        measured = self.config.evaluation.before_and_after
        with catch_interrupts(lambda _: self.observer.phase("stopping", "then saving")) as stopped:
            try:
                before = self.evaluate() if self.done == 0 and measured else None
                self._phase("training", f"{self.algorithm.name} on {self.play.environment.name}")
                for _ in self.steps(steps):
                    stop_if_asked()
                self._save_new()
                after = self.evaluate() if measured else None
            except StopRequested:
                self._save_new()
            self._records.end(self.done, stopped=stopped.received is not None)
        return Summary(self.done, before, after, stopped.exit_code, self._progress.went_back)

    def evaluate(self, problems: int | None = None, greedy: bool | None = None) -> Evaluation:
        """Play held-out problems of the test split, or evaluate the trained verifier; record the result."""
        problems = problems or self.config.evaluation.problems
        if (known := self._held_out.known(self.done, problems)) is not None:
            return known
        self._progress.keep_start()
        self._phase("evaluation", "unseen problems")
        result = self._held_out.measure(self.done, problems, greedy)
        self._records.evaluation(self.done, result)
        self._phase("training", "")
        return result

    def _phase(self, name: str, detail: str) -> None:
        self._records.phase(self.done, name, detail)

    def save(self) -> Path:
        """Write a checkpoint; if that fails nothing is lost."""
        self._judge()
        return self._progress.save()

    def _judge(self) -> None:
        """Evaluate a verifier that is to be saved: the judgement in its folder is of the weights beside it."""
        if self.algorithm.judges and self._held_out.judgement(self.done) is None and not stop_asked():
            self.evaluate()

    def _save_on_the_way(self) -> None:
        if not self.config.checkpoint.background:
            self.save()
            return
        self._judge()
        self._progress.begin_save()

    def _save_new(self) -> None:
        self._progress.settle(wait=True)
        if self._progress.is_new:
            self.save()

    def save_policies(self, folder: Path) -> None:
        """Write every trained policy in a form that others can load: adapters as PEFT folders, models by `save_pretrained`."""
        self._progress.write_policies(folder)

    def load_checkpoint(self, folder: Path) -> Mapping[str, Any]:
        """Load the newest whole checkpoint of a folder and return its loop part; report damaged ones."""
        return self._progress.load(folder)

    def close(self) -> None:
        """Release the run directory, the trackers and the engines; the caller closes an `engine` that it passed."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._progress.end(drop=kind is KeyboardInterrupt)  # before the directory is released
        except KapelleError as error:
            if kind is None:
                kind = type(error)
                raise
        finally:
            self._records.leave(kind)
            self.close()
