"""Registry of the built-in environments, keyed by name.

To add an environment, write its module, add an entry to `BUILTIN`, and add an import to the `TYPE_CHECKING` block below, which
editors use.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kapelle.runtime.lazy_names import classes, lazy

BUILTIN: Mapping[str, str] = {
    "arithmetic": "kapelle.environments.arithmetic:Arithmetic",
    "math": "kapelle.environments.math:Math",
    "gsm8k_steps": "kapelle.environments.gsm8k_steps:GSM8KSteps",
    "algebra": "kapelle.environments.procedural:Algebra",
    "word_problems": "kapelle.environments.procedural:WordProblems",
    "multi_step": "kapelle.environments.procedural:MultiStep",
    "nli": "kapelle.environments.nli:NLI",
    "debate_topics": "kapelle.environments.debate_topics:DebateTopics",
    "mixture": "kapelle.environments.mixture:Mixture",
    "squares": "kapelle.environments.squares:Squares",
    "sum_lists": "kapelle.environments.sum_lists:SumLists",
    "plan_path": "kapelle.environments.puzzles:PlanPath",
    "sudoku": "kapelle.environments.puzzles:Sudoku",
    "sokoban": "kapelle.environments.puzzles:Sokoban",
    "proposals": "kapelle.environments.proposals:Proposals",
    "matrix": "kapelle.environments.matrix:Matrix",
    "sum_game": "kapelle.environments.diagnostics:SumGame",
    "relay": "kapelle.environments.diagnostics:Relay",
    "hidden_sign": "kapelle.environments.diagnostics:HiddenSign",
    "speaker": "kapelle.environments.diagnostics:Speaker",
    "long_game": "kapelle.environments.diagnostics:LongGame",
    "essay": "kapelle.environments.diagnostics:Essay",
    "unequal": "kapelle.environments.diagnostics:Unequal",
    "trajectories": "kapelle.environments.recorded:Trajectories",
    "preferences": "kapelle.environments.recorded:Preferences",
    "labelled": "kapelle.environments.recorded:Labelled",
    "summarisation": "kapelle.environments.texts:Summarisation",
    "translation": "kapelle.environments.texts:Translation",
    "code": "kapelle.environments.code:Code",
    "benchmark": "kapelle.environments.benchmarks.environment:Benchmark",
    "bfcl": "kapelle.environments.bfcl:Bfcl",
    "tools": "kapelle.environments.tool_questions:Tools",
    "tool_tasks": "kapelle.environments.tool_tasks:ToolTasks",
    "task_folders": "kapelle.environments.task_folders.environment:TaskFolders",
    "coding_agent": "kapelle.environments.task_folders.coding_agent:CodingAgent",
    "conversation": "kapelle.environments.conversation:UserConversation",
    "openspiel": "kapelle.environments.openspiel.environment:OpenSpiel",
    "pettingzoo": "kapelle.environments.adapters.pettingzoo:PettingZoo",
    "gymnasium": "kapelle.environments.adapters.gymnasium:Gymnasium",
    "textarena": "kapelle.environments.adapters.textarena:TextArena",
    "reasoning_gym": "kapelle.environments.adapters.reasoning_gym:ReasoningGym",
    "verifiers": "kapelle.environments.adapters.verifiers:Verifiers",
    "verifiers_v1": "kapelle.environments.adapters.verifiers_v1:VerifiersV1",
    "openenv": "kapelle.environments.adapters.openenv:OpenEnv",
    "inspect": "kapelle.environments.adapters.inspect_tasks:Inspect",
    "plain": "kapelle.environments.adapters.plain:Plain",
    "rewarded": "kapelle.environments.rewarded:Rewarded",
    "reward_server": "kapelle.environments.reward_server:RewardServer",
    "external": "kapelle.environments.external:External",
    "remote": "kapelle.environments.remote:Remote",
    "siirl_env": "kapelle.environments.adapters.siirl_env:SiirlEnv",
}
"""Mapping from the name of an environment in a recipe to `module:Class`. The module is imported when the environment is first used."""

HOMES: Mapping[str, str] = {
    **classes(BUILTIN),
    "BaseEnvironment": "kapelle.environments.base",
    "BaseState": "kapelle.environments.base",
    "Part": "kapelle.environments.mixture",
    "Answers": "kapelle.environments.questions",
    "Questions": "kapelle.environments.questions",
    "numbers": "kapelle.environments.questions",
    "words": "kapelle.environments.questions",
    "Difficulty": "kapelle.environments.questions",
    "Generated": "kapelle.environments.questions",
    "Problem": "kapelle.environments.questions",
}
"""Mapping from the name of a class to the module that defines it, for imports such as `from kapelle.environments import Arithmetic`."""

if TYPE_CHECKING:
    from kapelle.environments.adapters.gymnasium import Gymnasium as Gymnasium
    from kapelle.environments.adapters.inspect_tasks import Inspect as Inspect
    from kapelle.environments.adapters.openenv import OpenEnv as OpenEnv
    from kapelle.environments.adapters.pettingzoo import PettingZoo as PettingZoo
    from kapelle.environments.adapters.plain import Plain as Plain
    from kapelle.environments.adapters.reasoning_gym import ReasoningGym as ReasoningGym
    from kapelle.environments.adapters.siirl_env import SiirlEnv as SiirlEnv
    from kapelle.environments.adapters.textarena import TextArena as TextArena
    from kapelle.environments.adapters.verifiers import Verifiers as Verifiers
    from kapelle.environments.adapters.verifiers_v1 import VerifiersV1 as VerifiersV1
    from kapelle.environments.arithmetic import Arithmetic as Arithmetic
    from kapelle.environments.base import BaseEnvironment as BaseEnvironment
    from kapelle.environments.base import BaseState as BaseState
    from kapelle.environments.benchmarks.environment import Benchmark as Benchmark
    from kapelle.environments.bfcl import Bfcl as Bfcl
    from kapelle.environments.code import Code as Code
    from kapelle.environments.conversation import UserConversation as UserConversation
    from kapelle.environments.debate_topics import DebateTopics as DebateTopics
    from kapelle.environments.diagnostics import Essay as Essay
    from kapelle.environments.diagnostics import HiddenSign as HiddenSign
    from kapelle.environments.diagnostics import LongGame as LongGame
    from kapelle.environments.diagnostics import Relay as Relay
    from kapelle.environments.diagnostics import Speaker as Speaker
    from kapelle.environments.diagnostics import SumGame as SumGame
    from kapelle.environments.diagnostics import Unequal as Unequal
    from kapelle.environments.external import External as External
    from kapelle.environments.gsm8k_steps import GSM8KSteps as GSM8KSteps
    from kapelle.environments.math import Math as Math
    from kapelle.environments.matrix import Matrix as Matrix
    from kapelle.environments.mixture import Mixture as Mixture
    from kapelle.environments.mixture import Part as Part
    from kapelle.environments.nli import NLI as NLI
    from kapelle.environments.openspiel.environment import OpenSpiel as OpenSpiel
    from kapelle.environments.procedural import Algebra as Algebra
    from kapelle.environments.procedural import MultiStep as MultiStep
    from kapelle.environments.procedural import WordProblems as WordProblems
    from kapelle.environments.proposals import Proposals as Proposals
    from kapelle.environments.puzzles import PlanPath as PlanPath
    from kapelle.environments.puzzles import Sokoban as Sokoban
    from kapelle.environments.puzzles import Sudoku as Sudoku
    from kapelle.environments.questions import Answers as Answers
    from kapelle.environments.questions import Difficulty as Difficulty
    from kapelle.environments.questions import Generated as Generated
    from kapelle.environments.questions import Problem as Problem
    from kapelle.environments.questions import Questions as Questions
    from kapelle.environments.questions import numbers as numbers
    from kapelle.environments.questions import words as words
    from kapelle.environments.recorded import Labelled as Labelled
    from kapelle.environments.recorded import Preferences as Preferences
    from kapelle.environments.recorded import Trajectories as Trajectories
    from kapelle.environments.remote import Remote as Remote
    from kapelle.environments.reward_server import RewardServer as RewardServer
    from kapelle.environments.rewarded import Rewarded as Rewarded
    from kapelle.environments.squares import Squares as Squares
    from kapelle.environments.sum_lists import SumLists as SumLists
    from kapelle.environments.task_folders.coding_agent import CodingAgent as CodingAgent
    from kapelle.environments.task_folders.environment import TaskFolders as TaskFolders
    from kapelle.environments.texts import Summarisation as Summarisation
    from kapelle.environments.texts import Translation as Translation
    from kapelle.environments.tool_questions import Tools as Tools
    from kapelle.environments.tool_tasks import ToolTasks as ToolTasks

__getattr__, __dir__ = lazy(__name__, HOMES)
