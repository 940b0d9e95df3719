"""Messages between processes: the protocol of remote episode states (`worlds.py`), exact JSON, and the reward server's contract over gRPC.

`python tools/generate_wire.py` writes the files `*_pb2*`. Edit `proto/kapelle/runtime/wire` instead, and rerun it;
`tests/repository/test_wire.py` compares. Formatter, linter, type checker and the counts of `tests/repository` leave them out.
"""

import os

LARGEST = 16 << 20
"""Bytes of one message at most, decompressed."""

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its notes about connections are for grpcio's developers
