"""Every error that kapelle raises on purpose.

    KapelleError
    ├── ConfigError (ValueError)      a recipe, key, name or combination that makes no sense
    │   └── AbsentCode                a user's file or function that settings name and that is not here
    ├── DataError (ValueError)        a data file that is missing, corrupt or in the wrong format
    ├── ModelError (ValueError)       a model folder, tokeniser or adapter that cannot be used
    ├── ContextError (ValueError)     a prompt that does not fit the model's context
    ├── RunDirectoryError             a run directory that is in use, foreign or cannot be written
    ├── CheckpointError               a checkpoint that is missing or damaged
    ├── EngineError                   a rollout or train engine that could not do its work
    │   ├── ParityError               trainer and sampler disagree: the wrong weights acted
    │   └── PeerFailed                another process of the run has failed, and says why
    ├── NumericsError                 a loss, gradient, reward or log-prob that is not finite
    ├── EpisodeError                  a fault inside one episode; recorded as data, never a crash
    ├── Absent                        what this machine lacks and another may have
    │   ├── AbsentPackage (ConfigError)
    │   ├── AbsentData (DataError)
    │   ├── AbsentModel (ModelError)
    │   └── SandboxError              a sandbox that this machine cannot provide; nothing ran
    ├── TrainingHalted                a run that stopped by one of its own limits
    └── OutputError                   an output file or stream of a command that cannot be written

Messages say what is wrong, where, and what to do. The command line prints each as one line and
exits with code 2; anything else that escapes is a defect of kapelle and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar


class KapelleError(Exception):
    """Root of every error that kapelle raises on purpose."""


class ConfigError(KapelleError, ValueError):
    """A recipe, key, name or combination of them that makes no sense."""


class DataError(KapelleError, ValueError):
    """A data file that is missing, corrupt or not in the stated format."""


class ModelError(KapelleError, ValueError):
    """A model folder, tokeniser or adapter that cannot be used."""


class Absent(KapelleError):
    """What this machine lacks and another may have: a package, a device, a file, an answer of a hub. `--dry-run` lists it and goes on."""


@contextmanager
def noting(absent: list[str] | None, *also: type[KapelleError]) -> Iterator[None]:
    """Add what the block lacks on this machine to `absent`, once, and leave the rest of the block out; raise it where that is None.

    `also` are further errors that are noted, by callers that need less than a run does.
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
    """A package, or a device, that settings need and this machine has not."""


class AbsentCode(ConfigError):
    """A user's file or function that settings name and that is not here. To play or to train needs it; to export or to answer calls does not."""


class AbsentData(DataError, Absent):
    """Rows that are not here, and that no hub gives."""


class AbsentModel(ModelError, Absent):
    """A model that is not here, and that no hub gives."""


class ContextError(KapelleError, ValueError):
    """A prompt that does not fit the context of the model that should read it."""


class RunDirectoryError(KapelleError):
    """A run directory that is in use, belongs to something else or cannot be written."""


class CheckpointError(KapelleError):
    """A checkpoint that is missing or damaged."""


class EngineError(KapelleError):
    """A rollout or train engine that could not do its work."""


class ParityError(EngineError):
    """Trainer and sampler log-probs disagree: the sampler used other weights than the ones being trained."""


class PeerFailed(EngineError):
    """Another process that plays the same step has failed; the run ends with that one's error."""


class AlgorithmError(KapelleError):
    """Signals, credit, a loss or a hook of an algorithm that training cannot use."""


class NumericsError(KapelleError):
    """A loss, gradient, reward or log-prob that is not finite."""


class EpisodeError(KapelleError):
    """A fault inside one episode; it becomes `Episode.error` and never stops the others."""

    def __init__(self, message: str = "", info: Mapping[str, str] | None = None) -> None:
        """`info` is what is known of the episode all the same; it becomes `Episode.info`."""
        super().__init__(message)
        self.info: Mapping[str, str] = dict(info or {})


class SandboxError(Absent):
    """A sandbox, or a layer of it, that this machine cannot provide; nothing was run without it."""


class TrainingHalted(KapelleError):
    """A run that stopped by one of its own limits, such as the share of failed episodes."""


class OutputError(KapelleError):
    """An output file or stream of a command that cannot be written."""


EACH = "\n- "
"""What separates the faults of one error."""


def raise_all(faults: Collection[ConfigError]) -> None:
    """Raise the fault that was found, or one error that lists all of them; nothing where there is none."""
    said = list(dict.fromkeys(map(str, faults)))
    if len(said) > 1:
        raise ConfigError(EACH.join([f"{len(said)} settings cannot be used:", *said]))
    for fault in faults:
        raise fault


def need_known(setting: str, kind: str, name: str | None, known: Collection[str]) -> None:
    """Raise ConfigError when a setting names something (an agent, a node) that does not exist; None names nothing."""
    if name is not None and name not in known:
        raise ConfigError(f"{setting} names the unknown {kind} '{name}'.{did_you_mean(name, known)}")


LONGEST_LIST = 120
"""Characters of names that a message lists; of more it names the nearest ones."""
NEAREST = 3
MOST_NAMES = 60


IN_PYTHON_OR_COMMAND: ContextVar[bool] = ContextVar("in a call in Python or a command", default=False)
"""Whether who was called first says how errors name options: see `settings.messages.in_python`."""


@contextmanager
def for_command() -> Iterator[None]:
    """Let errors name options of the command line, whatever calls in Python the command makes."""
    mark = IN_PYTHON_OR_COMMAND.set(True)
    try:
        yield
    finally:
        IN_PYTHON_OR_COMMAND.reset(mark)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest known word, else the known words: all where they are few, else those like it.

    Where none is like it all are named up to `MOST_NAMES`, and none of more.
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
