"""An actor that plays whole groups of episodes for a rank of the trainer, with weights that it is given (`ray_workers.py`)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kapelle.settings.schema import Resources

if TYPE_CHECKING:
    from kapelle.rollout.replica import Elsewhere
    from kapelle.rollout.workers.pool import Hold


class Player:
    """A team that plays. What goes wrong is an answer (`elsewhere.error_answer`), so that it can be raised as what it was."""

    def __init__(self) -> None:
        self._team: Elsewhere | None = None

    def here(self) -> None:
        """Say, by answering, that the actor runs."""

    def begin(self, start_with: bytes) -> bytes:
        """Build the team: settings, bases, and what to import from, as JSON. Returns the hashes of its bases."""
        from kapelle.runtime import interrupts

        said = json.loads(start_with)
        sys.path += [entry for entry in said["path"] if entry not in sys.path]
        with suppress(OSError):  # another machine may not have it: paths in the recipe then say so
            os.chdir(said["folder"])
        interrupts.commands.append(self)  # the watchdog may end it where it cannot be interrupted
        return _answered(self._begin, said)

    def _begin(self, said: Mapping[str, Any]) -> bytes:
        import torch

        from kapelle.cluster.actors import Connection
        from kapelle.cluster.worlds import held_by_actors
        from kapelle.rollout.replica import Elsewhere
        from kapelle.rollout.workers.pool import HeldHere

        hold: Hold = HeldHere
        if said["worlds"]:
            connection = Connection.of_actor(said["group"])
            takes = Resources.model_validate(said["config"]["ray"]["environment"])
            hold = held_by_actors(connection, said["worlds"], takes, said["folder"])
        self._team = Elsewhere(said["config"], said["bases"], torch.get_num_threads(), hold)
        return json.dumps({"hashes": self._team.hashes}).encode()

    def play(self, question: bytes, *weights: bytes) -> bytes:
        """Take new weights, then play groups; returns the generators' states after it, and the groups as JSON lines."""
        return _answered(self._play, question, weights)

    def _play(self, question: bytes, weights: Sequence[bytes]) -> bytes:
        from kapelle.metrics.timeline import Timeline
        from kapelle.rollout.play import rollout
        from kapelle.runs.episode_json import decode, dump_groups
        from kapelle.runtime.event_loop import run_async
        from kapelle.runtime.randomness import (
            capture_random,
            random_as_lists,
            random_from_lists,
            restore_random,
        )
        from kapelle.runtime.tensors import unpacked
        from kapelle.types import Sampling, Task

        assert self._team is not None, "a player begins first"
        team, said = self._team, decode(json.loads(question))
        for data in weights:
            plain, tensors = unpacked(data)
            team.play.engine.load(plain["policy"], tensors, plain["version"])
        restore_random(random_from_lists(said["random"]))
        sampling = said["sampling"]
        play = replace(
            team.play,
            timeline=Timeline(),
            tree=team.algorithm.data.tree if said["tree"] else None,
            sampling=None
            if sampling is None
            else {name: Sampling(**each) for name, each in sampling.items()},
        )
        tasks = [Task(**task) for task in said["tasks"]]
        groups = run_async(lambda: rollout(play, tasks, said["samples"], said["seed"], own=said["own"]))
        drawn = json.dumps({"random": random_as_lists(capture_random())}).encode()
        play.engine.release_caches()  # what is kept would depend on what was played before, and a new worker has nothing
        return drawn + b"\n" + dump_groups(0, groups)


def _answered(work: Any, *given: Any) -> bytes:
    from kapelle.rollout.replica import error_answer

    try:
        return bytes(work(*given))
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is raised where somebody waits for it
        return json.dumps(error_answer(error)).encode()
