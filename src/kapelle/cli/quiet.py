"""How other libraries behave under the command line: no output except errors, no spinning threads."""

from __future__ import annotations

import os
import sys
import warnings

_DEFAULTS = {
    # Waiting threads must not spin: next to another busy process, spinning costs ten times the work itself.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    # A rank that is lost breaks connections, of each of which torch would print a page.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Read by the libraries when they are imported; values set by the user stay."""

_LIBRARIES = r"(torch|transformers|huggingface_hub|datasets|peft|tensorboard|wandb)\b"


def hush() -> None:
    """Silence progress bars and warnings of torch, transformers and related libraries."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "transformers" in sys.modules:  # called from Python, where it has read them already
        from transformers.utils import logging

        logging.disable_progress_bar()
    if not os.environ.get("PYTHONWARNINGS"):
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
