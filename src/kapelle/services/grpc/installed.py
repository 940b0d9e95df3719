"""Whether the extra that speaks gRPC is there."""

from __future__ import annotations

from kapelle.errors import ConfigError


def check_installed() -> None:
    """Raise ConfigError when a package that speaks gRPC is missing."""
    import kapelle.wire  # noqa: F401 - sets how much grpcio says, before it is imported

    try:
        import grpc  # noqa: F401
        import grpc_health.v1  # noqa: F401
    except ImportError:
        raise ConfigError("Serving over gRPC needs an extra: pip install 'kapelle[serve]'.") from None
