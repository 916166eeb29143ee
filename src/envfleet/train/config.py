# ruff: noqa: RUF009 - `_env` and `_train` are `dataclasses.field` with a text
"""`PPOConfig`: every setting of a training run, documented once; the command's help and the YAML schema come from it."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from envfleet.core.fleet_options import BackendName, StartMethod
from envfleet.errors import BadArgument
from envfleet.multiagent.policy_map import read_policies
from envfleet.networks.actor_critic import NetworkConfig
from envfleet.slots.factories import env_name
from envfleet.train.objective import Coefficients
from envfleet.train.presets import preset_for


def _doc(section: str, default: Any, text: str, cli: bool = True, may_change: bool = False) -> Any:
    """Declare a field: the YAML section it belongs to, its default, and the one text that explains it.

    A resumed run `may_change` what does not touch the meaning of the stored state.
    """
    metadata = {"section": section, "help": text, "cli": cli, "may_change": may_change}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_env, _train = partial(_doc, "env"), partial(_doc, "train")
_where, _run = partial(_env, may_change=True), partial(_train, may_change=True)
Schedule = Literal["constant", "linear"]


def default_of(spec: dataclasses.Field[Any]) -> Any:
    """The default of a setting."""
    if spec.default is not dataclasses.MISSING:
        return spec.default
    assert spec.default_factory is not dataclasses.MISSING
    return spec.default_factory()


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """All settings of a PPO run. Frozen: what is derived from the settings is a property or a method.

    Settings that are not given come from the preset for the environment, then from the defaults; `preset="none"` uses no
    preset. Given settings always win.

    Example:
        >>> config = PPOConfig(env="CartPole-v1", num_envs=8, total_steps=100_000, seed=1)
        >>> config.steps_per_update, config.num_updates, config.gamma
        (256, 391, 0.98)
        >>> PPOConfig(env="CartPole-v1", preset="none").gamma
        0.99
    """

    # -- environment -----------------------------------------------------------------------------------------------
    env: Any = _env("CartPole-v1", 'Gymnasium id, short name (tmaze, catch, …), "module:attribute", or in Python a callable')
    env_kwargs: dict[str, Any] = _env({}, "keyword arguments for the environment, as name=value pairs")
    num_envs: int = _env(1, "environments stepped together; 1 is sequential")
    backend: BackendName = _where("auto", "where environments run: auto, serial, thread, aio, pipe, shm, native or ray")
    num_workers: int | None = _where(None, "worker processes or threads; default: chosen from the CPUs")
    start_method: StartMethod | None = _where(
        None, "forkserver, spawn or fork for process workers; implies backend shm when that is auto"
    )
    ray_address: str | None = _where(None, "for backend ray: the cluster, auto or HOST:PORT, where ray.init was not called")
    ray_resources: dict[str, Any] = _where(
        {}, "for backend ray: what each worker needs, e.g. num_cpus=0.5,num_gpus=1; default: one CPU"
    )
    ray_transport: Literal["stream", "call"] | None = _where(
        None, "for backend ray: stream (a connection to each worker, the default) or call, where only Ray's own ports are open"
    )
    on_fault: Literal["raise", "restart"] = _where(
        "restart",
        "an environment that fails: restart it (its rows are not learned from; after three in a row its slot is quarantined), or raise and stop",
    )
    init_timeout_s: float = _where(120.0, "seconds that making an environment may take")
    reset_timeout_s: float = _where(60.0, "seconds that a reset may take")
    step_timeout_s: float = _where(60.0, "seconds that a step may take; one that takes longer is a fault")
    env_type: Literal["plain", "meta"] = _env("plain", "plain, or meta: a family of tasks, a task for every episode")
    episodes_per_task: int = _env(1, "meta: inner episodes of a task, which together are one episode of the run")
    oracle: bool = _env(False, "meta: the observation tells the task")
    num_train_tasks: int | None = _env(None, "meta: training tasks, drawn once; default: any task of the family")
    num_eval_tasks: int = _env(0, "meta: tasks that only evaluation uses")
    columns: dict[str, Any] = _where(
        {}, "in Python: declared info columns, name -> space (`action_mask` masks actions)", cli=False
    )
    # -- how long --------------------------------------------------------------------------------------------------
    total_steps: int = _run(100_000, "environment steps to train for, over all environments together")
    num_episodes: int | None = _run(
        None, "stop after this many episodes instead of total_steps, which then only sets the pace of the schedules"
    )
    seed: int = _train(1, "seed of the run: networks, exploration, minibatches and every episode")
    # -- PPO -------------------------------------------------------------------------------------------------------
    num_steps: int = _train(128, "steps of each environment per update")
    num_rollouts_per_iter: int | None = _train(None, "meta: episodes per update, for families of fixed length; sets num_steps")
    curriculum: Literal["uniform", "levels", "learning_progress", "sfl", "plr", "robust_plr", "alp_gmm"] = _train(
        "uniform", "meta: which task comes next: uniform, levels, learning_progress, sfl, plr, robust_plr or alp_gmm"
    )
    success_return: float | None = _train(
        None, "meta: an episode with this return is a success for the curriculum; default: above 0"
    )
    num_epochs: int = _train(4, "passes over the collected steps per update")
    num_minibatches: int = _train(4, "minibatches per pass")
    learning_rate: float = _train(2.5e-4, "step size of Adam at the beginning")
    lr_schedule: Schedule = _train("linear", "learning rate over the run: constant or linear to 0")
    clip: float = _train(0.2, "clip range of the probability ratio at the beginning")
    clip_schedule: Schedule = _train("constant", "clip range over the run: constant or linear to 0")
    entropy: float = _train(0.0, "weight of the entropy bonus at the beginning")
    entropy_final: float | None = _train(None, "weight of the entropy bonus at the end, reached linearly; default: the same")
    gamma: float = _train(0.99, "discount")
    gae_lambda: float = _train(0.95, "lambda of the advantage estimate")
    value_coef: float = _train(0.5, "weight of the value loss")
    value_clip: float | None = _train(None, "clip range of the value function; default: not clipped")
    max_grad_norm: float = _train(0.5, "gradients are clipped to this norm")
    target_kl: float | None = _train(None, "stop the epochs of an update once the policy moved 1.5 times this far")
    normalize_advantage: bool = _train(True, "standardise advantages in every minibatch")
    normalize_obs: bool = _train(False, "scale flat observations to mean 0 and variance 1 by running statistics")
    normalize_reward: bool = _train(False, "divide rewards by the running standard deviation of the return")
    adam_eps: float = _train(1e-5, "epsilon of Adam")
    # -- network ---------------------------------------------------------------------------------------------------
    arch: Literal["markov", "memory", "memory_markov"] = _train(
        "markov", "markov, memory (recurrent actor and critic) or memory_markov (recurrent critic only)"
    )
    previous_step: bool = _train(False, "the network is told its previous action and reward (RL2)")
    rnn: Literal["gru", "lstm"] = _train("gru", "recurrent layer of a network with memory")
    state_size: int = _train(64, "units of the recurrent layer")
    sequence_length: int | None = _train(
        None,
        "steps gradients flow back through; must divide num_steps; default: the longest that gives every minibatch a sequence",
    )
    hidden: tuple[int, ...] = _train((64, 64), "units of the dense layers; a recurrent layer takes the place of all but the last")
    activation: Literal["tanh", "relu", "elu"] = _train("tanh", "activation of the dense layers")
    std: Literal["free", "state"] = _train("free", "standard deviation of Box actions: free (a parameter) or state (an output)")
    log_std_init: float = _train(0.0, "logarithm of the standard deviation of Box actions at the beginning")
    squash: bool = _train(False, "Box actions: squash by tanh into the bounds (default: clip to the bounds)")
    share_encoder: bool | None = _train(None, "one encoder for actor and critic; default: for pictures only")
    # -- many agents -----------------------------------------------------------------------------------------------
    policies: str | dict[str, list[str]] = _train(
        "shared", "many agents: shared (one policy for all), independent (one each), or groups like red=red_0+red_1,blue=blue_0"
    )
    centralised_critic: bool = _train(False, "many agents: critics also read state() (MAPPO)")
    self_play: bool = _train(False, "many agents: play some episodes against past policies, rated by Elo")
    self_play_pool: int = _train(8, "self-play: how many past policies are kept")
    self_play_every: int = _train(10, "self-play: updates between two that are kept")
    self_play_past: float = _train(0.5, "self-play: probability that an episode is played against a past policy")
    # -- machine ---------------------------------------------------------------------------------------------------
    device: str = _run("cpu", "cpu, cuda, mps or auto; small networks are fastest on cpu")
    num_threads: int = _run(1, "threads for the arithmetic; more than 1 helps with large networks or large minibatches only")
    on_nan: Literal["stop", "skip"] = _run("stop", "NaN in an observation, reward or loss: stop (with a checkpoint) or skip it")
    # -- run folder ------------------------------------------------------------------------------------------------
    out: str | None = _run(None, "folder of the run: checkpoints, logs, report; default: nothing is written")
    resume: bool = _run(False, "continue from the last checkpoint in the folder; start a new run if there is none")
    restore: Literal["replay", "end"] = _run("replay", "episodes that ran at the checkpoint: replay (exact) or end them")
    checkpoint_every: int = _run(20, "updates between checkpoints; 0: only at the end")
    keep_checkpoints: int = _run(3, "latest checkpoints kept, in addition to the best one")
    eval_every: int = _run(0, "updates between evaluations during training; 0: none")
    eval_episodes: int = _run(10, "episodes of an evaluation during training")
    tensorboard: bool = _run(True, "write TensorBoard files into the run folder")
    wandb: bool = _run(False, "log to Weights & Biases, one run for any number of workers")
    wandb_project: str = _run("envfleet", "Weights & Biases project")
    wandb_mode: str | None = _run(None, "online, offline or disabled; default: what W&B decides")
    video_every: int = _run(0, "updates between videos of slot 0; 0: none")
    report: bool = _run(True, "write report.html into the run folder at the end")
    preset: str = _run("auto", "tuned settings to start from: auto (by environment), none, or a preset's name")

    if not typing.TYPE_CHECKING:  # type checkers see the fields as keywords, and so find one that is misspelled

        def __init__(self, **settings: Any) -> None:
            given = {field_name(name): value for name, value in settings.items()}
            if len(given) < len(settings):
                names = ", ".join(name for name in settings if field_name(name) != name)
                raise BadArgument(f"a setting is given twice: {names} are other spellings of settings")
            values = {spec.name: default_of(spec) for spec in dataclasses.fields(self)}
            preset = preset_for(given.get("env", values["env"]), given.get("preset", values["preset"]))
            if given.get("start_method") is not None:
                preset.pop("backend", None)  # a start method asks for processes
            values |= preset
            for name, value in {**values, **given, "_given": given}.items():
                object.__setattr__(self, name, value)
            self._check()

    def _check(self) -> None:
        for name in FIELDS:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        object.__setattr__(self, "policies", read_policies(self.policies))
        steps = self.steps_per_update
        if self.num_minibatches > steps:
            raise BadArgument(f"num_minibatches={self.num_minibatches} is more than the {steps} steps of an update")
        if self.sequence_length is not None and (self.sequence_length < 1 or self.num_steps % self.sequence_length):
            raise BadArgument(f"sequence_length={self.sequence_length} does not divide num_steps={self.num_steps}")

    @property
    def given(self) -> dict[str, Any]:
        """The settings that were given; the others come from the preset and the defaults."""
        return dict(self.__dict__["_given"])

    @property
    def steps_per_update(self) -> int:
        """Environment steps that one update learns from."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Updates until total_steps is reached or passed."""
        return -(-self.total_steps // self.steps_per_update)

    @property
    def env_name(self) -> str:
        """The environment's name for logs and reports."""
        return self.env if isinstance(self.env, str) else env_name(self.env)

    def network(self) -> NetworkConfig:
        """Return the part that shapes the network."""
        names = [spec.name for spec in dataclasses.fields(NetworkConfig)]
        return NetworkConfig(**{name: getattr(self, name) for name in names})

    def coefficients(self, update: float) -> Coefficients:
        """Return what the schedules say for update number `update` (from 0). Rows that a fault took count as not yet done."""
        left = max(1.0 - update / self.num_updates, 0.0)
        last = self.entropy if self.entropy_final is None else self.entropy_final
        return Coefficients(
            learning_rate=self.learning_rate * (left if self.lr_schedule == "linear" else 1.0),
            clip=self.clip * (left if self.clip_schedule == "linear" else 1.0),
            entropy=last + (self.entropy - last) * left,
            value=self.value_coef,
            value_clip=self.value_clip,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for JSON and YAML."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        values["hidden"] = list(self.hidden)
        values["env"] = self.env if isinstance(self.env, str) else self.env_name
        values["columns"] = {name: str(space) for name, space in self.columns.items()}
        return values


#: Other spellings, of old scripts and other libraries: as keyword arguments, flags and YAML keys alike.
ALIASES = {
    "env_name": "env",
    "env_id": "env",
    "name": "env",
    "n_envs": "num_envs",
    "num_parallel_workers": "num_envs",
    "num_parallel_envs": "num_envs",
    "kwargs": "env_kwargs",
    "parallel_start_method": "start_method",
    "total_timesteps": "total_steps",
    "lr": "learning_rate",
    "n_steps": "num_steps",
    "n_epochs": "num_epochs",
    "update_epochs": "num_epochs",
    "clip_coef": "clip",
    "clip_range": "clip",
    "ent_coef": "entropy",
    "entropy_coef": "entropy",
    "vf_coef": "value_coef",
    "lam": "gae_lambda",
    "checkpoint_dir": "out",
    "max_rollouts_per_task": "episodes_per_task",
    "n_env_steps_total": "total_steps",
    "hidden_size": "state_size",
    "agent_arch": "arch",
}
SECTIONS = ("env", "train")
TYPES = typing.get_type_hints(PPOConfig)
FIELDS: dict[str, dataclasses.Field[Any]] = {spec.name: spec for spec in dataclasses.fields(PPOConfig)}


_COUNT = ("at least 1 is needed", lambda value: value >= 1)
_FROM_0 = ("0 or more is needed", lambda value: 0 <= value < math.inf)
_ABOVE_0 = ("a number above 0 is needed", lambda value: value > 0)
_TO_1 = ("a number from 0 to 1 is needed", lambda value: 0 <= value <= 1)
_FINITE = ("a finite number is needed", math.isfinite)
_LAYERS = ("at least one hidden layer is needed, and one unit in each", lambda value: value and min(value) >= 1)
#: What a number must be, beside its type: the words, and the test. Every number among the settings is here.
RANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("num_envs", "num_workers", "total_steps", "num_episodes", "num_steps", "num_epochs"), _COUNT),
    **dict.fromkeys(("num_minibatches", "num_threads", "state_size", "sequence_length", "eval_episodes"), _COUNT),
    **dict.fromkeys(("self_play_pool", "self_play_every", "keep_checkpoints"), _COUNT),
    **dict.fromkeys(("episodes_per_task", "num_train_tasks", "num_rollouts_per_iter"), _COUNT),
    "num_eval_tasks": _FROM_0,
    "success_return": _FINITE,
    **dict.fromkeys(("seed", "checkpoint_every", "eval_every", "video_every"), _FROM_0),
    **dict.fromkeys(("learning_rate", "adam_eps", "entropy", "entropy_final", "value_coef"), _FROM_0),
    **dict.fromkeys(("init_timeout_s", "reset_timeout_s", "step_timeout_s"), _ABOVE_0),
    **dict.fromkeys(("clip", "value_clip", "max_grad_norm", "target_kl"), _ABOVE_0),
    **dict.fromkeys(("gamma", "gae_lambda", "self_play_past"), _TO_1),
    "log_std_init": _FINITE,
    "hidden": _LAYERS,
}
#: The types of settings: what may be given, what is kept of it, and the words for what is needed.
KINDS: dict[Any, tuple[Any, Callable[[Any], Any], str]] = {
    bool: (bool, bool, "true or false"),
    int: (numbers.Integral, int, "a whole number"),
    float: (numbers.Real, float, "a number"),
    str: (str, str, "a text"),
    tuple: ((list, tuple), lambda units: tuple(operator.index(each) for each in units), "a list of whole numbers like 64,64"),
    dict: (Mapping, dict, "a list of pairs like name=value,other=2"),
}


def kinds_of(name: str) -> tuple[list[Any], bool]:
    """Return the types a setting may have, and whether it may be empty."""
    hint = TYPES[name]
    parts = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    kinds = [typing.get_origin(part) or part for part in parts if part is not type(None)]
    return [str if kind in (Any, Literal) else kind for kind in kinds], type(None) in parts


def checked(name: str, value: Any, shown: str = "") -> Any:
    """Return a value of a setting as the config keeps it; refuse a wrong type or range. `shown` is how the user wrote it.

    Example:
        >>> checked("num_envs", 8), checked("hidden", [32])
        (8, (32,))
        >>> checked("gamma", 1.5, "--gamma 1.5")
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: --gamma 1.5: a number from 0 to 1 is needed
    """
    (kinds, optional), hint = kinds_of(name), TYPES[name]
    if (value is None and optional) or hint is Any:
        return value
    shown = shown or f"{name}={value!r}"
    choices = [
        choice
        for part in (hint, *typing.get_args(hint))
        if typing.get_origin(part) is Literal
        for choice in typing.get_args(part)
    ]
    if choices and value not in choices:
        raise BadArgument(f"{shown}: it is one of {', '.join(choices)}")
    for kind in kinds:
        allowed, keep, _ = KINDS[kind]
        if isinstance(value, allowed) and isinstance(value, bool) == (kind is bool):
            try:
                value = keep(value)
            except TypeError:
                continue
            needed, fits = RANGES.get(name, ("", lambda value: True))
            if not fits(value):
                raise BadArgument(f"{shown}: {needed}")
            return value
    raise BadArgument(f"{shown}: {' or '.join(KINDS[kind][2] for kind in kinds)} is needed")


def field_name(name: str) -> str:
    """Return the field a name stands for: `env.num_envs`, `n-envs`, an alias or the name itself.

    Example:
        >>> field_name("env.num_parallel_workers"), field_name("ent-coef")
        ('num_envs', 'entropy')
        >>> field_name("train.learning_rat")
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: there is no setting 'train.learning_rat'. Did you mean learning_rate? Settings of train: ...
    """
    section, _, bare = name.rpartition(".")
    if section and section not in SECTIONS:
        raise BadArgument(f"there is no section {section!r} in {name!r}; the sections are env and train")
    bare = bare.replace("-", "_")
    found = ALIASES.get(bare, bare)
    if found in FIELDS and (not section or FIELDS[found].metadata["section"] == section):
        return found
    known = [key for key, spec in FIELDS.items() if not section or spec.metadata["section"] == section]
    close = difflib.get_close_matches(bare, [*known, *ALIASES], n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    if found in FIELDS:
        hint = f" It belongs to the section {FIELDS[found].metadata['section']}."
    where = f"Settings of {section}" if section else "Settings"
    raise BadArgument(f"there is no setting {name!r}.{hint} {where}: {', '.join(sorted(known))}")
