"""How a run starts: load its pieces, set the weights that it starts from.

pieces = load_pieces(prepared, …)          warm up, load models, adapters and verifier
begin_with(start_from, pieces, …)          weights that training starts from
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kapelle.algorithm import Algorithm
from kapelle.cluster.placement import placement_here
from kapelle.cluster.ray_workers import players_on
from kapelle.engines.rollout.protocol import Interruptible, RolloutEngine, notes_of
from kapelle.engines.train.protocol import TrainEngine
from kapelle.environments.elsewhere import told_of_changes
from kapelle.environments.external import External
from kapelle.errors import ConfigError
from kapelle.models.language_model import LanguageModel
from kapelle.models.weights import hash_of_base
from kapelle.rollout.play import Play, make_play
from kapelle.rollout.workers.pool import HeldHere, Hold
from kapelle.runs.checkpoint_contents import load_policies, load_verifier
from kapelle.runtime.ranks import ALONE, Ranks, broadcast, check_same, first_then_others, launched_rank
from kapelle.runtime.trees import leaves
from kapelle.sandbox.pool import modes_required
from kapelle.services.policy.outside import serve_outside
from kapelle.settings.schema import RunConfig
from kapelle.setup.model_loading import build_engine, build_train_engine, teacher
from kapelle.setup.preparation import Prepared, check_endpoints
from kapelle.signals.reference import ReferenceLogProbs
from kapelle.signals.verifier import VerifierScores
from kapelle.team import VERIFIER, Team
from kapelle.training.loop import Loop
from kapelle.training.observer import Silent
from kapelle.training.provenance import provenance_of
from kapelle.training.records import Records
from kapelle.training.sampling_process import SamplingProcess
from kapelle.training.warmup import ReportStep, origin_notes, warmed_bases


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a run, weights in memory."""

    team: Team
    models: Mapping[str, LanguageModel]
    """By base name."""
    base_hashes: Mapping[str, str]
    """Base name → hash of the base weights under adapters."""
    engine: TrainEngine
    """Holds what learns."""
    play: Play
    """How the team plays."""
    acting: Play
    """How the loop's episodes are played: by the team, or by a teacher in its place."""
    loop: Loop
    closing: ExitStack
    """Closes the engines that the run has built itself."""


def load_pieces(
    prepared: Prepared,
    rollout_engine: RolloutEngine | None,
    warmup: ReportStep,
    say: Callable[[str, str], None],
    ranks: Ranks = ALONE,
) -> Pieces:
    """Warm up the base if the recipe does, load all models and build the engines and the loop.

    `rollout_engine` replaces the recipe's; the caller closes it. `warmup` is called at every step of the warm-up, `say`
    at every phase. Of several `ranks`, which all load everything, the first one warms up for all.
    """
    config, algorithm, team = prepared.config, prepared.algorithm, prepared.team
    if not rollout_engine:
        check_endpoints(team, config.environment)
    warmed = _warmed(prepared, warmup, say, ranks)
    say("loading", ", ".join(dict.fromkeys(team.bases.values())))
    models = warmed.load()
    hashes = {base: hash_of_base(model) for base, model in models.items()}
    check_same(
        ranks, "loading", {f"the content of '{team.bases[base]}'": found for base, found in hashes.items()}
    )
    engine = build_train_engine(config, algorithm, warmed.team, models, ranks)
    with ExitStack() as failing:
        failing.callback(engine.close)
        _load_saved(algorithm, team, models, engine, hashes)
        player = rollout_engine
        hold: Hold = HeldHere
        placed = placement_here()
        if placed is not None and rollout_engine is None:
            if placed.bundles.rollout:
                _check_apart(warmed, None)
            player, hold = players_on(placed, config, warmed.team, hashes, models, engine, failing)
        player = player or build_engine(config, models, team)
        if rollout_engine is None:
            failing.callback(player.close)
        for note in notes_of(player):
            say("engine", note)
        if config.training.partial_rollouts:
            _check_partial(player, ranks)
        play = acting = make_play(config, team, player, ranks, hold)
        failing.callback(play.close)
        if not algorithm.plays:
            acting = replace(play, engine=teacher(config, team, models))
        sampler = None
        for mode in modes_required():
            say("sandbox", mode)
        failing.enter_context(told_of_changes(lambda line: say("environment", line)))
        if isinstance(config.environment, External):
            failing.enter_context(serve_outside(config.environment, play, say))
        if config.training.overlap and algorithm.plays:
            _check_apart(warmed, rollout_engine)
            sampler = SamplingProcess(config, team, warmed.team.bases, hashes, engine)
            failing.callback(sampler.close)
        loop = Loop(config, algorithm, acting, engine, player=play.engine, sampler=sampler)
        loop.publish()
        closing = failing.pop_all()
    return Pieces(team, models, hashes, engine, play, acting, loop, closing)


def _warmed(
    prepared: Prepared, warmup: ReportStep, say: Callable[[str, str], None], ranks: Ranks
) -> Prepared:
    """Return what is prepared, on warmed-up bases where the recipe asks for them."""
    config, team = prepared.config, prepared.team
    held: dict[str, LanguageModel] = {}
    bases = first_then_others(ranks, "warm-up", lambda: warmed_bases(config, team, warmup, say, held))
    for note in origin_notes(path for base, path in bases.items() if path != team.bases[base]):
        say("cache", note)
    return prepared.on_bases(bases, held)


def _load_saved(
    algorithm: Algorithm,
    team: Team,
    models: Mapping[str, LanguageModel],
    engine: TrainEngine,
    hashes: Mapping[str, str],
) -> None:
    """Load what other runs have saved: the verifier that pays, and past policies."""
    verifier = algorithm.need(VerifierScores)
    if verifier is not None:
        load_verifier(Path(verifier.folder), team.critics[VERIFIER], models, engine)
    past = {policy.name: Path(policy.past) for policy in team.every.values() if policy.past}
    load_policies(past, team, engine, hashes)


def _check_partial(player: RolloutEngine, ranks: Ranks) -> None:
    """Refuse `training.partial_rollouts` where nobody could agree on the moment, or hand out what was sampled."""
    reason = None
    if ranks.size > 1:
        reason = f"{ranks.size} processes, which share the sampling, would each end the step at another moment. Use one process"
    elif not isinstance(player, Interruptible):
        reason = f"the engine {type(player).__name__} cannot hand out what it has sampled so far. Let it be `Interruptible`"
    if reason is not None:
        raise ConfigError(
            f"`training.partial_rollouts` leaves episodes unfinished, but {reason}, or set it to 0."
        )


def _check_apart(prepared: Prepared, rollout_engine: RolloutEngine | None) -> None:
    """Refuse `training.overlap` for what another process cannot build for itself."""
    held = [path for path in prepared.team.bases.values() if path in prepared.given]
    if rollout_engine is None and not held:
        return
    what = f"the model '{held[0]}' is in this one's memory" if held else "a rollout engine was passed to it"
    raise ConfigError(
        f"`training.overlap` samples in another process, which reads models from the disk, but {what}. Save it and name "
        "its folder as `model.path`, or set `training.overlap: false`."
        if held
        else f"`training.overlap` samples in another process, but {what}. Name the engine in the recipe (`engine`), or "
        "set `training.overlap: false`."
    )


def begin_with(folders: Mapping[str, Path], pieces: Pieces, algorithm: Algorithm) -> None:
    """Load the weights of folders into policies (by name); they are their references from now on."""
    load_policies(folders, pieces.team, pieces.engine, pieces.base_hashes)
    if algorithm.need(ReferenceLogProbs) is not None:
        pieces.engine.refresh_references()
    pieces.loop.publish()


# -------- How the ranks of a run begin: they join, find out that all run the same, and the first one opens the records

WAITING = 1800.0
"""Seconds for which a rank waits for the others where the train engine has no `timeout`."""


def join_ranks(config: RunConfig) -> Ranks:
    """Return the processes that a launcher has started with this one, joined; `ALONE` without a launcher."""
    if launched_rank() is None:
        return ALONE
    from kapelle.runtime.rank_group import ranks_here

    return ranks_here(float(getattr(config.train_engine, "timeout", WAITING)))


def check_same_run(ranks: Ranks, config: RunConfig, team: Team, began_from: Mapping[str, Path]) -> None:
    """Raise ConfigError in every rank unless all have the same settings, data, weights and versions.

    Also for settings that need a single process.
    """
    if ranks.size == 1:
        return
    _refuse_what_one_process_does(ranks, config)
    own = {f"`{key}`": value for key, value in leaves(config.model_dump(mode="json"), "")}
    for kind, found in provenance_of(config, team, began_from).items():
        if kind != "machine":
            own |= {
                f"{kind[:-1] if kind == 'versions' else kind} of {name}": value
                for name, value in found.items()
            }
    check_same(ranks, "start", own)


def _refuse_what_one_process_does(ranks: Ranks, config: RunConfig) -> None:
    training, environment = config.training, config.environment
    if training.overlap:
        raise ConfigError(
            f"`training.overlap` samples in a second process, but {ranks.size} processes share the sampling already. Set "
            "`training.overlap: false`."
        )
    if training.partial_rollouts:
        raise ConfigError(
            f"`training.partial_rollouts` leaves groups to the next step when enough others are done, which none of {ranks.size} "
            "processes knows of the others'. Set `training.partial_rollouts: 0`, or train in one process."
        )
    if isinstance(environment, External) and not environment.command:
        raise ConfigError(
            f"`environment.name: external` without a `command` waits for programs that call one server, but each of {ranks.size} "
            "processes serves its own episodes. Name the program in `environment.command`, or train in one process."
        )
    if isinstance(environment, External) and environment.port:
        raise ConfigError(
            f"`environment.port` is {environment.port}, but each of {ranks.size} processes serves its own episodes on a port of "
            "its own. Set `environment.port: 0`."
        )


def of_the_first(ranks: Ranks, opened: Callable[[], Records]) -> Records:
    """Return the records of a run; those of all ranks but the first record nothing."""
    held: list[Records] = []
    broadcast(ranks, "records", lambda: held.append(opened()))
    return held[0] if held else Records(None, Silent())
