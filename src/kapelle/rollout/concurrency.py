"""How many episodes are under way at once; the others wait in line before they hold anything, so none waits for another."""

from __future__ import annotations

from kapelle.algorithm import Tree
from kapelle.environment import Environment, Holding
from kapelle.runtime.descriptors import room_for


def at_once(environment: Environment, agents: int, tree: Tree | None, most: int) -> int:
    """Return how many episodes, at most `most`, leave room for all pipes and connections that their worlds hold."""
    if not isinstance(environment, Holding):
        return most
    # Where episodes branch, the candidates of every agent are played on in worlds of their own.
    worlds = 1 + tree.candidates * agents if tree else 1
    return room_for(worlds * environment.descriptors(agents), most)
