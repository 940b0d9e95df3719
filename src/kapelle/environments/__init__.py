"""Built-in environments, found by name. To add one, write its module and give it a line here."""

from collections.abc import Mapping

BUILTIN: Mapping[str, str] = {
    "arithmetic": "kapelle.environments.arithmetic:Arithmetic",
    "math": "kapelle.environments.math:Math",
    "gsm8k_steps": "kapelle.environments.gsm8k_steps:GSM8KSteps",
    "algebra": "kapelle.environments.algebra:Algebra",
    "word_problems": "kapelle.environments.word_problems:WordProblems",
    "multi_step": "kapelle.environments.multi_step:MultiStep",
    "nli": "kapelle.environments.nli:NLI",
    "debate_topics": "kapelle.environments.debate_topics:DebateTopics",
    "mixture": "kapelle.environments.mixture:Mixture",
    "matrix": "kapelle.environments.matrix:Matrix",
    "trajectories": "kapelle.environments.recorded.trajectories:Trajectories",
    "preferences": "kapelle.environments.recorded.preferences:Preferences",
    "labelled": "kapelle.environments.recorded.labelled:Labelled",
    "code": "kapelle.environments.code.environment:Code",
    "bfcl": "kapelle.environments.bfcl:Bfcl",
    "tools": "kapelle.environments.tool_questions:Tools",
    "openspiel": "kapelle.environments.openspiel.environment:OpenSpiel",
    "pettingzoo": "kapelle.environments.adapters.pettingzoo:PettingZoo",
    "gymnasium": "kapelle.environments.adapters.gymnasium:Gymnasium",
    "textarena": "kapelle.environments.adapters.textarena:TextArena",
    "reasoning_gym": "kapelle.environments.adapters.reasoning_gym:ReasoningGym",
    "plain": "kapelle.environments.adapters.plain:Plain",
    "reward_server": "kapelle.environments.reward_server:RewardServer",
    "external": "kapelle.environments.external.environment:External",
    "remote": "kapelle.environments.remote:Remote",
    "siirl_env": "kapelle.environments.adapters.siirl_env:SiirlEnv",
}
"""Name in a recipe → `module:Class`, imported when asked for."""
