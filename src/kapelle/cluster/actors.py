"""A small interface to Ray, which provides what a run needs.

This is the only module that imports Ray.

Arguments and results of actors are bytes, strings and numbers.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kapelle.errors import ConfigError, EngineError
from kapelle.runtime import interrupts
from kapelle.runtime.foreign_code import received_error, sent_error
from kapelle.runtime.interrupts import stop_if_requested
from kapelle.settings.schema import Resources, RunConfig

QUIET: Mapping[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
RECONNECTING = 5
"""Time in seconds for which processes try to reconnect to the control service of a Ray instance that kapelle started, before they exit."""
STORE = 1 << 30
"""Maximum size in bytes of the object store of a Ray instance that kapelle started. Ray stores further objects on disk."""
LEAST_STORE = 80 << 20
LOOK = 0.2
"""Time in seconds between two checks for a stop request while a process waits for actors."""
DEATHS = 5
"""Number of consecutive actor deaths, without a successful call between them, after which a run stops."""
REACHING = 5.0
"""Maximum time in seconds until the address of a cluster must respond."""


class ActorLost(Exception):
    """An actor has ended; the message states the reason."""


class ActorCall:
    """A call of a method of an actor."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def answer(self) -> Any:
        """Wait for the result of the call and return it.

        Raises ActorLost if the actor ended, and EngineError if the actor raised an error.
        """
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            return ray.get(self.reference)
        except RayActorError as error:
            raise ActorLost(_how(error)) from None
        except RayTaskError as error:
            raise EngineError(f"An actor failed: {error.cause!r}\n{error}") from None
        except RayError as error:
            raise EngineError(f"Ray has failed: {error}") from error


class Actor:
    """An actor that this run started."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def call(self, method: str, *arguments: Any) -> ActorCall:
        """Call a method of the actor.

        If an argument is a reference that `ActorConnection.store` returned, the actor receives the stored bytes.
        """
        return ActorCall(getattr(self._handle, method).remote(*arguments))

    def end(self) -> None:
        """End the actor immediately."""
        import ray

        ray.kill(self._handle, no_restart=True)


def first_answered(calls: Sequence[ActorCall], seconds: float) -> ActorCall | None:
    """Wait up to `seconds` for one of the calls to finish, and return this call, or None if no call has finished."""
    import ray

    ready, _ = ray.wait([each.reference for each in calls], num_returns=1, timeout=seconds)
    return next((each for each in calls if ready and each.reference == ready[0]), None)


# -------- Answers of our actors: bytes that begin with `OK`, or an error that the caller reraises

OK = b"+"


def answer_or_error(work: Callable[..., bytes], *arguments: Any) -> bytes:
    """Call `work` in an actor, and return its result or the error that it raised, as bytes that `read_answer` can read."""
    try:
        return OK + work(*arguments)
    except Exception as error:  # noqa: BLE001 - the caller reraises it
        return json.dumps(sent_error(error)).encode()


def read_answer(call: ActorCall, actor: str) -> bytes:
    """Return the bytes that `work` returned in an actor, or raise the error that it raised.

    The argument `actor` is the name of the actor in messages.
    """
    answer = bytes(call.answer())
    if answer[:1] != OK:
        raise received_error(json.loads(answer), actor)
    return answer[1:]


# -------- Workers that this process has started: they load their models, answer, and may die at any moment


def start_settings(config: RunConfig, bases: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that a worker needs to start: settings, paths of the base models, the import path and the working folder."""
    return {
        "config": config.model_dump(mode="json"),
        "bases": dict(bases),
        "path": sys.path,
        "folder": str(Path.cwd()),
    }


@dataclass(slots=True, eq=False)
class StartedWorker:
    """An actor with the methods `here` and `begin`, and the calls to it that are in progress."""

    actor: Actor
    beginning: ActorCall | None
    """The call that loads the models of the actor, or None after its result was checked."""
    up: ActorCall | None
    """The call that shows that the actor is running, or None after it has returned."""
    begun: float
    """Time at which this process requested the actor."""

    @classmethod
    def of(cls, actor: Actor, start_with: bytes) -> StartedWorker:
        """Start the work of an actor with the settings in `start_with`."""
        up = actor.call("here")
        return cls(actor, actor.call("begin", start_with), up, time.monotonic())

    @property
    def has_begun(self) -> bool:
        """Whether the actor has loaded its models."""
        return self.beginning is None or first_answered([self.beginning], 0.0) is not None


class Waiting:
    """Waits for the results of workers of the same kind, and counts consecutive deaths of workers."""

    def __init__(self, kind: str, setting: str, timeout: float, of: str = "") -> None:
        """Wait for workers of the given kind, each of which must start within `timeout` seconds.

        Messages contain the name of the `setting` that determines the resources of the workers.
        """
        self._kind, self._setting, self._timeout, self._of = kind, setting, timeout, of
        self._deaths = 0

    def first(self, workers: Iterable[StartedWorker], calls: Sequence[ActorCall]) -> ActorCall | None:
        """Wait a moment until one of the workers' `calls` has finished, and return this call, or None if no call has finished.

        Raises StopRequested if a stop was requested, and EngineError if a worker has not started in time.
        """
        stop_if_requested()
        for worker in workers:
            if worker.up is None:
                continue
            if first_answered([worker.up], 0.0) is not None:
                worker.up = None
            elif time.monotonic() - worker.begun > self._timeout:
                # An actor never answers if the cluster has no room for it.
                raise EngineError(
                    f"A {self._kind} did not start within {self._timeout:g} s (`ray.timeout`), because its machine is gone or has no "
                    "free resources. Resume the run."
                )
        return first_answered(calls, LOOK)

    def answered(self) -> None:
        """Record that a worker has completed its work, which resets the number of consecutive deaths."""
        self._deaths = 0

    def died(self, lost: ActorLost) -> None:
        """Record that a worker has died. Raises EngineError if too many workers have died consecutively."""
        self._deaths += 1
        if self._deaths >= DEATHS:
            raise EngineError(
                f"{self._deaths} {self._kind}s{self._of} in a row died before they returned a result; the last error was: {lost}. "
                f"Read their output above, and check the memory of their machines (`{self._setting}`)."
            ) from None


def check_hashes(
    kind: str, other: str, known: dict[str, str], found: Mapping[str, str], paths: Mapping[str, str]
) -> None:
    """Add the hashes of a worker's base models to `known`.

    Raises ConfigError if the worker and the process named `other` have loaded different weights.
    """
    for base, own in found.items():
        if known.setdefault(base, own) != own:
            raise ConfigError(
                f"A {kind} and {other} loaded different weights from '{paths[base]}' (hashes {own} and {known[base]}). Copy the same files to "
                "this path on every machine."
            )


class ActorConnection:
    """The connection of this process to a Ray cluster. The actors of this process end with the connection."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @classmethod
    def start(cls, folder: Path) -> ActorConnection:
        """Start Ray on this machine, with its files in `folder`. This Ray instance ends with the current process."""
        import ray

        # Actors can import what this process can.
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        store = LEAST_STORE
        with suppress(OSError):
            shared = os.statvfs("/dev/shm")  # noqa: S108 - where Ray keeps its object store
            store = max(LEAST_STORE, min(STORE, shared.f_bavail * shared.f_frsize // 2))
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=store,
                _temp_dir=str(folder),
                _system_config={"gcs_rpc_server_reconnect_timeout_s": RECONNECTING},
                **QUIET,
            )
        except Exception as error:  # Ray raises bare exceptions, for example if a node starts too slowly
            with suppress(Exception):  # end the services that have started
                ray.shutdown()
            raise EngineError(
                f"Ray did not start on this machine: {_line(error)}. Try again when the machine is less busy, or start Ray beforehand "
                "(`ray start --head`) and set `ray.address`."
            ) from error
        return cls()

    @classmethod
    def join(cls, address: str, group: str | None = None, namespace: str | None = None) -> ActorConnection:
        """Connect to a cluster, and to the placement `group` that another process of this run created."""
        import ray

        # Check first that something listens there: Ray itself would retry for a minute.
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit():
            try:
                socket.create_connection((host.rpartition("/")[2], int(port)), REACHING).close()
            except OSError as error:
                raise ConfigError(
                    f"No Ray cluster answers at `ray.address: {address}`: {error.strerror or error}. Start one there (`ray start --head`)."
                ) from error
        try:
            ray.init(address=address, namespace=namespace, **QUIET)
            return cls(None if group is None else ray.util.get_placement_group(group))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"Cannot join the Ray cluster at `ray.address: {address}`: {_line(error)}. Start it with this machine's versions of Ray "
                "and Python (`ray start --head`), or remove `ray.address`."
            ) from error
        except Exception as error:  # as in `start`
            raise EngineError(
                f"The Ray cluster at `ray.address: {address}` did not answer in time: {_line(error)}. Try again when its machine is less busy."
            ) from error

    @classmethod
    def of_actor(cls, group: str) -> ActorConnection:
        """Return the connection of the calling actor to a placement group of its run."""
        import ray

        return cls(ray.util.get_placement_group(group))

    @property
    def address(self) -> str:
        """The address at which other processes can connect to the cluster."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    @property
    def namespace(self) -> str:
        """The Ray namespace that contains the names of this run."""
        import ray

        return str(ray.get_runtime_context().namespace)

    def place(
        self, name: str, bundles: Sequence[Resources], *, spread: bool, seconds: float, grows: bool
    ) -> None:
        """Reserve resources for actors, with one bundle for each actor.

        Raises ConfigError if the resources do not become available within `seconds`. If the cluster is too small and cannot grow
        (`grows`), the error is raised immediately.
        """
        from ray.util import placement_group, remove_placement_group

        wanted = {
            "CPU": sum(each.cpus for each in bundles),
            "GPU": sum(each.gpus for each in bundles),
        }
        there = _resources("cluster_resources", wanted)
        if grows or all(there[kind] >= amount for kind, amount in wanted.items()):
            kinds = [{"CPU": each.cpus, "GPU": each.gpus} for each in bundles]
            self._group = placement_group(
                [{kind: amount for kind, amount in each.items() if amount} for each in kinds],
                strategy="SPREAD" if spread else "PACK",
                name=name,
            )
            try:
                if self._group.wait(seconds):
                    return
                remove_placement_group(self._group)
            except Exception as error:  # as in `start`
                raise EngineError(
                    f"Ray could not reserve resources for the run: {_line(error)}. Check that the cluster is still running."
                ) from error
        free = _resources("available_resources", wanted)
        raise ConfigError(
            f"The cluster has no room for {len(bundles)} actors: they need {_amounts(wanted)}, but the cluster has {_amounts(there)}, of "
            f"which {_amounts(free)} are free. Start fewer workers (`ray.rollout_workers`, `--processes`), or reserve less for each "
            "(`ray.trainer.cpus`, `ray.rollout.cpus`, …)."
        )

    def actor(
        self, kind: type, bundle: int | None, resources: Resources, calls: int = 1, name: str | None = None
    ) -> Actor:
        """Start an actor of a class on a bundle, and return it.

        The actor runs up to `calls` calls concurrently; with 1, calls run in order.

        If no bundle is given, the actor starts as soon as the cluster has free resources outside the run's placement group. If an
        actor with this `name` is already running, that actor is returned. An actor ends with the process that started it.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy: Any = "DEFAULT"
        if bundle is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        made: Any = ray.remote(kind).options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            scheduling_strategy=strategy,
            max_restarts=0,
            **({"max_concurrency": calls} if calls > 1 else {}),
            **({"name": name, "get_if_exists": True} if name is not None else {}),
        )
        return Actor(made.remote())

    def store(self, data: bytes) -> object:
        """Store bytes for all actors. The returned reference can be passed to `Actor.call`."""
        import ray

        return ray.put(data)

    def fetch(self, stored: object) -> bytes:
        """Return the bytes that a reference refers to."""
        import ray

        reference: Any = stored
        return bytes(ray.get(reference))

    def leave(self) -> None:
        """End all actors of this process, and also the Ray instance if this process started one."""
        import ray

        ray.shutdown()


def own_address() -> str:
    """Return the address at which the other machines of a cluster can reach this machine."""
    import ray

    utilities: Any = ray.util
    return str(utilities.get_node_ip_address())


def _resources(which: str, kinds: Mapping[str, float]) -> dict[str, float]:
    import ray

    found = getattr(ray, which)()
    return {kind: float(found.get(kind, 0.0)) for kind in kinds}


def _amounts(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}s" for kind, amount in amounts.items())


def _how(error: BaseException) -> str:
    """Return a description of how an actor ended, without Ray's own identifiers."""
    lines = [line.strip() for line in str(error).splitlines()]
    identifiers = ("class_name:", "actor_id:", "namespace:", "pid:")
    return " ".join(line for line in lines if line and not line.startswith(identifiers))[:500]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")[:300]


def settle_in(actor: object, settings: Mapping[str, Any]) -> None:
    """Set the import path and the working folder of an actor's process.

    After this call, the watchdog may end the actor.
    """
    sys.path += [entry for entry in settings["path"] if entry not in sys.path]
    with suppress(
        OSError
    ):  # the folder may be missing on another machine; relative paths of the recipe then fail
        os.chdir(settings["folder"])
    interrupts.commands.append(actor)  # the actor may be in a call that cannot be interrupted
