"""What tests of served teams share."""

from __future__ import annotations

from kapelle.training.observer import Silent


class Watching(Silent):
    """Learns where outside programs call."""

    url = ""

    def phase(self, name: str, detail: str) -> None:
        if name == "serving":
            self.url = detail.split()[3].removesuffix(",")
