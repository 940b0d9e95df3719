"""Writes the code of `proto/` into `src/`: `python tools/generate_wire.py`. Needs grpcio-tools (the extra `dev`).

`tests/repository/test_wire.py` holds that what is committed is what this writes.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(into: Path) -> list[Path]:
    """Write the code of every proto file below a folder and return the files written."""
    from grpc_tools import protoc

    sources = sorted((ROOT / "proto").rglob("*.proto"))
    for source in sources:
        (into / source.relative_to(ROOT / "proto")).parent.mkdir(parents=True, exist_ok=True)
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT / 'proto'}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            *(f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")),
            *map(str, sources),
        ]
    )
    if code:
        raise SystemExit(code)
    return sorted(
        into / source.relative_to(ROOT / "proto").with_name(source.stem + ending)
        for source in sources
        for ending in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    )


if __name__ == "__main__":
    for written in generate(ROOT / "src"):
        print(written.relative_to(ROOT), file=sys.stderr)
