"""The built-in algorithms by name.

To add an algorithm, write its module, add a line to `BUILTIN`, and add an import under `TYPE_CHECKING` for editors.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kapelle.runtime.lazy_names import classes, lazy

BUILTIN: Mapping[str, str] = {
    "sft": "kapelle.algorithms.sft:SFT",
    "verifier": "kapelle.algorithms.verifier:Verifier",
    "distill": "kapelle.algorithms.distill:Distill",
    "self_distill": "kapelle.algorithms.self_distill:SelfDistill",
    "dpo": "kapelle.algorithms.dpo:DPO",
    "grpo": "kapelle.algorithms.grpo:GRPO",
    "rloo": "kapelle.algorithms.rloo:RLOO",
    "opo": "kapelle.algorithms.opo:OPO",
    "gdpo": "kapelle.algorithms.gdpo:GDPO",
    "remax": "kapelle.algorithms.remax:ReMax",
    "reinforce_plus_plus": "kapelle.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "rae": "kapelle.algorithms.rae:RAE",
    "gigpo": "kapelle.algorithms.gigpo:GiGPO",
    "optimistic": "kapelle.algorithms.optimistic:Optimistic",
    "at_grpo": "kapelle.algorithms.at_grpo:ATGRPO",
    "counterfactual": "kapelle.algorithms.counterfactual:Counterfactual",
    "c3": "kapelle.algorithms.c3:C3",
    "ccpo": "kapelle.algorithms.ccpo:CCPO",
    "sharp": "kapelle.algorithms.sharp:SHARP",
    "cory": "kapelle.algorithms.cory:CORY",
    "mada_rl": "kapelle.algorithms.mada_rl:MADARL",
    "magrpo": "kapelle.algorithms.magrpo:MAGRPO",
    "m_grpo": "kapelle.algorithms.m_grpo:MGRPO",
    "dr_mas": "kapelle.algorithms.dr_mas:DrMAS",
    "mars": "kapelle.algorithms.mars:MARS",
    "mmd": "kapelle.algorithms.mmd:MMD",
    "rnad": "kapelle.algorithms.rnad:RNaD",
    "a2c": "kapelle.algorithms.a2c:A2C",
    "ppo": "kapelle.algorithms.ppo:PPO",
    "ippo": "kapelle.algorithms.ppo:IPPO",
    "mappo": "kapelle.algorithms.mappo:MAPPO",
    "coma": "kapelle.algorithms.coma:COMA",
    "marft": "kapelle.algorithms.marft:MARFT",
    "happo": "kapelle.algorithms.happo:HAPPO",
    "maporl": "kapelle.algorithms.maporl:MAPoRL",
    "vdn": "kapelle.algorithms.vdn:VDN",
    "vdn_token": "kapelle.algorithms.vdn_token:VDNToken",
    "qmix": "kapelle.algorithms.qmix:QMIX",
}
"""Mapping from the name of an algorithm in a recipe to its class as `module:Class`. The module is imported on first use."""

HOMES: Mapping[str, str] = classes(BUILTIN)
"""Mapping from the name of a class to the module that defines the class. This mapping makes `from kapelle.algorithms import
GRPO` possible."""

if TYPE_CHECKING:
    from kapelle.algorithms.a2c import A2C as A2C
    from kapelle.algorithms.at_grpo import ATGRPO as ATGRPO
    from kapelle.algorithms.c3 import C3 as C3
    from kapelle.algorithms.ccpo import CCPO as CCPO
    from kapelle.algorithms.coma import COMA as COMA
    from kapelle.algorithms.cory import CORY as CORY
    from kapelle.algorithms.counterfactual import Counterfactual as Counterfactual
    from kapelle.algorithms.distill import Distill as Distill
    from kapelle.algorithms.dpo import DPO as DPO
    from kapelle.algorithms.dr_mas import DrMAS as DrMAS
    from kapelle.algorithms.gdpo import GDPO as GDPO
    from kapelle.algorithms.gigpo import GiGPO as GiGPO
    from kapelle.algorithms.grpo import GRPO as GRPO
    from kapelle.algorithms.happo import HAPPO as HAPPO
    from kapelle.algorithms.m_grpo import MGRPO as MGRPO
    from kapelle.algorithms.mada_rl import MADARL as MADARL
    from kapelle.algorithms.magrpo import MAGRPO as MAGRPO
    from kapelle.algorithms.maporl import MAPoRL as MAPoRL
    from kapelle.algorithms.mappo import MAPPO as MAPPO
    from kapelle.algorithms.marft import MARFT as MARFT
    from kapelle.algorithms.mars import MARS as MARS
    from kapelle.algorithms.mmd import MMD as MMD
    from kapelle.algorithms.opo import OPO as OPO
    from kapelle.algorithms.optimistic import Optimistic as Optimistic
    from kapelle.algorithms.ppo import IPPO as IPPO
    from kapelle.algorithms.ppo import PPO as PPO
    from kapelle.algorithms.qmix import QMIX as QMIX
    from kapelle.algorithms.rae import RAE as RAE
    from kapelle.algorithms.reinforce_plus_plus import ReinforcePlusPlus as ReinforcePlusPlus
    from kapelle.algorithms.remax import ReMax as ReMax
    from kapelle.algorithms.rloo import RLOO as RLOO
    from kapelle.algorithms.rnad import RNaD as RNaD
    from kapelle.algorithms.self_distill import SelfDistill as SelfDistill
    from kapelle.algorithms.sft import SFT as SFT
    from kapelle.algorithms.sharp import SHARP as SHARP
    from kapelle.algorithms.vdn import VDN as VDN
    from kapelle.algorithms.vdn_token import VDNToken as VDNToken
    from kapelle.algorithms.verifier import Verifier as Verifier

__getattr__, __dir__ = lazy(__name__, HOMES)
