"""The process that plays steps of training for another one, which starts it (`sampling_process.py`).

It takes what to build, then one question after another, from the socket behind the descriptor. It leaves when the other
process does, even in the middle of a step.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any


def main(descriptor: int) -> None:
    """Serve until the other side closes the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they ask the other process, which then closes the socket
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(descriptor)
    questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, questions), daemon=True).start()
    built: _Player | None = None
    start_with = questions.get()
    while True:
        question = questions.get()
        try:
            built = built or _Player(start_with)
            answer = built.play(*question)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is raised where somebody waits for it
            answer = {"error": [type(error).__name__, str(error)], "trace": traceback.format_exc()}
        pipe.send_bytes(json.dumps(answer).encode())


def _listen(pipe: Connection, questions: queue.SimpleQueue[Any]) -> None:
    """Pass on what arrives; end the process when nobody is left to answer."""
    while True:
        try:
            questions.put(json.loads(pipe.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a question that cannot be read is never answered: say so by ending
            traceback.print_exc()
            os._exit(1)


class _Player:
    """A team that plays, with the weights of the other process."""

    def __init__(self, start_with: Mapping[str, Any]) -> None:
        """Build the team and its engine from settings; see `SamplingProcess`."""
        import torch

        from kapelle.models.weights import hash_of_base
        from kapelle.rollout.play import make_play
        from kapelle.runtime import interrupts
        from kapelle.runtime.randomness import keep_imports_from_drawing
        from kapelle.runtime.shared_tensors import SharedTensors
        from kapelle.setup.model_loading import build_engine, load_models
        from kapelle.setup.recipe import resolve
        from kapelle.setup.team_builder import build_algorithm, build_team

        interrupts.commands.append(self)  # the watchdog may end it where it cannot be interrupted
        torch.set_num_threads(start_with["threads"])
        keep_imports_from_drawing()
        self._config = resolve(start_with["config"])
        self._algorithm = build_algorithm(self._config)
        team = build_team(self._config, self._algorithm)
        team = replace(team, bases=start_with["bases"])
        models = load_models(team, self._config.model, {})
        self._hashes = {base: hash_of_base(model) for base, model in models.items()}
        self._shared = SharedTensors(start_with["layout"], start_with["descriptor"])
        for policy in team.policies.values():
            if policy.lora is not None and policy.endpoint is None:
                models[policy.base].bank.add(policy.name, policy.lora, self._config.seed)
        self._engine = build_engine(self._config, models, team)
        self._loaded: dict[str, int | None] = {}
        self._play = replace(make_play(self._config, team, self._engine), tree=self._algorithm.data.tree)

    def play(
        self, number: int, versions: Mapping[str, int], random: Mapping[str, Any], left: str
    ) -> dict[str, Any]:
        """Play a step and what the one before it has left (JSON lines).

        Returns its episodes, what it has left, the generators' states after it, and the seconds that it took.
        """
        from kapelle.metrics.timeline import Timeline
        from kapelle.rollout.under_way import dump_under_way, load_under_way
        from kapelle.runs.episode_json import dump_groups
        from kapelle.runtime.randomness import (
            capture_random,
            random_as_lists,
            random_from_lists,
            restore_random,
        )
        from kapelle.training.step_play import play_step

        started = time.perf_counter()
        for policy, version in versions.items():
            if self._loaded.get(policy) != version or version == 0:
                self._engine.load(policy, self._shared[policy], version)
                self._loaded[policy] = version
        restore_random(random_from_lists(random))
        play = replace(self._play, timeline=Timeline())
        played = play_step(play, self._config, self._algorithm, number, load_under_way(left))
        answer = {
            "hashes": self._hashes,
            "groups": dump_groups(number, played.groups).decode("ascii"),
            "left": dump_under_way(played.left),
            "random": random_as_lists(capture_random()),
            "seconds": time.perf_counter() - started,
        }
        self._engine.release_caches()
        return answer
