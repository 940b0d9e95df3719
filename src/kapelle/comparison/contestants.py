"""Finds the players of an arena by name, checks them before anything is loaded, and then keeps all of them in memory.

Adapters on the same base model are held in one bank, so that two runs of the same recipe are sampled in one batch. If
there are different base models, all of them are loaded.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle import environments
from kapelle.environment import Answerable, Environment, HasPlayers, Mixed, environment_class, offers
from kapelle.errors import CheckpointError, ConfigError, KapelleError, did_you_mean
from kapelle.runs.named_checkpoint import named_checkpoint, policy_folder, split_run
from kapelle.runs.reader import is_run, read_latest
from kapelle.runtime.files import step_of
from kapelle.runtime.plugins import known_names
from kapelle.settings.feature import without_features
from kapelle.setup.bases import BASE
from kapelle.setup.feature import bases_of
from kapelle.setup.recipe import builtin_recipes, lay_over, load_recipe
from kapelle.setup.team_builder import agent_configs, build_algorithm, build_team
from kapelle.team import Agent, Endpoint, Place, Policy, Team
from kapelle.types import Json

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel
    from kapelle.rollout.evaluation.arena import Contestant
    from kapelle.rollout.setup import RolloutSetup
    from kapelle.settings.schema import RunConfig

MAX_TOKENS = 512
"""The default for the maximum number of tokens of a move, for a model without a recipe."""
MOST_PLAYERS = 10
WORDS = ("wording", "view", "rules", "thinking", "list_moves")
"""The settings of a game that change its text. A run expects the values with which it was trained."""
SETTABLE = ("environment.", "workflow.", "team.sampling.", "episode.", "engine.", "model.")
"""The sections with settings of the game and of sampling. Settings of the players cannot be changed."""
_NAMED = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.@ -]*)=(.+)", re.DOTALL)
_MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class Entry:
    """A named player that has been checked but not loaded."""

    label: str
    identity: str
    """A string that identifies the player. A player with the same name but different weights has a different identity."""
    about: Mapping[str, Json]
    """Facts about the player: the given name (`player`), the `kind` and, for a run, the name of its folder (`run`) and the `step`."""
    run: RunConfig | None = None
    checkpoint: Path | None = None
    model: str = ""
    endpoint: Endpoint | None = None
    player: str = ""
    """The name of a built-in player of the environment; empty for other players."""


@dataclass(frozen=True, slots=True)
class Entries:
    """All players of an arena, and the game that they play."""

    players: tuple[Entry, ...]
    config: RunConfig
    """The environment, workflow, engine and sampling settings of the arena."""
    names: tuple[str, ...]
    """The names of the roles."""
    game: str
    """The name of the game."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """All players of an arena in memory."""

    setup: RolloutSetup
    """The engine, environment and workflow. The team in this setup holds all policies."""
    contestants: Mapping[str, Contestant]


def enter(words: Sequence[str], environment: str | None, settings: Sequence[str]) -> Entries:
    """Return the players and their game. Raises the first error before anything is loaded."""
    for setting in settings:
        if not setting.startswith(SETTABLE):
            raise ConfigError(
                f"'{setting}' cannot be set in an arena. Use keys of {', '.join(each.rstrip('.') for each in SETTABLE)}."
            )
    if len(words) < 2:
        raise ConfigError(
            "An arena needs at least two players, for example `kapelle arena runs/mine nash --environment kuhn_poker`."
        )
    named = [_split(word) for word in words]
    twice = [label for label, count in Counter(label for label, _ in named).items() if count > 1]
    if twice:
        raise ConfigError(f"Two players are called '{twice[0]}'. Give one of them a name: NAME=PLAYER.")
    runs: dict[str, tuple[RunConfig, Path]] = {}
    from kapelle.training.provenance import config_of_run

    for label, word in named:
        if is_run(split_run(word)[0]):
            folder, which = split_run(word)
            checkpoint = named_checkpoint(folder, which) or read_latest(folder)
            if checkpoint is None:
                raise CheckpointError(f"{folder} has no complete checkpoint yet. Train it first.")
            runs[label] = config_of_run(folder), checkpoint
        else:
            _check_there(word)
    config = _config(environment, settings, [run for run, _ in runs.values()])
    names = _role_names(config)
    entries, notes = [], []
    for label, word in named:
        if label in runs:
            entry, remarks = _run_entry(label, word, *runs[label], config.environment, names)
            notes += remarks
        else:
            entry = _other_entry(label, word, config.environment)
        entries.append(entry)
    return Entries(tuple(entries), config, names, _game(config.environment), tuple(notes))


def _split(word: str) -> tuple[str, str]:
    """Split a word into the label of a player and the player."""
    named = _NAMED.fullmatch(word)
    if named is not None and "(" not in named[1]:
        section, dot, _ = named[1].partition(".")
        meant = did_you_mean(section, [each.partition(".")[0] for each in SETTABLE]) if dot else ""
        if meant:
            raise ConfigError(
                f"'{word}' looks like a setting, but its section is unknown.{meant} If it is a player's name, "
                "it cannot contain a dot."
            )
        return named[1], named[2]
    if word.startswith(("http://", "https://")):
        return word.partition("#")[2] or word, word
    path, which = split_run(word) if is_run(split_run(word)[0]) else (Path(word), None)
    is_path = "/" in word or path.exists()
    return (f"{path.name}@{which}" if which else path.name) if is_path else word, word


def _check_there(word: str) -> None:
    """Raise ConfigError for a word that looks like a run but is not a run."""
    folder, path = split_run(word)[0], Path(word)
    model = any((path / file).is_file() for file in _MODEL_FILES)
    if model or "://" in word or not (path.is_dir() or "@" in word or ("/" in word and path.parent.is_dir())):
        return
    meant = did_you_mean(folder.name, [each.name for each in folder.parent.glob("*") if is_run(each)])
    raise ConfigError(f"'{word}' is not a run: {folder} has no config.yaml.{meant}")


def _run_entry(
    label: str, word: str, run: RunConfig, checkpoint: Path, environment: Environment, names: Sequence[str]
) -> tuple[Entry, list[str]]:
    """Return the entry of a run, with notes about the run. Raises ConfigError if the run was trained on another game."""
    own = run.environment
    same = [part for part in (own, *_parts(own)) if _game(part) == _game(environment)]
    if not same:
        raise ConfigError(
            f"'{label}' was trained on {_game(own)}, but the arena plays {_game(environment)}. Remove the "
            "player, or set the arena's game to this one with --environment."
        )
    count = len(agent_configs(run.team))
    if count not in {1, len(names)}:
        raise ConfigError(
            f"'{label}' is a team of {count} agents, but {_game(environment)} has {len(names)} roles. Choose a run with 1 agent "
            f"or {len(names)}."
        )
    step = step_of(checkpoint) or 0
    for name, policy in _team(run).policies.items():
        if policy.trained and not policy_folder(checkpoint, name).is_dir():
            raise CheckpointError(
                f"{checkpoint} contains no weights of the policy '{name}'. Choose another checkpoint of the run."
            )
    words = _words(same[0])
    wrong = {key: value for key, value in words.items() if _words(environment).get(key) != value}
    notes = []
    if wrong:
        settings = ", ".join(f"environment.{key}={json.dumps(value)}" for key, value in wrong.items())
        notes.append(f"{label} was trained with different text settings of the game ({settings})")
    about = {"player": word, "kind": "run", "run": checkpoint.absolute().parents[1].name, "step": step}
    content = blake2b((checkpoint / "manifest.json").read_bytes(), digest_size=8).hexdigest()
    return Entry(label, f"step {step} of a run ({content})", about, run=run, checkpoint=checkpoint), notes


def _other_entry(label: str, word: str, environment: Environment) -> Entry:
    """Return the entry of a model, an endpoint or a player of the environment. Raises ConfigError for any other word."""
    if word.startswith(("http://", "https://")):
        url, _, model = word.partition("#")
        if not model:
            raise ConfigError(f"'{word}' contains no model name. Write {word.rstrip('/')}#MODEL.")
        return Entry(
            label, word, {"player": word, "kind": "endpoint"}, endpoint=Endpoint(url.rstrip("/"), model)
        )
    path = Path(word)
    if word == "embedded" or any((path / file).is_file() for file in _MODEL_FILES):
        from kapelle.models.adapters import base_and_adapter

        own, adapter = base_and_adapter(word)  # raises an error if an adapter does not name its base model
        about: dict[str, Json] = {"player": word, "kind": "model"}
        contents = [
            _content(Path(each)) for each in (own, adapter) if each is not None and Path(each).is_dir()
        ]
        return Entry(label, " ".join([word, *contents]), about, model=word)
    if len(path.parts) == 2 or word.startswith("modelscope:"):
        return Entry(label, word, {"player": word, "kind": "model"}, model=word)
    if not offers(environment, HasPlayers):
        raise ConfigError(
            f"'{word}' is neither a run nor a model, and {_game(environment)} has no built-in players."
        )
    environment.check_player(word)
    return Entry(label, word, {"player": word, "kind": "environment"}, player=word)


def _content(folder: Path) -> str:
    """Return a digest of the folder of a model or adapter, which detects that the weights have changed under the same name."""
    digest = blake2b(digest_size=8)
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            with file.open("rb") as read:
                while part := read.read(1 << 20):
                    digest.update(part)
    return digest.hexdigest()


# -------- The game


def config_of_game(name: str, settings: Sequence[str], words: Mapping[str, Json] | None = None) -> RunConfig:
    """Return the settings for the named environment, recipe or OpenSpiel game.

    The argument `words` contains the text settings of an OpenSpiel game, over which `settings` take precedence. Raises
    ConfigError for an unknown name.
    """
    if name in builtin_recipes() or name.endswith((".yaml", ".yml")):
        return load_recipe(name, (), tuple(settings)).config
    values: dict[str, Any] = {"name": "openspiel", "game": name}
    known = known_names("environment", environments.BUILTIN)
    if name in known or ":" in name:
        values = {"name": name}
    else:
        from kapelle.environments.openspiel.games import load_game

        try:
            load_game(name, {})
        except KapelleError as error:
            hint = did_you_mean(name, [*known, *builtin_recipes()])
            unknown = f"'{name}' is not an environment, recipe or run directory"
            if isinstance(error.__cause__, ImportError) and "Did you mean" not in hint:
                raise ConfigError(f"{error} Without its games, {unknown}.") from error
            raise ConfigError(f"{unknown}.{hint} As a game: {error}") from error
    if values["name"] == "openspiel":
        values |= words or {}
    workflow = "solo" if issubclass(environment_class(values["name"]), Answerable) else "play"
    whole = {
        "team": {"sampling": {"max_tokens": MAX_TOKENS}},
        "environment": values,
        "workflow": {"name": workflow},
        "algorithm": {"name": "grpo"},
    }
    return lay_over([("kapelle play", whole)], tuple(settings)).config


def _config(name: str | None, settings: Sequence[str], runs: Sequence[RunConfig]) -> RunConfig:
    """Return the settings of the named game, or by default of the game of the first run, without opponents."""
    if name is not None:
        config = config_of_game(name, settings)
        game = _game(config.environment)
        # Use the text settings with which the first run of this game was trained.
        texts = [_words(part) for run in runs for part in _parts(run.environment) if _game(part) == game]
        if texts:
            config = config_of_game(name, settings, texts[0])
    elif runs:
        from kapelle.settings.overlays import parse_yaml
        from kapelle.setup.recipe import to_yaml

        config = lay_over([("run", parse_yaml(to_yaml(runs[0])))], tuple(settings)).config
    else:
        raise ConfigError("Set --environment to the game, because no player is a run.")
    from kapelle.environments.openspiel.environment import OpenSpiel

    if isinstance(config.environment, OpenSpiel) and config.environment.opponents:
        free = OpenSpiel.model_validate({**config.environment.model_dump(), "opponents": {}})
        config = config.model_copy(update={"environment": free})
    return config


def _role_names(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the roles.

    The names are the agents of the recipe or run if they fit, and otherwise as many player names as the game needs.
    """
    own = tuple(slot.name for slot in agent_configs(config.team))
    reasons = []
    for names in (own, *(tuple(f"player_{k + 1}" for k in range(n)) for n in range(2, MOST_PLAYERS + 1))):
        if len(names) < 2:
            continue
        try:
            config.environment.check(names)
        except ConfigError as error:
            reasons.append(error)
        else:
            return names
    raise ConfigError(
        f"{_game(config.environment)} cannot be played in an arena, which needs at least two roles: {reasons[0] if reasons else 'it has one.'}"
    )


def _parts(environment: Environment) -> list[Environment]:
    return list(environment.members.values()) if offers(environment, Mixed) else [environment]


def _game(environment: Environment) -> str:
    """Return a name for the game of an environment; different games have different names."""
    from kapelle.environments.openspiel.environment import OpenSpiel

    if isinstance(environment, OpenSpiel):
        return str(environment.loaded)
    return f"{environment.name} ({environment.sources['test']})"


def _words(environment: Environment) -> dict[str, Json]:
    from kapelle.environments.openspiel.environment import OpenSpiel

    return (
        environment.model_dump(mode="json", include=set(WORDS)) if isinstance(environment, OpenSpiel) else {}
    )


# -------- The players in memory


def _team(run: RunConfig) -> Team:
    """Return the team of a run without the parts that are needed only for training."""
    plain = without_features(run).model_copy(update={"start_from": {}})
    return build_team(plain, replace(build_algorithm(plain), needs=()))


def load(entries: Entries, report: Callable[[str], None]) -> Loaded:
    """Load each base model once, load all its adapters into its bank, and return the players."""
    from kapelle.rollout.evaluation.arena import Contestant
    from kapelle.rollout.setup import make_rollout_setup
    from kapelle.setup.model_loading import build_engine, load_models, load_weights
    from kapelle.setup.servers import check_endpoints

    config = entries.config
    held: dict[str, LanguageModel] = {}
    teams: dict[str, Team] = {}
    folders: dict[str, Path] = {}
    for entry in entries.players:
        if entry.run is not None:
            teams[entry.label] = _of_run(entry, held, folders, report)
        elif not entry.player:
            teams[entry.label] = _of_model(entry, config)
    policies = {name: policy for team in teams.values() for name, policy in team.policies.items()}
    if not policies:
        whole = Team.alone(Agent("nobody"), Policy("nobody", ""))
        # The environment's players take all roles.
        from kapelle.engines.rollout.scripted import ScriptedEngine

        engine: Any = ScriptedEngine({})
        return Loaded(
            make_rollout_setup(config, whole, engine),
            {e.label: Contestant(e.label, player=e.player) for e in entries.players},
        )
    whole = Team(
        tuple(Agent(name) for name in policies),
        policies,
        {name: name for name in policies},
        {base: path for team in teams.values() for base, path in team.bases.items()},
        places={base: place for team in teams.values() for base, place in team.places.items()},
    )
    check_endpoints(whole, config.environment)
    report(f"loading {', '.join(dict.fromkeys(whole.bases.values())) or 'no model'}")
    models = load_models(whole, config.model, held)
    weights = load_weights(whole, models, folders, config.seed)
    engine = build_engine(config, models, whole)
    for name, policy in policies.items():
        if policy.endpoint is None and (policy.lora is not None or policy.trained):
            engine.load(name, weights(name), 0)
    contestants = {
        entry.label: Contestant(entry.label, teams.get(entry.label), entry.player)
        for entry in entries.players
    }
    return Loaded(make_rollout_setup(config, whole, engine), contestants)


def _of_run(
    entry: Entry, held: dict[str, LanguageModel], folders: dict[str, Path], report: Callable[[str], None]
) -> Team:
    """Return the team of a run with unique names for policies and base models, and add its weights to `folders`."""
    assert entry.run is not None, "a run's entry"
    assert entry.checkpoint is not None, "a run's entry"

    run, team = entry.run, _team(entry.run)
    paths = bases_of(
        run, team, lambda *_: None, lambda name, detail: report(f"{entry.label}: {name} {detail}"), held
    )
    policies, bases, places = dict[str, Policy](), dict[str, str](), dict[str, Place]()
    for name, policy in team.policies.items():
        own = f"{entry.label}:{name}"
        whole = policy.trained and policy.lora is None
        base = ""
        if policy.endpoint is None:
            place = team.places.get(policy.base, Place(run.model.dtype, run.model.device))
            path = paths[policy.base]
            # All adapters on a base model share one model in memory; fully trained weights have their own model.
            base = f"own:{own}" if whole else f"{path} {place.dtype} {place.device}"
            bases[base], places[base] = path, place
        policies[own] = replace(policy, name=own, base=base, trained=whole)
        if policy.trained:
            folders[own] = policy_folder(entry.checkpoint, name)
    renamed = {agent: f"{entry.label}:{name}" for agent, name in team.policy_of.items()}
    turns = {
        agent: tuple(f"{entry.label}:{each}" for each in listed) for agent, listed in team.turns_of.items()
    }
    return Team(team.agents, policies, renamed, bases, turns_of=turns, places=places)


def _of_model(entry: Entry, config: RunConfig) -> Team:
    """Return a team of one agent that uses a model or an endpoint. The agent can take any role."""
    from kapelle.models.adapters import base_and_adapter, read_lora

    agent = Agent(entry.label, sampling=config.team.sampling.build())
    name = f"{entry.label}:{BASE}"
    if entry.endpoint is not None:
        policy = Policy(name, base="", trained=False, endpoint=entry.endpoint)
        return Team.alone(agent, policy)
    path, adapter = base_and_adapter(entry.model)
    place = Place(config.model.dtype, config.model.device)
    base = f"{path} {place.dtype} {place.device}"
    lora = None if adapter is None else read_lora(Path(adapter))
    policy = Policy(name, base, lora, trained=False, past=adapter)
    return replace(Team.alone(agent, policy, {base: path}), places={base: place})
