"""GENERATED: the protobuf messages and gRPC stubs of `proto/kapelle/wire`. Needs the extra `serve`.

`python tools/generate_wire.py` writes every file here but this one. Edit the `.proto` files instead, and run it again;
`tests/repository/test_wire.py` compares. Formatter, linter, type checker and the counts of `tests/repository` leave them out.
"""

import os

LARGEST = 16 << 20
"""Bytes of one message at most, decompressed."""

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its notes about connections are for grpcio's developers
