"""How many episodes are under way at once; the others wait in line before they hold anything, so none waits for another."""

from __future__ import annotations

from kapelle.algorithm import Tree
from kapelle.environment import Environment, Holding
from kapelle.environments import bounded_worlds
from kapelle.runtime.descriptors import room_for


def at_once(environment: Environment, agents: int, tree: Tree | None, most: int) -> int:
    """Return how many episodes, at most `most`, leave room for all that their worlds hold.

    That is pipes and connections, and a thread for every world that blocks: an episode has room for all of its worlds
    before it begins, so that none of them waits for one that its own episode holds.
    """
    # Where episodes branch, the candidates of every agent are played on in worlds of their own.
    worlds = 1 + tree.candidates * agents if tree else 1
    if getattr(environment, "blocking", False):
        most = max(1, min(most, bounded_worlds.WORKERS // worlds))
    if not isinstance(environment, Holding):
        return most
    return room_for(worlds * environment.descriptors(agents), most)
