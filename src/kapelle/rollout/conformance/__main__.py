"""Print the tasks that an environment creates from settings on standard input (`python -m kapelle.rollout.conformance`).

The conformance checks compare the output with the tasks of another process.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, cast

from kapelle.environment import environment_class
from kapelle.errors import KapelleError
from kapelle.rollout.conformance import fingerprint
from kapelle.settings.schema import timed

if TYPE_CHECKING:
    from kapelle.environment import Environment


def main() -> None:
    """Read an environment's settings from standard input and print its fingerprint."""
    request = json.load(sys.stdin)
    settings = request["settings"]
    environment = timed(environment_class(settings["name"]), "environment")(**settings)
    json.dump(fingerprint(cast("Environment", environment), request["count"]), sys.stdout)


if __name__ == "__main__":
    try:
        main()
    except KapelleError as error:
        raise SystemExit(str(error)) from None
