"""Start a run: join its ranks, load its models, and build its engines and its loop.

Optional parts (a cluster, a sandbox, features) are given as names of functions and are imported only if the run uses them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kapelle.algorithms.signals.reference import ReferenceLogProbs
from kapelle.algorithms.signals.verifier import VerifierScores
from kapelle.engines.rollout import protocol as rollout_protocol
from kapelle.engines.rollout.protocol import RolloutEngine, check_abilities, notes_of
from kapelle.engines.train import protocol as train_protocol
from kapelle.engines.train.protocol import TrainEngine
from kapelle.environment import DrivenByPrograms, offers, on_environment_change
from kapelle.models.language_model import LanguageModel
from kapelle.models.weights import hash_of_base
from kapelle.rollout.outcomes import FirstFailures
from kapelle.rollout.setup import RolloutSetup, make_rollout_setup
from kapelle.rollout.workers.pool import HeldHere
from kapelle.rows import Learners
from kapelle.runs.checkpoint_contents import load_policies, load_verifier
from kapelle.runtime.plugins import find_object
from kapelle.runtime.ranks import ALONE, Ranks, check_same, first_then_others, launched_rank
from kapelle.runtime.tensors import leaves
from kapelle.settings.schema import RunConfig
from kapelle.setup.feature import ReportStep, bases_of
from kapelle.setup.model_loading import build_engine, build_train_engine, teacher
from kapelle.setup.preparation import PreparedRun
from kapelle.setup.servers import check_endpoints
from kapelle.team import Team, split_scored
from kapelle.training.feature import StartedRun, started
from kapelle.training.loop import Loop
from kapelle.training.provenance import provenance_of
from kapelle.training.rollouts import make_rollouts

CLUSTERS = {"KAPELLE_RAY": "kapelle.cluster.ray_workers:players_on"}
"""Mapping from the environment variable that a cluster sets in its ranks to a function. The function creates the objects that
sample and score for the rank.

The arguments of the function are the prepared run, the hashes of its bases, its models, its train engine, its ranks and a
stack that releases resources. The function returns four values: a rollout engine (or None for the recipe's engine); the
function that starts environment processes; the object that computes scores for signals in place of the engine (or None); and
the hashes of all bases. With `ray.scoring_workers`, the models are only those that the ranks need."""
SANDBOX_MODES = "kapelle.environments.sandbox.pool:modes_required"
"""The name of a function that returns a line for each sandbox that the environment of the run uses."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The parts of a run, with weights in memory."""

    team: Team
    models: Mapping[str, LanguageModel]
    """Mapping from the name of each base to its model."""
    base_hashes: Mapping[str, str]
    """Mapping from the name of each base to the hash of its weights without adapters."""
    engine: TrainEngine
    """The train engine, which holds the weights that are trained."""
    setup: RolloutSetup
    """The setup with which the team's episodes are rolled out."""
    acting: RolloutSetup
    """The setup with which the episodes of the training loop are rolled out: by the team, or by a teacher that gives
    demonstrations."""
    loop: Loop
    closing: ExitStack
    """A stack that closes the engines that were built for the run."""


def load_pieces(
    prepared: PreparedRun,
    rollout_engine: RolloutEngine | None,
    start_from: Mapping[str, Path],
    warmup: ReportStep,
    say: Callable[[str, str], None],
    ranks: Ranks = ALONE,
    run_dir: Path | None = None,
) -> Pieces:
    """Create the base models of the recipe, load all models, and build the engines and the training loop.

    The argument `rollout_engine` replaces the rollout engine of the recipe; the caller closes it. The argument `start_from`
    maps policies to the folders of their initial weights, which are also the weights of their references. Features may store
    files in `run_dir`. The function `warmup` is called at every step of the warm-up, and `say` at every phase. All `ranks`
    load all models; the first rank creates the bases for all ranks.
    """
    config, algorithm, team = prepared.config, prepared.algorithm, prepared.team
    if not rollout_engine:
        check_endpoints(team, config.environment)

    held: dict[str, LanguageModel] = {}
    bases = first_then_others(ranks, "warm-up", lambda: bases_of(config, team, warmup, say, held))
    warmed = prepared.on_bases(bases, held)
    say("loading", ", ".join(dict.fromkeys(team.bases.values())))
    cluster = next((begin for variable, begin in CLUSTERS.items() if variable in os.environ), None)
    here = warmed.team
    if cluster is not None and rollout_engine is None and config.ray.scoring_workers:
        here, _ = split_scored(here)
    models = replace(warmed, team=here).load()
    hashes = {base: hash_of_base(model) for base, model in models.items()}
    check_same(
        ranks, "loading", {f"the content of '{team.bases[base]}'": found for base, found in hashes.items()}
    )
    engine = build_train_engine(config, algorithm, here, models, ranks)
    with ExitStack() as failing:
        failing.callback(engine.close)
        check_abilities(engine, train_protocol.ABILITIES)

        # Weights of other runs: the verifier of rewards, past policies, and the start of training.
        verifier = algorithm.need(VerifierScores)
        for name, folder in verifier.folders.items() if verifier else ():
            if name in here.critics:
                load_verifier(Path(folder), here.critics[name], models, engine, hashes)
        past = {policy.name: Path(policy.past) for policy in here.every.values() if policy.past}
        load_policies(past, team, engine.weights, engine.load_weights, hashes)
        if start_from:
            load_policies(start_from, team, engine.weights, engine.load_weights, hashes)
            if algorithm.need(ReferenceLogProbs) is not None:
                engine.refresh_references()

        # The rollout engine is the one that was passed, that of a cluster, or the recipe's.
        player, hold = rollout_engine, HeldHere
        learners: Learners | None = None
        if rollout_engine is None:
            if cluster is not None:
                begin = find_object(cluster, "cluster")
                player, hold, learners, hashes = begin(warmed, hashes, models, engine, ranks, failing)
            if learners is not None:
                scored = split_scored(team)[1]
                names = ", ".join([*scored.critics, *scored.beside])
                say("scoring", f"{names}: in {config.ray.scoring_workers} scoring workers")
            player = player or build_engine(config, models, team)
            failing.callback(player.close)
        assert player is not None
        check_abilities(player, rollout_protocol.ABILITIES)
        for note in notes_of(player):
            say("engine", note)
        setup = acting = replace(
            make_rollout_setup(config, team, player, ranks, hold),
            first_failures=FirstFailures(config.training.max_failed_share),
        )
        failing.callback(setup.close)
        if not algorithm.collects_episodes:
            acting = replace(setup, engine=teacher(config, team, models))
        for mode in find_object(SANDBOX_MODES, "sandbox")():
            say("sandbox", mode)
        failing.enter_context(on_environment_change(lambda line: say("environment", line)))
        if offers(config.environment, DrivenByPrograms):
            failing.enter_context(config.environment.serve(setup, say))

        run = StartedRun(
            config,
            algorithm,
            team,
            models,
            hashes,
            engine,
            learners or engine,
            setup,
            run_dir,
            (setup.engine,),
        )
        own_engine = rollout_engine is not None
        rollouts = make_rollouts(run, acting, warmed, failing, own_engine=own_engine)
        features = started(replace(run, players=rollouts.players))
        loop = Loop(config, algorithm, acting, engine, rollouts, learners, features)
        loop.publish()
        closing = failing.pop_all()
    return Pieces(team, models, hashes, engine, setup, acting, loop, closing)


# -------- Ranks

WAITING = 1800.0
"""The maximum time in seconds for which a rank waits for other ranks if the train engine has no `timeout`."""


def join_ranks(config: RunConfig) -> Ranks:
    """Join the processes that a launcher has started together with this process, and return them.

    Return `ALONE` if there is no launcher.
    """
    if launched_rank() is None:
        return ALONE
    from kapelle.runtime.rank_group import ranks_here

    return ranks_here(float(getattr(config.train_engine, "timeout", WAITING)))


def check_same_run(ranks: Ranks, config: RunConfig, team: Team, began_from: Mapping[str, Path]) -> None:
    """Raise ConfigError in every rank if ranks differ in settings, data, weights or versions, or if the run needs a single process."""
    if ranks.size == 1:
        return
    if offers(config.environment, DrivenByPrograms):
        config.environment.check_server(ranks.size)
    own = {f"`{key}`": value for key, value in leaves(config.model_dump(mode="json"), "")}
    for kind, found in provenance_of(config, team, began_from).items():
        if kind != "machine":
            own |= {
                f"{kind[:-1] if kind == 'versions' else kind} of {name}": value
                for name, value in found.items()
            }
    check_same(ranks, "start", own)
