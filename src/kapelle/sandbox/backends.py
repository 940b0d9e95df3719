"""Finds a sandbox by name. There is no fallback: what was asked for is given, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kapelle.errors import SandboxError, did_you_mean
from kapelle.sandbox.bubblewrap import Bubblewrap
from kapelle.sandbox.contract import Backend, Layer
from kapelle.sandbox.docker import Docker
from kapelle.sandbox.unsafe_subprocess import UnsafeSubprocess

DEFAULT = "bubblewrap"
BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "bubblewrap": Bubblewrap,
    "docker": Docker,
    "unsafe_subprocess": UnsafeSubprocess,
}


def backend(name: str = DEFAULT) -> Backend:
    """Return the sandbox of a name. Raises SandboxError for an unknown one; `require` checks whether it works here."""
    if name not in BACKENDS:
        raise SandboxError(f"There is no sandbox '{name}'.{did_you_mean(name, BACKENDS)}")
    return BACKENDS[name]()


def layers(name: str = DEFAULT) -> tuple[Layer, ...]:
    """Return each layer of protection of a sandbox and whether this machine gives it, for `kapelle info`."""
    return backend(name).layers()


def require(chosen: Backend) -> None:
    """Raise SandboxError when this machine lacks a layer without which the sandbox must not be used."""
    missing = [layer for layer in chosen.layers() if layer.required and not layer.present]
    if missing:
        named = "; ".join(f"{layer.name}: {layer.detail}" for layer in missing)
        raise SandboxError(
            f"The sandbox `{chosen.name}` cannot be used on this machine ({named}) "
            "Nothing falls back to a weaker one: `unsafe_subprocess`, which contains nothing, must be asked "
            "for by name."
        )
    _required.add(chosen.name)


def modes_required() -> tuple[str, ...]:
    """Return a line for each sandbox that this process has asked for: by what its runs are bounded as a whole."""
    return tuple(
        f"{name}: {layer.detail}"
        for name in sorted(_required)
        for layer in layers(name)
        if layer.name == "mode"
    )


_required: set[str] = set()
