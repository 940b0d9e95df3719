"""How good a run is so far, on tasks that it never learns from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kapelle.algorithm import Algorithm
from kapelle.evaluation.evaluate import Evaluation, choose_tasks, evaluate_shared, greedy_play, why_fewer
from kapelle.metrics.definitions import own_returns
from kapelle.runtime.interrupts import StopRequested
from kapelle.runtime.randomness import capture_random, restore_random
from kapelle.settings.schema import RunConfig
from kapelle.training.starting import Pieces
from kapelle.training.verifier_judging import judge_held_out


class HeldOut:
    """Evaluates a team on held-out tasks or, if the run trains a verifier, the verifier on them."""

    def __init__(self, config: RunConfig, algorithm: Algorithm, pieces: Pieces) -> None:
        """Take the run and its pieces."""
        self._config = config
        self._algorithm = algorithm
        self._pieces = pieces
        self._judged: tuple[int, int, Evaluation] | None = None
        """The last evaluation of the trained verifier: after which step, on how many problems, and its result."""

    def known(self, done: int, problems: int) -> Evaluation | None:
        """Return the verifier's evaluation after `done` steps if it is known already."""
        known = self._judged is not None and self._judged[:2] == (done, problems)
        return self._judged[2] if known and self._judged is not None else None

    def judgement(self, done: int) -> Mapping[str, Any] | None:
        """Return the judgement of the verifier's current weights, to be saved in their folder."""
        return self._judged[2].verifier if self._judged is not None and self._judged[0] == done else None

    def measure(self, done: int, problems: int, greedy: bool | None) -> Evaluation:
        """Evaluate the weights after `done` steps; an interrupted evaluation restores the random generators."""
        drawn = capture_random()
        try:
            if self._algorithm.judges:
                return self._judge(done, problems)
            return self._play_unseen(problems, greedy)
        except StopRequested:
            restore_random(drawn)
            raise

    def _play_unseen(self, problems: int, greedy: bool | None) -> Evaluation:
        play = self._pieces.play
        if self._config.evaluation.greedy if greedy is None else greedy:
            play = greedy_play(play)
        tasks = choose_tasks(play.environment, "test", problems)
        result = evaluate_shared(play, tasks, self._config.seed, self._algorithm.returns or own_returns)
        return replace(result, fewer=why_fewer(play.environment, "test", problems, len(tasks)))

    def _judge(self, done: int, problems: int) -> Evaluation:
        acting, engine, samples = self._pieces.acting, self._pieces.engine, self._algorithm.data.group_size
        result = judge_held_out(self._config, acting, engine, samples, done, problems)
        self._judged = (done, problems, result)
        return result
