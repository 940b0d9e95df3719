"""The part of Ray that a run uses; the only module that imports it.

Arguments and answers of actors are bytes, text and numbers.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kapelle.errors import ConfigError, EngineError
from kapelle.runtime import interrupts
from kapelle.runtime.interrupts import stop_if_asked
from kapelle.settings.schema import Resources

QUIET: Mapping[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
RECONNECTING = 5
"""Seconds for which the processes of a Ray of our own look for a lost control service before they end."""
STORE = 1 << 30
"""Most bytes of the object store of a Ray of our own; the rest is kept on disk."""
LEAST_STORE = 80 << 20
LOOK = 0.2
"""Seconds between two checks whether a process that waits for actors should stop."""
DEATHS = 5
"""Deaths of actors in a row, without an answer in between, after which a run stops."""
REACHING = 5.0
"""Seconds within which a cluster's address has to answer."""


class ActorLost(Exception):
    """An actor is gone; the message says how it ended."""


class ActorCall:
    """A call of an actor's method, answered or not yet."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def answer(self) -> Any:
        """Wait for the answer and return it; raises ActorLost, and EngineError for what the actor raised."""
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
    """An actor of this run."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def ask(self, method: str, *given: Any) -> ActorCall:
        """Call a method; what `ActorConnection.store` returned arrives as its bytes."""
        return ActorCall(getattr(self._handle, method).remote(*given))

    def end(self) -> None:
        """End it at once."""
        import ray

        ray.kill(self._handle, no_restart=True)


def first_answered(asked: Sequence[ActorCall], seconds: float) -> ActorCall | None:
    """Return a call that is answered, waiting up to `seconds` for one; None if none is."""
    import ray

    ready, _ = ray.wait([each.reference for each in asked], num_returns=1, timeout=seconds)
    return next((each for each in asked if ready and each.reference == ready[0]), None)


# -------- Workers that this process has started, and waits for: they load their models, answer, and may die at any moment


@dataclass(slots=True, eq=False)
class StartedWorker:
    """An actor with the methods `here` and `begin`, and what it has still to answer from its start."""

    actor: Actor
    beginning: ActorCall | None
    """What it has loaded, until that is looked at."""
    up: ActorCall | None
    """Its answer that it runs, until that is read."""
    begun: float
    """When the actor was asked for."""

    @classmethod
    def of(cls, actor: Actor, start_with: bytes) -> StartedWorker:
        """Let an actor begin with these settings."""
        up = actor.ask("here")
        return cls(actor, actor.ask("begin", start_with), up, time.monotonic())

    @property
    def has_begun(self) -> bool:
        """Whether what it has loaded can be looked at, or was."""
        return self.beginning is None or first_answered([self.beginning], 0.0) is not None


class Waiting:
    """Waits for workers of one kind, and counts how many of them have died in a row."""

    def __init__(self, kind: str, work: str, setting: str, timeout: float, of: str = "") -> None:
        """Take what they are called, what they do (`played`), the setting of what they take, and the seconds that they have to start."""
        self._kind, self._work, self._setting, self._timeout, self._of = kind, work, setting, timeout, of
        self._deaths = 0

    def first(self, workers: Iterable[StartedWorker], asked: Sequence[ActorCall]) -> ActorCall | None:
        """Wait a moment for an answer of workers that were asked; None if there is none yet.

        Raises StopRequested, and EngineError for a worker that has not started in time.
        """
        stop_if_asked()
        for worker in workers:
            if worker.up is None:
                continue
            if first_answered([worker.up], 0.0) is not None:
                worker.up = None
            elif time.monotonic() - worker.begun > self._timeout:
                # An actor that the cluster finds no room for never answers: its machine may be gone.
                raise EngineError(
                    f"A {self._kind} has not started within {self._timeout:g} s (`ray.timeout`): the machine that it was placed on is gone "
                    "or has no room left. Resume the run."
                )
        return first_answered(asked, LOOK)

    def answered(self) -> None:
        """Note that one has done its work."""
        self._deaths = 0

    def died(self, lost: ActorLost) -> None:
        """Note that one has died; raises EngineError where too many have in a row."""
        self._deaths += 1
        if self._deaths >= DEATHS:
            raise EngineError(
                f"{self._deaths} {self._kind}s{self._of} in a row have died before they had {self._work} anything; the last one: {lost}. Read "
                f"what they printed above, and check the memory of their machines (`{self._setting}`)."
            ) from None


def check_hashes(
    kind: str, other: str, known: dict[str, str], found: Mapping[str, str], paths: Mapping[str, str]
) -> None:
    """Note the hashes of the bases that a worker has read in `known`; ConfigError where `other` has read other weights."""
    for base, own in found.items():
        if known.setdefault(base, own) != own:
            raise ConfigError(
                f"A {kind} has read other weights for '{paths[base]}' ({own}) than {other} ({known[base]}). Put the same files under "
                "this path on all machines."
            )


class ActorConnection:
    """This process as a client of a cluster; the actors that it has placed end with it."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @classmethod
    def start(cls, folder: Path) -> ActorConnection:
        """Start a Ray on this machine, which ends with this process and keeps its files in `folder`."""
        import ray

        # What this process can import its actors can.
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
        except Exception as error:  # Ray raises no narrower one for a node that starts too slowly
            with suppress(Exception):  # what has started of it
                ray.shutdown()
            raise EngineError(
                f"Ray did not start on this machine: {_line(error)}. Try again when it has less to do, or start one beforehand "
                "(`ray start --head`) and name it by `ray.address`."
            ) from error
        return cls()

    @classmethod
    def join(cls, address: str, group: str | None = None, namespace: str | None = None) -> ActorConnection:
        """Join a cluster, and the placement `group` of another process of this run."""
        import ray

        # Does anything listen there? Ray itself would try for a minute.
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit():
            try:
                socket.create_connection((host.rpartition("/")[2], int(port)), REACHING).close()
            except OSError as error:
                raise ConfigError(
                    f"No Ray answers at `ray.address: {address}`: {error.strerror or error}. Start one there (`ray start --head`)."
                ) from error
        try:
            ray.init(address=address, namespace=namespace, **QUIET)
            return cls(None if group is None else ray.util.get_placement_group(group))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"The Ray at `ray.address: {address}` cannot be joined: {_line(error)}. Start one there (`ray start --head`), with the "
                "same versions of Ray and Python as here, or leave `ray.address` out."
            ) from error
        except Exception as error:  # as in `start`
            raise EngineError(
                f"The Ray at `ray.address: {address}` did not answer in time: {_line(error)}. Is its machine busy? Try again."
            ) from error

    @classmethod
    def of_actor(cls, group: str) -> ActorConnection:
        """Return the connection of the actor that asks, to a placement group of its run."""
        import ray

        return cls(ray.util.get_placement_group(group))

    @property
    def address(self) -> str:
        """Where others join the cluster."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    @property
    def namespace(self) -> str:
        """The namespace of this run's names."""
        import ray

        return str(ray.get_runtime_context().namespace)

    def place(
        self, name: str, bundles: Sequence[Resources], *, spread: bool, seconds: float, grows: bool
    ) -> None:
        """Reserve resources for actors, one bundle for each; ConfigError where the cluster has no room within `seconds`.

        A cluster that does not grow (`grows`) is not waited for.
        """
        from ray.util import placement_group, remove_placement_group

        asked = {
            "CPU": sum(each.cpus for each in bundles),
            "GPU": sum(each.gpus for each in bundles),
        }
        there = _resources("cluster_resources", asked)
        if grows or all(there[kind] >= amount for kind, amount in asked.items()):
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
            except Exception as error:  # Ray raises no narrower one for a cluster that ends meanwhile
                raise EngineError(
                    f"Ray could not place the run: {_line(error)}. Is the cluster still there?"
                ) from error
        free = _resources("available_resources", asked)
        raise ConfigError(
            f"The cluster has no room for {len(bundles)} actors: they ask for {_amounts(asked)}, in parts of at most "
            f"{_amounts({'CPU': max(b.cpus for b in bundles), 'GPU': max(b.gpus for b in bundles)})} on one machine; there are "
            f"{_amounts(there)}, of which {_amounts(free)} free. Ask for fewer workers (`ray.rollout_workers`, "
            "`--processes`) or less for each (`ray.trainer.cpus`, `ray.rollout.cpus`, …), or wait longer (`ray.timeout`)."
        )

    def actor(
        self, kind: type, bundle: int | None, resources: Resources, calls: int = 1, name: str | None = None
    ) -> Actor:
        """Start an actor of a class where a bundle was placed; it answers `calls` at a time, one alone in order.

        Without a bundle it starts when and where the cluster has room outside the run's placement group. One with a `name` is
        shared: where it runs already it is returned. It ends with the process that has started it.
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
        """Put bytes where every actor can read them; what stands for them may be given to `Actor.ask`."""
        import ray

        return ray.put(data)

    def fetch(self, stored: object) -> bytes:
        """Return the bytes that `store` was given."""
        import ray

        reference: Any = stored
        return bytes(ray.get(reference))

    def leave(self) -> None:
        """End all actors of this process, and the cluster if it is its own."""
        import ray

        ray.shutdown()


# -------- `breakpoint()`: Ray gives its own workers a hook to its debugger; these are processes that such a worker starts

ADDRESS = "KAPELLE_RAY_ADDRESS"
"""Environment variable by which they find the cluster."""


def debuggable(environ: MutableMapping[str, str]) -> None:
    """Have `breakpoint()` reach Ray's debugger in a process that an actor starts with these variables; keeps a hook of the user's."""
    import ray

    if environ.get("PYTHONBREAKPOINT", "").partition(".")[0] in ("", "ray"):
        environ["PYTHONBREAKPOINT"] = f"{__name__}.{set_trace.__name__}"
    environ[ADDRESS] = str(ray.get_runtime_context().gcs_address)


def set_trace() -> None:
    """Wait for Ray's debugger where `breakpoint()` was called: by debugpy or, with RAY_DEBUG=legacy, for `ray debug`.

    Raises ConfigError where debugpy is missing: Ray itself would go on as if there were no breakpoint.
    """
    import ray
    from ray.util import rpdb as untyped

    rpdb: Any = untyped
    legacy = os.environ.get("RAY_DEBUG") == "legacy"
    if not legacy and importlib.util.find_spec("debugpy") is None:
        raise ConfigError(
            "`breakpoint()` waits for Ray's debugger, which needs debugpy. Install it on every machine (pip install debugpy), or set "
            "RAY_DEBUG=legacy there and use `ray debug`."
        )
    if not ray.is_initialized():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        ray.init(address=os.environ[ADDRESS], **QUIET)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray has set its own
                signal.signal(number, handler)
    if legacy:  # Ray's own function of this name would stop here, and not where the user wrote `breakpoint()`
        rpdb._connect_ray_pdb().set_trace(sys._getframe().f_back)  # noqa: SLF001
    else:
        rpdb.set_trace()


def own_address() -> str:
    """Return the address at which the other machines of a cluster reach this one."""
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
    """Return how an actor ended, without Ray's own identifiers."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [
        line
        for line in lines
        if line and not line.startswith(("class_name:", "actor_id:", "namespace:", "pid:"))
    ]
    return " ".join(told)[:500]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")[:300]


def settle_in(actor: object, said: Mapping[str, Any]) -> None:
    """Let an actor's process import from the run's `path` and work in its `folder`; the watchdog may end the actor from now on."""
    sys.path += [entry for entry in said["path"] if entry not in sys.path]
    with suppress(OSError):  # another machine may not have it: paths in the recipe then say so
        os.chdir(said["folder"])
    interrupts.commands.append(actor)  # it may be where it cannot be interrupted
