"""Seeds that depend on what they are for, the same in every process."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on their order."""
    digest = hashlib.blake2b(
        "\x1f".join(str(part) for part in parts).encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> 1
