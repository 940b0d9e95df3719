"""The built-in workflows.

To add a workflow, write its module, add a line to `BUILTIN`, and add an import under `TYPE_CHECKING` for editors.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kapelle.runtime.lazy_names import classes, lazy

BUILTIN: Mapping[str, str] = {
    "solo": "kapelle.workflows.solo:Solo",
    "parallel": "kapelle.workflows.parallel:Parallel",
    "chain": "kapelle.workflows.chain:Chain",
    "debate": "kapelle.workflows.debate:Debate",
    "vote": "kapelle.workflows.vote:Vote",
    "summary": "kapelle.workflows.summary:Summary",
    "reflect": "kapelle.workflows.reflect:Reflect",
    "cory": "kapelle.workflows.cory:Cory",
    "dag": "kapelle.workflows.dag:Dag",
    "router": "kapelle.workflows.router:Router",
    "swarm": "kapelle.workflows.swarm:Swarm",
    "play": "kapelle.workflows.play:PlayWorkflow",
    "propose": "kapelle.workflows.propose:Propose",
    "tool_use": "kapelle.workflows.tool_use:ToolUse",
    "external": "kapelle.workflows.external:ExternalWorkflow",
}
"""Mapping from the name of a workflow in a recipe to `module:Class`. The module is imported when the workflow is first used."""

FILES = "kapelle.workflows.dag_file"
"""Name of the module that reads files which define a whole workflow (`kapelle.workflow.workflow_files`)."""

HOMES: Mapping[str, str] = {
    **classes(BUILTIN),
    "Node": "kapelle.workflows.dag",
    "majority": "kapelle.workflows.vote",
}
"""Mapping from each public name to the module that defines it, for imports such as `from kapelle.workflows import Chain`."""

if TYPE_CHECKING:
    from kapelle.workflows.chain import Chain as Chain
    from kapelle.workflows.cory import Cory as Cory
    from kapelle.workflows.dag import Dag as Dag
    from kapelle.workflows.dag import Node as Node
    from kapelle.workflows.debate import Debate as Debate
    from kapelle.workflows.external import ExternalWorkflow as ExternalWorkflow
    from kapelle.workflows.parallel import Parallel as Parallel
    from kapelle.workflows.play import PlayWorkflow as PlayWorkflow
    from kapelle.workflows.propose import Propose as Propose
    from kapelle.workflows.reflect import Reflect as Reflect
    from kapelle.workflows.router import Router as Router
    from kapelle.workflows.solo import Solo as Solo
    from kapelle.workflows.summary import Summary as Summary
    from kapelle.workflows.swarm import Swarm as Swarm
    from kapelle.workflows.tool_use import ToolUse as ToolUse
    from kapelle.workflows.vote import Vote as Vote
    from kapelle.workflows.vote import majority as majority

__getattr__, __dir__ = lazy(__name__, HOMES)
