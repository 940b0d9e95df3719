"""A twin of a CUDA device, made of torch's CPU kernels: what can be known of a GPU where there is none.

`device.cpp` is the device, `cuda.py` makes `torch.cuda` speak of it and counts what it is asked. Together they prove
where tensors live, what autocast does to their types, how often a step launches, waits and copies, that a graph may be
captured, and that results are those of a CPU. They say nothing about speed, races of streams, CUDA's own rounding and
nondeterminism, the alignment that kernels want, cuDNN's choices or NCCL (`docs/performance.md`).

A process has the twin if `python -m pytest -p tests.twin.plugin` started it, as `test_on_the_twin.py` does; so have all
processes of Python that it starts, such as ranks and samplers.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import shutil
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")


def library() -> Path:
    """Return the compiled device, compiled half a minute long if its source or torch is new; needs g++."""
    torch = Path(sysconfig.get_path("purelib")) / "torch"
    content = (HERE / "device.cpp").read_bytes() + (torch / "version.py").read_bytes()
    made = HERE.parents[1] / "build" / "twin" / f"{hashlib.sha256(content).hexdigest()[:16]}.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of tests may want it at once
        if not made.is_file():
            _compile(torch, made)
    return made


@functools.cache
def device() -> ctypes.CDLL:
    """Load the device into this process, which must not have asked torch yet what devices there are."""
    return ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)


def _compile(torch: Path, made: Path) -> None:
    assert COMPILER, "the twin is compiled by g++, which is not installed"
    half = made.with_suffix(".half")
    headers = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", *headers]
    subprocess.run([*command, str(HERE / "device.cpp"), "-o", str(half), *libraries], check=True)
    half.rename(made)
