"""An error of another process keeps its class and message."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kapelle.errors import ConfigError, EngineError, ParityError
from kapelle.runtime.deadlines import DeadlineExceeded
from kapelle.runtime.foreign_code import environment_error, received_error, sent_error


def sent(error: Exception) -> dict[str, str]:
    """Return an error after its transport as JSON."""
    try:
        raise error
    except (ConfigError, ParityError, KeyError) as caught:
        form: dict[str, str] = json.loads(json.dumps(sent_error(caught)))
        return form


@pytest.mark.parametrize("error", [ConfigError("a key"), ParityError("other weights")])
def test_an_error_of_kapelle_keeps_its_class(error: Exception) -> None:
    here = received_error(sent(error), "The sampling process")
    assert type(here) is type(error)
    assert str(here) == str(error)


def test_any_other_error_shows_the_traceback_of_the_process_that_raised_it() -> None:
    here = received_error(sent(KeyError("x")), "A rollout worker")
    assert type(here) is EngineError
    assert str(here).startswith("A rollout worker failed: KeyError: 'x'\nTraceback")
    assert "test_remote_errors.py" in str(here)


@pytest.mark.parametrize("make", [ConfigError, DeadlineExceeded, KeyboardInterrupt])
def test_errors_of_an_environment_keep_meaningful_classes(
    make: Callable[[str], BaseException],
) -> None:
    there = make("late")
    here = environment_error(type(there).__name__, "late")
    assert (type(here), str(here)) == (type(there), "late")


def test_an_environments_own_error_keeps_its_name() -> None:
    here = environment_error("CardLost", "the queen")
    assert (type(here).__name__, str(here)) == ("CardLost", "the queen")
    assert isinstance(here, Exception)
