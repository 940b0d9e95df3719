"""What is committed of the wire's code is what its tool makes of `proto/`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.repository import rules

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_code_is_made_of_the_contract_byte_by_byte(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools (the extra `dev`) makes the code")
    from tools.generate_wire import generate

    made = {path.relative_to(tmp_path): path.read_bytes() for path in generate(tmp_path)}
    source = ROOT / "src"
    committed = {
        path.relative_to(source): path.read_bytes() for path in source.rglob("*") if rules.generated(path)
    }
    assert {path.name for path in made} >= {"reward_v1_pb2.py", "reward_v1_pb2.pyi"}
    assert {p: c for p, c in committed.items() if p.suffix != ".pyc"} == made, (
        "run: python tools/generate_wire.py"
    )
