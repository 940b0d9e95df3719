"""Gives a process of tests the twin, and all that it starts: `python -m pytest -p tests.twin.plugin`."""

import os

from tests.twin import HERE
from tests.twin.cuda import install

install()
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE / "site"), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
