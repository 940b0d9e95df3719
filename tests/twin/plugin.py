"""Gives a process of tests the twin: `python -m pytest -p tests.twin.plugin`."""

from tests.twin.cuda import install

install()
