"""How many episodes run at once; the others wait before they hold any resource, so that no episode blocks another."""

from __future__ import annotations

from kapelle.algorithm import Tree
from kapelle.environment import Environment, Holding
from kapelle.environments import bounded_worlds
from kapelle.runtime.descriptors import room_for


def at_once(environment: Environment, agents: int, tree: Tree | None, most: int, processes: int = 1) -> int:
    """Return how many episodes, at most `most`, have room for everything that their worlds hold in so many processes.

    These are pipes, connections, and a thread for every world that blocks. An episode has room for all of its worlds
    before it begins, so that none of them waits for another one of the same episode.
    """
    # Where episodes branch, the candidates of every agent are continued in their own worlds.
    worlds = 1 + tree.candidates * agents if tree else 1
    if getattr(environment, "blocking", False):
        most = min(most, processes * max(1, bounded_worlds.WORKERS // worlds))
    if not isinstance(environment, Holding):
        return most
    return min(most, processes * room_for(worlds * environment.descriptors(agents), most))
