"""Messages between processes: the protocol of remote episode states (`worlds.py`), exact JSON, and the reward server's contract over gRPC.

`python tools/generate_wire.py` writes the files `*_pb2*`. Edit `proto/kapelle/runtime/wire` instead, and rerun it;
`tests/repository/test_wire.py` compares. The formatter, linter, type checker and the counts of `tests/repository` skip these files.
"""

import os

LARGEST = 16 << 20
"""Maximum bytes of one message, decompressed."""

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its notes about connections are for grpcio's developers
