"""The exception classes of kapelle, for every error that the library raises on purpose.

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

Error messages state what is wrong, where it is wrong and how to fix it. The command line prints each message as one line and exits
with code 2. Any other exception is a bug in kapelle and is shown with its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class KapelleError(Exception):
    """Base class of every error that kapelle raises on purpose."""


class ConfigError(KapelleError, ValueError):
    """A recipe, key or name is invalid, or settings cannot be combined."""


class DataError(KapelleError, ValueError):
    """A data file is missing, corrupt or not in the expected format."""


class ModelError(KapelleError, ValueError):
    """A model folder, tokeniser or adapter cannot be used."""


class Absent(KapelleError):
    """Something is missing on this machine that another machine may have, such as a package, a device, a file or access to a hub.

    With `--dry-run`, the command line lists what is missing and continues.
    """


@contextmanager
def noting(absent: list[str] | None, *also: type[KapelleError]) -> Iterator[None]:
    """Catch an `Absent` error that is raised in the block, and add its message to `absent` unless the list already contains it.

    If `absent` is None, the error is raised again. The argument `also` lists additional exception classes to catch.
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
    """A package or device that the settings need is missing on this machine."""


class AbsentCode(ConfigError):
    """A user's file or function that the settings refer to is missing.

    Rollouts and training need this code, but export and serving do not.
    """


class AbsentData(DataError, Absent):
    """The rows of a data set are neither on this machine nor available from a hub."""


class AbsentModel(ModelError, Absent):
    """A model is neither on this machine nor available from a hub."""


class ContextError(KapelleError, ValueError):
    """A prompt exceeds the context length of the model."""


class RunDirectoryError(KapelleError):
    """A run directory is in use, belongs to something else or cannot be written."""


class CheckpointError(KapelleError):
    """A checkpoint is missing or damaged."""


class EngineError(KapelleError):
    """A rollout engine or train engine failed."""


class ParityError(EngineError):
    """The log-probs of trainer and sampler differ, because the sampler did not use the trained weights."""


class PeerFailed(EngineError):
    """Another process of the same step failed. The run ends with the error of that process."""


class AlgorithmError(KapelleError):
    """Training cannot use the signals, the credit function, the loss or a hook of an algorithm."""


class NumericsError(KapelleError):
    """A loss, gradient, reward or log-prob is not finite."""


class EpisodeError(KapelleError):
    """An episode failed. The message is stored in `Episode.error`, and other episodes continue."""

    def __init__(self, message: str = "", info: Mapping[str, str] | None = None) -> None:
        """Set the message of the error, and information about the episode that is stored in `Episode.info`."""
        super().__init__(message)
        self.info: Mapping[str, str] = dict(info or {})


class RequestRefused(EpisodeError):
    """The server of an endpoint refused a request, which it would refuse again. The caller may continue with another request."""


class SandboxError(Absent):
    """A sandbox, or a layer of a sandbox, is not available on this machine, so that no program was run."""


class TrainingHalted(KapelleError):
    """A run was stopped by one of its own limits, such as the share of failed episodes."""

    def __init__(self, message: str = "", groups: Collection[Any] = ()) -> None:
        """Set the message of the error, and the groups whose failed episodes stopped the run."""
        super().__init__(message)
        self.groups = groups


class OutputError(KapelleError):
    """An output file or stream of a command cannot be written."""


EACH = "\n- "
"""Separator between the problems that one error message lists."""


def raise_all(faults: Collection[ConfigError]) -> None:
    """Raise the error if there is only one, or a single error that lists all of them. Return if there is no error."""
    messages = list(dict.fromkeys(map(str, faults)))
    if len(messages) > 1:
        raise ConfigError(EACH.join([f"{len(messages)} settings cannot be used:", *messages]))
    for fault in faults:
        raise fault


def need_known(setting: str, kind: str, name: str | None, known: Collection[str]) -> None:
    """Raise ConfigError if a setting refers to something that does not exist, such as an agent or a node.

    The name None is accepted.
    """
    if name is not None and name not in known:
        raise ConfigError(f"{setting} refers to the unknown {kind} '{name}'.{did_you_mean(name, known)}")


LONGEST_LIST = 120
"""Maximum length in characters of a list of names in a message. If the list would be longer, the message contains only the closest
names."""
NEAREST = 3
MOST_NAMES = 60


IN_PYTHON_OR_COMMAND: ContextVar[bool] = ContextVar("in a call in Python or a command", default=False)
"""Whether an outer call has already chosen how error messages refer to options (`settings.messages.in_python`)."""


@contextmanager
def for_command() -> Iterator[None]:
    """Make error messages in the block refer to options in the form that the command line uses."""
    mark = IN_PYTHON_OR_COMMAND.set(True)
    try:
        yield
    finally:
        IN_PYTHON_OR_COMMAND.reset(mark)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown word: ` Did you mean 'x'?` with the closest known word, or else a list of known words.

    If the list would be longer than `LONGEST_LIST`, it contains only words that are similar to the unknown word. If no word is
    similar, the list contains all known words; with more than `MOST_NAMES` known words, the result is empty.
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
