"""What an environment server holds: environments by name, each with its version, replaced while others play the old one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

from kapelle.environment import (
    Alive,
    Answerable,
    Environment,
    Mixed,
    Opposed,
    Reads,
    Recorded,
    Scripted,
    Skipping,
    asks_questions,
    offers,
)
from kapelle.errors import did_you_mean
from kapelle.services.grpc.refusals import Refused, wrong
from kapelle.settings.base import Settings
from kapelle.types import Split
from kapelle.wire import environment_v1_pb2 as pb

SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True, slots=True)
class Held:
    """An environment on the shelf."""

    environment: Environment
    description: pb.Description


class Shelf:
    """Environments by name; any thread may ask."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        """Take the environments; raises what reading their data raises."""
        self._held = {
            name: Held(environment, describe(name, environment, 1))
            for name, environment in environments.items()
        }
        self._changing = Lock()

    def all(self) -> list[Held]:
        """Return everything, by name."""
        return list(self._held.values())

    def find(self, name: str) -> Held:
        """Return an environment; an empty name means the only one. Raises Refused for an unknown one."""
        held = self._held
        if not name and len(held) == 1:
            return next(iter(held.values()))
        if name not in held:
            raise Refused(
                "NOT_FOUND",
                f"This server has no environment '{name}'.{did_you_mean(name, list(held))}",
            )
        return held[name]

    def put(self, name: str, environment: Environment) -> Held:
        """Add an environment or replace the one of that name; sessions that are open keep theirs.

        Raises Refused for one that offers less than the one that it replaces: runs rely on that.
        """
        with self._changing:
            old = self._held.get(name)
            version = 1 if old is None else old.description.version + 1
            held = Held(environment, describe(name, environment, version))
            if old is not None and (less := _lacking(old.description, held.description)):
                raise wrong(
                    f"'{name}' {less}, and the environment that would replace it does not. Runs that play it rely on that. "
                    "Register it by another name."
                )
            self._held = {**self._held, name: held}
            return held


def describe(name: str, environment: Environment, version: int) -> pb.Description:
    """Return what an environment is, as the contract says it; raises what reading its data raises."""
    least, greatest = environment.reward_range
    skipped = environment.skipped() if offers(environment, Skipping) else {}
    members = environment.members if offers(environment, Mixed) else {}
    return pb.Description(
        name=name,
        version=version,
        content=_content(environment),
        kind=environment.name,
        least_reward=least,
        greatest_reward=greatest,
        splits=[
            pb.SplitDescription(
                split=split,
                source=environment.sources[split],
                size=environment.size(split),
                skipped=skipped.get(split, ""),
            )
            for split in SPLITS
        ],
        answerable=offers(environment, Answerable) and asks_questions(environment),
        scripted=offers(environment, Scripted),
        answers_per_task=environment.answers_per_task() if offers(environment, Recorded) else 0,
        constant_sum=offers(environment, Opposed) and environment.constant_sum,
        alive=environment.alive if offers(environment, Alive) else (),
        members=[describe(part, member, version) for part, member in members.items()],
    )


def _content(environment: Environment) -> str:
    """Return a hash of an environment's class, its settings but for their time limit, and the files that it says it reads."""
    settings = (
        environment.model_dump(mode="json", exclude={"timeout"}) if isinstance(environment, Settings) else {}
    )
    read = dict(environment.contents()) if isinstance(environment, Reads) else {}
    kind = type(environment)
    form = [kind.__module__, kind.__qualname__, settings, sorted(read.values())]
    return hashlib.sha256(json.dumps(form, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _lacking(old: pb.Description, new: pb.Description) -> str:
    """Return what the old one offers and the new one does not; empty where nothing is lost."""
    offers = {
        "asks questions": (old.answerable, new.answerable),
        "plays games of moves": (not old.answerable, not new.answerable),
        "has a script": (old.scripted, new.scripted),
        "is a record": (bool(old.answers_per_task), bool(new.answers_per_task)),
        "has tasks of their own to test on": (_sized(old), _sized(new)),
    }
    return next((what for what, (had, has) in offers.items() if had and not has), "")


def _sized(description: pb.Description) -> bool:
    return any(split.split == "test" and split.HasField("size") for split in description.splits)
