"""What is said over the wire: code that `tools/generate_wire.py` makes of `proto/`. Needs the extra `serve`."""

import os

LARGEST = 16 << 20
"""Bytes of one message at most, unpacked."""

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its own notes about connections are for its developers
