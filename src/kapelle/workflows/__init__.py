"""Built-in workflows, found by name. To add one, write its module and give it a line here."""

from collections.abc import Mapping

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
    "play": "kapelle.workflows.play:PlayWorkflow",
    "tool_use": "kapelle.workflows.tool_use:ToolUse",
    "external": "kapelle.workflows.external:ExternalWorkflow",
}
"""Name in a recipe → `module:Class`, imported when asked for."""
