from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kapelle.errors import ConfigError
from kapelle.runtime.credentials import is_loopback
from kapelle.services.binding import Binding

LONG = "a-token-that-is-long-enough"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_local_address_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    Binding(host)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::ffff:10.0.0.1", "trainer.example", ""],  # noqa: S104
)
@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ({}, "TLS .* and a token"),
        ({"token": LONG}, "TLS"),
        ({"certificate": True}, "a token"),
        ({"certificate": True, "token": "short"}, "a token of 16"),
    ],
)
def test_other_machines_need_tls_and_a_token(
    host: str, given: dict[str, Any], lacking: str, tmp_path: Path
) -> None:
    if given.pop("certificate", False):
        given = {**given, **_tls(tmp_path)}
    with pytest.raises(ConfigError, match=lacking):
        Binding(host, **given)
    Binding(host, token=LONG, **_tls(tmp_path))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": 70_000}, "port 70000"),
        ({"port": -1}, "port -1"),
        ({"certificate": Path("there.pem")}, "both --tls-cert and --tls-key"),
        ({"certificate": Path("no.pem"), "key": Path("no.key")}, "no.pem cannot be read"),
        ({"token": ""}, "KAPELLE_TOKEN"),
        ({"token": " \n"}, "KAPELLE_TOKEN"),
        ({"token": "gehe\u00efm"}, "KAPELLE_TOKEN"),
    ],
)
def test_an_impossible_value_is_an_error(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Binding(**given)


def test_a_secret_is_never_shown() -> None:
    assert LONG not in repr(Binding(token=LONG))


def test_only_the_token_itself_admits() -> None:
    binding = Binding(token=LONG)
    assert binding.admits(LONG)
    for other in (None, "", LONG[:-1], f"{LONG} ", LONG.upper(), "\udc80"):
        assert not binding.admits(other)
    assert Binding().admits(None)


def _tls(folder: Path) -> dict[str, Any]:
    files = {"certificate": folder / "cert.pem", "key": folder / "key.pem"}
    for file in files.values():
        file.write_text("")
    return files
