"""Limits the output of other libraries to errors, removes control characters from it, and makes waiting threads sleep.

Names in a model's folder, a data set or a completion can occur in warnings, logs and tracebacks. Without this module, a
terminal would execute the control characters in these names.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
import warnings
from types import TracebackType
from typing import TextIO

from kapelle.runtime.characters import cleaned


def clean_what_others_print() -> None:
    """Remove control characters from all later warnings, log records and tracebacks of this process."""
    if logging.getLogRecordFactory() is CleanRecord:
        return
    logging.setLogRecordFactory(CleanRecord)

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        _write(warnings.formatwarning(message, category, filename, lineno, line), file)

    def show_defect_of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread is not None else "a thread"
            _write(f"Exception in {name}:\n{_text_of(args.exc_type, args.exc_value, args.exc_traceback)}")

    warnings.showwarning = show_warning
    sys.excepthook = lambda kind, error, frames: _write(_text_of(kind, error, frames))
    threading.excepthook = show_defect_of_thread


class CleanRecord(logging.LogRecord):
    """A log record whose message and exception text contain no control characters."""

    def getMessage(self) -> str:  # noqa: D102, N802 (the library's name)
        if self.exc_info and not self.exc_text:
            self.exc_text = _text_of(*self.exc_info).rstrip("\n")
        return cleaned(super().getMessage())


def _text_of(
    kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
) -> str:
    return cleaned("".join(traceback.format_exception(kind, error, frames)))


def _write(text: str, file: TextIO | None = None) -> None:
    stream = file or sys.stderr
    try:
        stream.write(cleaned(text))
    except (OSError, ValueError, AttributeError):  # the stream is closed or missing
        return


_DEFAULTS = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    # A lost rank breaks connections, and torch would print a page for each of them.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment variables that the libraries read when they are imported. Values that the user has set are kept."""

_LIBRARIES = r"(torch|transformers|huggingface_hub|datasets|peft|tensorboard|wandb)\b"


def hush() -> None:
    """Disable progress bars and warnings of torch, transformers and related libraries."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "transformers" in sys.modules:  # the library has read the variables already
        from transformers.utils import logging

        logging.disable_progress_bar()
    if not os.environ.get("PYTHONWARNINGS"):
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
