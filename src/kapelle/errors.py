"""Every error that kapelle raises on purpose.

    KapelleError
    ├── ConfigError (ValueError)      an invalid recipe, key, name or combination of them
    │   └── AbsentCode                a user's file or function that settings name but that is missing
    ├── DataError (ValueError)        a data file that is missing, corrupt or in the wrong format
    ├── ModelError (ValueError)       a model folder, tokeniser or adapter that cannot be used
    ├── ContextError (ValueError)     a prompt that exceeds the model's context
    ├── RunDirectoryError             a run directory that is in use, belongs to something else or cannot be written
    ├── CheckpointError               a checkpoint that is missing or damaged
    ├── EngineError                   a failure of a rollout or train engine
    │   ├── ParityError               log-probs of trainer and sampler differ: the sampler used other weights
    │   └── PeerFailed                a failure of another process of the run, with its reason
    ├── AlgorithmError                signals, credit, a loss or a hook that training cannot use
    ├── NumericsError                 a loss, gradient, reward or log-prob that is not finite
    ├── EpisodeError                  a failure inside one episode; recorded as data, never a crash
    ├── Absent                        something that this machine lacks but another may have
    │   ├── AbsentPackage (ConfigError)
    │   ├── AbsentData (DataError)
    │   ├── AbsentModel (ModelError)
    │   └── SandboxError              a sandbox that this machine cannot provide; nothing ran
    ├── TrainingHalted                a run that was stopped by one of its own limits
    └── OutputError                   an output file or stream of a command that cannot be written

Messages say what is wrong, where, and how to fix it. The command line prints each message as one line and exits with code 2. Any
other exception is a defect of kapelle and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class KapelleError(Exception):
    """Root of every error that kapelle raises on purpose."""


class ConfigError(KapelleError, ValueError):
    """An invalid recipe, key, name or combination of them."""


class DataError(KapelleError, ValueError):
    """A data file that is missing, corrupt or not in the stated format."""


class ModelError(KapelleError, ValueError):
    """A model folder, tokeniser or adapter that cannot be used."""


class Absent(KapelleError):
    """Something that this machine lacks but another may have: a package, device, file or a hub's response.

    `--dry-run` lists such things and continues.
    """


@contextmanager
def noting(absent: list[str] | None, *also: type[KapelleError]) -> Iterator[None]:
    """Add the message of an `Absent` error in the block to `absent`, without duplicates; re-raise the error if `absent` is None.

    `also` lists additional classes of errors to collect.
    """
    kinds: tuple[type[KapelleError], ...] = (Absent, *also)
    try:
        yield
    except kinds as error:
        if absent is None:
            raise
        if str(error) not in absent:
            absent.append(str(error))


class AbsentPackage(ConfigError, Absent):
    """A package or device that settings need but this machine lacks."""


class AbsentCode(ConfigError):
    """A user's file or function that settings name but that is missing; rollouts and training need it, but export and serving do not."""


class AbsentData(DataError, Absent):
    """Rows that are neither on this machine nor available from a hub."""


class AbsentModel(ModelError, Absent):
    """A model that is neither on this machine nor available from a hub."""


class ContextError(KapelleError, ValueError):
    """A prompt that exceeds the model's context."""


class RunDirectoryError(KapelleError):
    """A run directory that is in use, belongs to something else or cannot be written."""


class CheckpointError(KapelleError):
    """A checkpoint that is missing or damaged."""


class EngineError(KapelleError):
    """A failure of a rollout or train engine."""


class ParityError(EngineError):
    """Log-probs of trainer and sampler differ: the sampler did not use the trained weights."""


class PeerFailed(EngineError):
    """A failure of another process of the same step; the run ends with that process's error."""


class AlgorithmError(KapelleError):
    """Signals, credit, a loss or a hook of an algorithm that training cannot use."""


class NumericsError(KapelleError):
    """A loss, gradient, reward or log-prob that is not finite."""


class EpisodeError(KapelleError):
    """A failure inside one episode; it becomes `Episode.error`, and other episodes continue."""

    def __init__(self, message: str = "", info: Mapping[str, str] | None = None) -> None:
        """Set a message, and information on the episode that becomes `Episode.info`."""
        super().__init__(message)
        self.info: Mapping[str, str] = dict(info or {})


class SandboxError(Absent):
    """A sandbox, or a layer of it, that this machine cannot provide; nothing ran."""


class TrainingHalted(KapelleError):
    """A run that was stopped by one of its own limits, such as the share of failed episodes."""

    def __init__(self, message: str = "", groups: Collection[Any] = ()) -> None:
        """Set a message, and the groups with the failed episodes that caused the stop."""
        super().__init__(message)
        self.groups = groups


class OutputError(KapelleError):
    """An output file or stream of a command that cannot be written."""


EACH = "\n- "
"""Separator of several problems in one error."""


def raise_all(faults: Collection[ConfigError]) -> None:
    """Raise the only problem, or one error that lists all of them; return if there is none."""
    messages = list(dict.fromkeys(map(str, faults)))
    if len(messages) > 1:
        raise ConfigError(EACH.join([f"{len(messages)} settings cannot be used:", *messages]))
    for fault in faults:
        raise fault


def need_known(setting: str, kind: str, name: str | None, known: Collection[str]) -> None:
    """Raise ConfigError if a setting names something (an agent, a node) that does not exist; None is accepted."""
    if name is not None and name not in known:
        raise ConfigError(f"{setting} refers to the unknown {kind} '{name}'.{did_you_mean(name, known)}")


LONGEST_LIST = 120
"""Maximum characters of a list of names in a message; a longer list is replaced by the closest names."""
NEAREST = 3
MOST_NAMES = 60


IN_PYTHON_OR_COMMAND: ContextVar[bool] = ContextVar("in a call in Python or a command", default=False)
"""Whether an outer call has already chosen the form of options in errors (`settings.messages.in_python`)."""


@contextmanager
def for_command() -> Iterator[None]:
    """Make errors in the block refer to options in the form of the command line."""
    mark = IN_PYTHON_OR_COMMAND.set(True)
    try:
        yield
    finally:
        IN_PYTHON_OR_COMMAND.reset(mark)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest known word, or else a list of the known words or of similar words.

    A long list contains only similar words. If there are none, all words are listed, or none if they exceed `MOST_NAMES`.
    """
    names = sorted(set(known))
    if not names:
        return ""
    folded = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{folded[close[0]]}'?"
    listed = ", ".join(names)
    if len(listed) <= LONGEST_LIST:
        return f" Known: {listed}."
    alike = difflib.get_close_matches(word.lower(), folded, n=NEAREST, cutoff=0.5)
    if alike:
        return f" The nearest of {len(names)} known: {', '.join(folded[name] for name in alike)}."
    return f" Known: {listed}." if len(names) <= MOST_NAMES else ""
