# ruff: noqa: RUF009 - `_doc` is `dataclasses.field` with a text
"""`PPOConfig`: every setting of a training run, documented once; the command's help and the YAML schema come from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from envfleet.errors import BadArgument
from envfleet.multiagent.policy_map import read_policies
from envfleet.networks.actor_critic import NetworkConfig
from envfleet.train.objective import Coefficients, UpdateSettings
from envfleet.train.presets import preset_for


def _doc(default: Any, section: str, text: str, **more: Any) -> Any:
    """Declare a field: its default, the YAML section it belongs to, and the one text that explains it."""
    metadata = {"section": section, "help": text, **more}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


SCHEDULES = ("constant", "linear")


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default is not dataclasses.MISSING:
        return spec.default
    assert spec.default_factory is not dataclasses.MISSING
    return spec.default_factory()


@dataclass(frozen=True, init=False)
class PPOConfig:
    """All settings of a PPO run. Frozen: what is derived from the settings is a property or a method.

    What is not given comes from the preset that fits the environment, then from the plain defaults; `preset="none"` leaves
    presets out. What is given always wins.

    Example:
        >>> config = PPOConfig(env="CartPole-v1", num_envs=8, total_steps=100_000, seed=1)
        >>> config.steps_per_update, config.num_updates, config.gamma
        (256, 391, 0.98)
        >>> PPOConfig(env="CartPole-v1", preset="none").gamma
        0.99
    """

    # -- environment -----------------------------------------------------------------------------------------------
    env: Any = _doc(
        "CartPole-v1", "env", 'Gymnasium id, short name (tmaze, catch, …), "module:attribute", or in Python a callable'
    )
    env_kwargs: dict[str, Any] = _doc({}, "env", "keyword arguments for the environment, as name=value pairs")
    num_envs: int = _doc(1, "env", "environments stepped together; 1 is sequential", flags=("--n-envs",))
    backend: str = _doc("auto", "env", "where environments run: auto, serial, thread, aio, pipe or shm")
    num_workers: int | None = _doc(None, "env", "worker processes or threads; default: chosen from the CPUs")
    start_method: str | None = _doc(
        None,
        "env",
        "forkserver, spawn or fork for process workers; implies backend shm when that is auto",
        flags=("--parallel-start-method",),
    )
    on_fault: str = _doc(
        "restart",
        "env",
        "an environment that fails: restart it (its rows are not learned from; after three in a row its slot is given up), or raise and stop",
        choices=("raise", "restart"),
    )
    columns: dict[str, Any] = _doc(
        {}, "env", "in Python: declared info columns, name -> space (an `action_mask` column masks actions)", cli=False
    )
    # -- how long --------------------------------------------------------------------------------------------------
    total_steps: int = _doc(100_000, "train", "environment steps to train for, over all environments together")
    num_episodes: int | None = _doc(
        None, "train", "stop after this many finished episodes instead; total_steps then only drives the schedules"
    )
    seed: int = _doc(1, "train", "seed of the run: networks, exploration, minibatches and every episode")
    # -- PPO -------------------------------------------------------------------------------------------------------
    num_steps: int = _doc(128, "train", "steps of each environment per update")
    num_epochs: int = _doc(4, "train", "passes over the collected steps per update")
    num_minibatches: int = _doc(4, "train", "minibatches per pass")
    learning_rate: float = _doc(2.5e-4, "train", "step size of Adam at the beginning")
    lr_schedule: str = _doc("linear", "train", "learning rate over the run: constant or linear to 0", choices=SCHEDULES)
    clip: float = _doc(0.2, "train", "clip range of the probability ratio at the beginning")
    clip_schedule: str = _doc(
        "constant", "train", "clip range over the run: constant or linear to 0", choices=SCHEDULES
    )
    entropy: float = _doc(0.0, "train", "weight of the entropy bonus at the beginning")
    entropy_final: float | None = _doc(
        None, "train", "weight of the entropy bonus at the end, reached linearly; default: the same"
    )
    gamma: float = _doc(0.99, "train", "discount")
    gae_lambda: float = _doc(0.95, "train", "lambda of the advantage estimate")
    value_coef: float = _doc(0.5, "train", "weight of the value loss")
    value_clip: float | None = _doc(None, "train", "clip range of the value function; default: not clipped")
    max_grad_norm: float = _doc(0.5, "train", "gradients longer than this are shortened to it")
    target_kl: float | None = _doc(
        None, "train", "stop the epochs of an update once the policy moved 1.5 times this far"
    )
    normalize_advantage: bool = _doc(True, "train", "standardise advantages in every minibatch")
    normalize_obs: bool = _doc(False, "train", "scale flat observations to mean 0 and variance 1 by running statistics")
    normalize_reward: bool = _doc(False, "train", "divide rewards by the running standard deviation of the return")
    adam_eps: float = _doc(1e-5, "train", "epsilon of Adam")
    # -- network ---------------------------------------------------------------------------------------------------
    arch: str = _doc(
        "markov",
        "train",
        "markov, memory (recurrent actor and critic) or memory_markov (recurrent critic only)",
        choices=("markov", "memory", "memory_markov"),
    )
    rnn: str = _doc("gru", "train", "recurrent layer of a network with memory", choices=("gru", "lstm"))
    state_size: int = _doc(64, "train", "units of the recurrent layer")
    sequence_length: int | None = _doc(
        None,
        "train",
        "steps gradients flow back through; must divide num_steps; default: all of them, as far as every minibatch still gets a sequence",
    )
    hidden: tuple[int, ...] = _doc(
        (64, 64), "train", "units of the dense layers; a recurrent layer takes the place of all but the last"
    )
    activation: str = _doc("tanh", "train", "activation of the dense layers", choices=("tanh", "relu", "elu"))
    std: str = _doc(
        "free",
        "train",
        "standard deviation of Box actions: free (a parameter) or state (an output)",
        choices=("free", "state"),
    )
    log_std_init: float = _doc(0.0, "train", "logarithm of the standard deviation of Box actions at the beginning")
    squash: bool = _doc(False, "train", "Box actions: squash by tanh into the bounds (default: clip to the bounds)")
    share_encoder: bool | None = _doc(None, "train", "one encoder for actor and critic; default: for pictures only")
    # -- many agents -----------------------------------------------------------------------------------------------
    policies: str | dict[str, list[str]] = _doc(
        "shared",
        "train",
        "many agents: shared (one policy for all), independent (one each), or groups like red=red_0+red_1,blue=blue_0",
    )
    centralised_critic: bool = _doc(
        False, "train", "many agents: critics read the environment's state() beside their agent's observation (MAPPO)"
    )
    self_play: bool = _doc(False, "train", "many agents: play some episodes against past policies, rated by Elo")
    self_play_pool: int = _doc(8, "train", "self-play: how many past policies are kept")
    self_play_every: int = _doc(10, "train", "self-play: updates between two that are kept")
    self_play_past: float = _doc(0.5, "train", "self-play: probability that an episode is played against a past policy")
    # -- machine ---------------------------------------------------------------------------------------------------
    device: str = _doc("cpu", "train", "cpu, cuda, mps or auto; small networks are fastest on cpu")
    num_threads: int = _doc(1, "train", "threads for the arithmetic; more than 1 helps only large networks")
    on_nan: str = _doc(
        "stop",
        "train",
        "NaN in an observation, reward or loss: stop (with a checkpoint) or skip it",
        choices=("stop", "skip"),
    )
    # -- run folder ------------------------------------------------------------------------------------------------
    out: str | None = _doc(
        None,
        "train",
        "folder of the run: checkpoints, logs, report; default: nothing is written",
        flags=("--checkpoint-dir",),
    )
    resume: bool = _doc(False, "train", "go on from the last checkpoint in the folder; begins anew if there is none")
    restore: str = _doc(
        "replay",
        "train",
        "episodes that were running at the checkpoint: replay (exact) or end them",
        choices=("replay", "end"),
    )
    checkpoint_every: int = _doc(20, "train", "updates between checkpoints; 0: only at the end")
    keep_checkpoints: int = _doc(3, "train", "latest checkpoints kept; the best one is kept besides")
    eval_every: int = _doc(0, "train", "updates between evaluations during training; 0: none")
    eval_episodes: int = _doc(10, "train", "episodes of an evaluation during training")
    tensorboard: bool = _doc(True, "train", "write TensorBoard files into the run folder")
    wandb: bool = _doc(False, "train", "log to Weights & Biases, one run whatever the number of workers")
    wandb_project: str = _doc("envfleet", "train", "Weights & Biases project")
    wandb_mode: str | None = _doc(None, "train", "online, offline or disabled; default: what W&B decides")
    video_every: int = _doc(0, "train", "updates between videos of slot 0; 0: none")
    report: bool = _doc(True, "train", "write report.html into the run folder at the end")
    preset: str = _doc("auto", "train", "tuned settings to begin from: auto (by environment), none, or a preset's name")

    def __init__(self, **settings: Any) -> None:
        from envfleet.train.settings import field_name

        given = {field_name(name): value for name, value in settings.items()}
        values = {spec.name: _default(spec) for spec in dataclasses.fields(self)}
        values |= preset_for(given.get("env", values["env"]), given.get("preset", values["preset"]))
        for name, value in {**values, **given}.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        object.__setattr__(self, "hidden", tuple(int(units) for units in self.hidden))
        for spec in dataclasses.fields(self):
            choices = spec.metadata.get("choices")
            value = getattr(self, spec.name)
            if choices and value not in choices:
                raise BadArgument(f"{spec.name}={value!r}: it is one of {', '.join(choices)}")
        object.__setattr__(self, "policies", read_policies(self.policies))
        if not 0.0 <= self.self_play_past <= 1.0:
            raise BadArgument(f"self_play_past={self.self_play_past}: a probability from 0 to 1 is needed")
        counts = ("num_envs", "total_steps", "num_steps", "num_epochs", "num_minibatches", "num_threads")
        for name in (*counts, "self_play_pool", "self_play_every"):
            if getattr(self, name) < 1:
                raise BadArgument(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.num_minibatches > self.steps_per_update:
            raise BadArgument(
                f"num_minibatches={self.num_minibatches} is more than the {self.steps_per_update} steps of an update"
            )
        if self.sequence_length is not None and self.num_steps % self.sequence_length:
            raise BadArgument(f"sequence_length={self.sequence_length} does not divide num_steps={self.num_steps}")
        self.network()

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
        return self.env if isinstance(self.env, str) else getattr(self.env, "__name__", type(self.env).__name__)

    def network(self) -> NetworkConfig:
        """Return the part that shapes the network."""
        names = [spec.name for spec in dataclasses.fields(NetworkConfig)]
        return NetworkConfig(**{name: getattr(self, name) for name in names})

    def update(self) -> UpdateSettings:
        """Return the part that an update needs."""
        names = [spec.name for spec in dataclasses.fields(UpdateSettings)]
        return UpdateSettings(**{name: getattr(self, name) for name in names})

    def coefficients(self, update: int) -> Coefficients:
        """Return what the schedules say for update number `update` (from 0)."""
        left = max(1.0 - update / self.num_updates, 0.0)
        last = self.entropy if self.entropy_final is None else self.entropy_final
        return Coefficients(
            learning_rate=self.learning_rate * (left if self.lr_schedule == "linear" else 1.0),
            clip=self.clip * (left if self.clip_schedule == "linear" else 1.0),
            entropy=last + (self.entropy - last) * left,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for JSON and YAML."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        values["hidden"] = list(self.hidden)
        values["env"] = self.env if isinstance(self.env, str) else self.env_name
        values["columns"] = {name: str(space) for name, space in self.columns.items()}
        return values
