"""The trainer: a team, what it plays and how it learns, with everything that is kept of a run.

trainer = Trainer.from_recipe("demo", "training.steps=50", run_dir="runs/mine")
trainer.train()
print(trainer.evaluate(problems=500))
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kapelle.algorithm import Algorithm
from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.errors import CheckpointError, ConfigError
from kapelle.evaluation.evaluate import Evaluation, choose_tasks, evaluate_tasks
from kapelle.former_names import observer_of
from kapelle.metrics.definitions import own_returns
from kapelle.models.language_model import LanguageModel
from kapelle.models.weights import weights_hash
from kapelle.rollout.play import make_play
from kapelle.runs import checkpoint
from kapelle.runs.checkpoint_contents import (
    check_start,
    check_verifier,
    load_policies,
    load_verifier,
    read_checkpoint,
    write_checkpoint,
    write_policies,
)
from kapelle.runs.trackers import open_trackers
from kapelle.runs.writer import RunDirectory, episode_steps, read_evaluations
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.interrupts import StopRequested, catch_interrupts, stop_asked, stop_if_asked, unbroken
from kapelle.runtime.randomness import capture_random, keep_imports_from_drawing, restore_random
from kapelle.settings.schema import RunConfig
from kapelle.setup.model_loading import build_engine, build_train_engine, name_model, teacher
from kapelle.setup.preparation import Prepared, prepare, rows_left_out
from kapelle.setup.recipe import Recipe, load_recipe, resolve
from kapelle.signals.reference import ReferenceLogProbs
from kapelle.signals.verifier import VerifierScores
from kapelle.team import VERIFIER, Team
from kapelle.training.circumstances import note_start
from kapelle.training.loop import Loop, Step, greedy_play
from kapelle.training.observer import Observer, Silent
from kapelle.training.resuming import open_run
from kapelle.training.summary import Summary
from kapelle.training.verifier_judging import judge_held_out
from kapelle.training.warmup import warmed_bases


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
        what `model.path` or an agent's `model` says to models in memory. `engine` plays the policies in place
        of the local engine. `start_from` names folders of weights, by policy, that training
        goes on from. Without `run_dir` nothing is written. Raises the errors of `errors.py`.
        """
        given = dict(models or {})
        self.observer = observer_of(sections, observer) or Silent()
        self.config = config if config is not None else resolve(name_model(sections, given))
        prepared = prepare(self.config, given)
        self.algorithm: Algorithm = prepared.algorithm
        self.team: Team = prepared.team
        for said in rows_left_out(self.config):
            self.observer.phase("data", said)
        verifier = self.algorithm.need(VerifierScores)
        check_start(start_from or {}, self.team, prepared.outlines, verifier.folder if verifier else None)
        if verifier is not None and verifier.least_auc is not None:
            check_verifier(Path(verifier.folder), verifier.least_auc)
        self.done = 0
        """Steps behind the weights."""
        self._judged: tuple[int, int, Evaluation] | None = None
        """After which step, on how many problems and how well the verifier that is trained judged last."""
        self._saved: int | None = None
        """The step of the newest checkpoint."""
        self._owed = self._went_back = self._torn = False
        """Whether the evaluation of the step that a run goes on from is missing, and whether a stop cost steps."""
        self._run = self._open_run(run_dir, resume, origin)
        try:
            self._build(prepared, engine)
            if start_from:
                self._start_from(start_from)
            run = self._run
            self._trackers = (
                [] if run is None else open_trackers(self.config.trackers, run.path, self.config.model_dump())
            )
            if run is not None:
                if run.resumed:
                    self._resume(run)
                note_start(run, self.config, self.team, self.done, start_from or {}, self.observer)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_recipe(
        cls, name: str, *settings: str, overlays: tuple[str, ...] = (), real: bool = False, **options: Any
    ) -> Trainer:
        """Build a trainer from a built-in recipe or a YAML file, with `key.path=value` settings.

        `real` takes the recipe's values for a pretrained model. The observer, or a warning, says what of the recipe
        does not suit `model.path`.
        """
        recipe: Recipe = load_recipe(name, overlays, settings, real=real)
        for note in recipe.notes:
            if options.get("observer") is None:
                warnings.warn(note, stacklevel=2)
            else:
                options["observer"].phase("recipe", note)
        return cls(recipe.config, origin=recipe.origin, **options)

    @classmethod
    def from_run(cls, path: str | Path, *settings: str, **options: Any) -> Trainer:
        """Load a run's newest whole checkpoint to evaluate or collect; the run directory is only read."""
        folder = Path(path)
        if not (folder / "config.yaml").is_file():
            raise CheckpointError(f"{folder} is no run directory: it has no config.yaml.")
        trainer = cls(load_recipe(str(folder / "config.yaml"), (), settings).config, **options)
        trainer.load_checkpoint(folder / "checkpoints")
        return trainer

    def _open_run(
        self, path: str | Path | None, resume: bool, origin: Mapping[str, str] | None
    ) -> RunDirectory | None:
        if path is None:
            if resume:
                raise ConfigError(
                    "There is nothing to resume without a run directory. Name it with --run-dir."
                )
            return None
        keep_imports_from_drawing()
        say = partial(self.observer.phase, "resume")
        return open_run(Path(path), self.config, origin or {}, say, resume=resume)

    def _build(self, prepared: Prepared, engine: RolloutEngine | None) -> None:
        held: dict[str, LanguageModel] = {}
        bases = warmed_bases(self.config, self.team, self.observer.warmup, self._phase, held)
        warmed = prepared.on_bases(bases, held)
        team = warmed.team
        self._phase("loading", ", ".join(dict.fromkeys(self.team.bases.values())))
        self.models = warmed.load()
        self.base_hashes = {base: weights_hash(m.base_parameters()) for base, m in self.models.items()}
        self.engine = build_train_engine(self.config, self.algorithm, team, self.models)
        verifier = self.algorithm.need(VerifierScores)
        if verifier is not None:
            load_verifier(Path(verifier.folder), team.critics[VERIFIER], self.models, self.engine)
        past = {policy.name: Path(policy.past) for policy in team.every.values() if policy.past}
        load_policies(past, team, self.engine, self.base_hashes)
        speaks = engine or build_engine(self.config, self.models, self.team)
        self.play = make_play(self.config, self.team, speaks)
        acting = self.play
        if not self.algorithm.plays:
            acting = replace(self.play, engine=teacher(self.config, self.team, self.models))
        self._acting = acting
        self._loop = Loop(self.config, self.algorithm, acting, self.engine, player=self.play.engine)
        self._loop.publish()

    def _start_from(self, folders: Mapping[str, Path]) -> None:
        load_policies(folders, self.team, self.engine, self.base_hashes)
        if self.algorithm.need(ReferenceLogProbs) is not None:
            self.engine.refresh_references()
        self._loop.publish()

    def steps(self, count: int | None = None) -> Iterator[Step]:
        """Take `count` more steps (those that are left without it), yielding each when it is recorded."""
        last = self.config.training.steps if count is None else self.done + count
        self._refuse_torn()
        self._keep_start()
        self._loop.may_go_back = self._run is not None
        if self._owed:
            self._measure(last)
            if self.algorithm.judges and self.done % self.config.checkpoint.every == 0 < self.done:
                self.save()
            self._owed = False
        while self.done < last:
            try:
                step = self._loop.step(self.done + 1)
            except StopRequested:
                self._take_back()
                raise
            except BaseException:
                self._torn = True  # unless everything can be put back
                self._torn = not self._loop.take_back()
                raise
            self.done = step.number
            self._record(step)
            self.observer.step(step, last)
            self._measure(last)
            if self._run is not None and self.done % self.config.checkpoint.every == 0:
                self.save()
            yield step

    def _measure(self, last: int) -> None:
        every = self.config.evaluation.every
        if every and self.done % every == 0 and 0 < self.done < last:
            self.evaluate(self.config.evaluation.problems_while_training)

    def train(self, steps: int | None = None) -> Summary:
        """Evaluate, train, evaluate; the first Ctrl-C or SIGTERM breaks off what is going on, takes it back and saves."""
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
            if self._run is not None:
                self._run.report("done", self.done, "interrupted" if stopped.received else "finished")
        return Summary(self.done, before, after, stopped.exit_code, self._went_back)

    def _save_new(self) -> None:
        if self._run is not None and self._saved not in (None, self.done):
            self.save()

    def _take_back(self) -> None:
        """Undo a step that was broken off, or go back to the last checkpoint."""
        with unbroken():
            if not self._loop.take_back() and self._run is not None:
                self._resume(self._run)
                self._went_back = True

    def evaluate(self, problems: int | None = None, greedy: bool | None = None) -> Evaluation:
        """Play held-out problems of the test split, or measure the verifier that is trained; record the result."""
        problems = problems or self.config.evaluation.problems
        if self._judged is not None and self._judged[:2] == (self.done, problems):
            return self._judged[2]
        self._keep_start()
        self._phase("evaluation", "unseen problems")
        drawn = capture_random()
        try:
            result = self._judge(problems) if self.algorithm.judges else self._play_unseen(problems, greedy)
        except StopRequested:
            restore_random(drawn)
            raise
        if self._run is not None:
            self._run.record_evaluation(self.done, result.row())
            # A second evaluation after the same step adds a row; the episodes of the first are kept.
            if self.done not in episode_steps(self._run.path, "test"):
                self._run.record_episodes(self.done, result.groups, split="test")
        for tracker in self._trackers:
            tracker.log(self.done, {f"evaluation/{k}": v for k, v in result.scalars().items()})
        self.observer.evaluation(self.done, result)
        self._phase("training", "")
        return result

    def _play_unseen(self, problems: int, greedy: bool | None) -> Evaluation:
        play = self.play
        if self.config.evaluation.greedy if greedy is None else greedy:
            play = greedy_play(play)
        tasks = choose_tasks(play.environment, "test", problems)
        return run_async(
            lambda: evaluate_tasks(play, tasks, self.config.seed, self.algorithm.returns or own_returns)
        )

    def _judge(self, problems: int) -> Evaluation:
        samples = self.algorithm.data.group_size
        result = judge_held_out(self.config, self._acting, self.engine, samples, self.done, problems)
        self._judged = (self.done, problems, result)
        return result

    def _record(self, step: Step) -> None:
        if self._run is None:
            return
        self._run.record_metrics(step.number, step.metrics)
        self._run.record_episodes(step.number, step.groups)
        self._run.report("training", step.number)
        for tracker in self._trackers:
            tracker.log(step.number, step.metrics)

    def _phase(self, name: str, detail: str) -> None:
        self.observer.phase(name, detail)
        if self._run is not None:
            self._run.report(name, self.done)

    def save(self) -> Path:
        """Write a checkpoint; nothing is lost when that fails."""
        assert self._run is not None, "a trainer without a run directory keeps nothing"
        judged = self._judged is not None and self._judged[0] == self.done
        if self.algorithm.judges and not judged and not stop_asked():
            self.evaluate()  # what a verifier's folder says of it is about the weights that lie there
        self._refuse_torn()
        folder = self._write_checkpoint(self._run)
        if not stop_asked():  # reading what is kept takes its time, and the next save does it
            self._run.prune(self.config.checkpoint.keep, folder)
        return folder

    def _refuse_torn(self) -> None:
        if self._torn:
            raise CheckpointError(
                f"The weights are those of a step after {self.done} that broke off half way. Take the last checkpoint: resume "
                "the run, or call `load_checkpoint`."
            )

    def _keep_start(self) -> None:
        # Before the first row, so that a run killed before its first save has something to go back to.
        if self._run is not None and self._saved is None:
            self._write_checkpoint(self._run)

    def _write_checkpoint(self, run: RunDirectory) -> Path:
        state, write = self._loop.state(), self.save_policies
        with unbroken():
            folder = write_checkpoint(run, self.done, self.engine, self.team, self.base_hashes, write, state)
        self._saved = self.done
        return folder

    def save_policies(self, folder: Path) -> None:
        """Write every trained policy as others load it: adapters as PEFT folders, models by `save_pretrained`."""
        known = self._judged[2].verifier if self._judged and self._judged[0] == self.done else None
        write_policies(folder, self.team, self.models, self.engine, self.base_hashes, known)

    def _resume(self, run: RunDirectory) -> None:
        if not checkpoint.list_checkpoints(run.checkpoints):
            run.start_anew()
            return
        loop = self.load_checkpoint(run.checkpoints)
        # An evaluation at the start or the end is done again in `train`; one at a former end stays.
        repeated = not 0 < self.done < self.config.training.steps
        run.rewind(loop["positions"], None if repeated else self.done)
        run.point_latest(loop["folder"])
        self._saved = self.done
        # A run that was stopped inside an evaluation owes it, before its next step.
        self._owed = self.done not in [row["step"] for row in read_evaluations(run.path)]

    def load_checkpoint(self, folder: Path) -> Mapping[str, Any]:
        """Take the newest whole checkpoint of a folder and return its loop part; says which were damaged."""
        loop = read_checkpoint(
            folder,
            self.engine,
            self.team,
            self.base_hashes,
            lambda said: self.observer.phase("checkpoint", said),
            self._loop.load_state,
        )
        self.done = int(loop["step"])
        self._torn = False
        self._loop.publish()
        return loop

    def close(self) -> None:
        """Give back the run directory and what the engines hold."""
        for tracker in getattr(self, "_trackers", []):
            tracker.close()
        if hasattr(self, "engine"):
            self.engine.close()
        if self._run is not None:
            self._run.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run is not None:
            self._run.__exit__(kind, error, trace)
            self._run = None
        self.close()
