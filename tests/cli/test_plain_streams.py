"""What a terminal would obey reaches none of it, whoever prints."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from kapelle.cli.quiet import clean_what_others_print
from kapelle.runtime.characters import cleaned

BAD = "\x1b]0;owned\x07\x1b[31m\x9b31m\u202e\u2066\r\ud800"
GOOD = r"\x1b]0;owned\x07\x1b[31m\x9b31m\u202e\u2066\r\ud800"


def fail(kind: type[Exception]) -> None:
    raise kind(BAD)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    factory = logging.getLogRecordFactory()
    with warnings.catch_warnings():
        clean_what_others_print()
        yield
    logging.setLogRecordFactory(factory)


def test_lines_and_tabs_stay() -> None:
    assert cleaned("a\n\tä — 文") == "a\n\tä — 文"
    assert cleaned(f"a\n{BAD}") == f"a\n{GOOD}"


def test_warnings(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    warnings.simplefilter("always")
    warnings.warn(f"a model named {BAD}", UserWarning, stacklevel=1)
    assert f"a model named {GOOD}" in capsys.readouterr().err


def test_log_records_and_their_exceptions(installed: None) -> None:
    stream = io.StringIO()
    logger = logging.getLogger("another library")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        fail(ValueError)
    except ValueError:
        logger.exception("cannot read %s", BAD)
    logger.removeHandler(handler)
    said = stream.getvalue()
    assert f"cannot read {GOOD}\n" in said
    assert f"ValueError: {GOOD}" in said
    assert cleaned(said) == said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tracebacks_of_defects(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        fail(RuntimeError)
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    thread = threading.Thread(target=fail, args=[RuntimeError], name="one of ours")
    thread.start()
    thread.join()
    said = capsys.readouterr().err
    assert said.count(f"RuntimeError: {GOOD}") == 2
    assert "in fail" in said
    assert "one of ours" in said
    assert cleaned(said) == said
