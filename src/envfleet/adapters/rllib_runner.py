"""`FleetEnvRunner`: RLlib's env runner with the collector's loop, [T, B] arrays while sampling, episodes cut once per fragment.

RLlib's own runner appends every step of every environment to Python objects and runs its connectors over them; with cheap
environments that is most of the time. What this one does not do, it refuses by name when it is built.
"""

from __future__ import annotations

import secrets
import time
import uuid
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from envfleet.adapters.gymnasium import FleetVectorEnv
from envfleet.adapters.rllib_env import FAULT_KEY, FleetEnvCreator
from envfleet.errors import BadArgument
from envfleet.faults.failure import Fault
from envfleet.rollout.collector import Collector
from envfleet.rollout.policy_protocol import Answer, Ask, RandomPolicy
from envfleet.rollout.segments.segment import Segment
from envfleet.util.extras import from_extra
from envfleet.util.seeding import episode_seed
from envfleet.util.trees import Tree, tree_leaves, tree_map, tree_put, tree_rows

with from_extra("rllib"):
    from ray.rllib.callbacks.callbacks import RLlibCallback
    from ray.rllib.callbacks.utils import make_callback
    from ray.rllib.connectors.module_to_env import GetActions
    from ray.rllib.core.columns import Columns
    from ray.rllib.env.env_context import EnvContext
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
    from ray.rllib.utils import force_list
    from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
    from ray.rllib.utils.numpy import convert_to_numpy
    from ray.rllib.utils.spaces.space_utils import clip_action, get_base_struct_from_space, unsquash_action
    from ray.rllib.utils.torch_utils import convert_to_torch_tensor
    from ray.tune.registry import ENV_CREATOR, _global_registry

#: Callbacks that RLlib calls inside of its own loop.
_IN_THE_LOOP = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")
#: Where the faults are in RLlib's results, under `env_runners`.
NUM_FAULTS, NUM_QUARANTINED = "num_env_faults_lifetime", "num_envs_quarantined"
#: The parts of the action as the module gave it, by their paths, where the environment got another (clipped, or brought to the bounds of its space).
_RAW_ACTION = "raw_action/"


class FleetEnvRunner(SingleAgentEnvRunner):  # type: ignore[misc]
    """An env runner for environments of `fleet_env`: `config.env_runners(env_runner_cls=FleetEnvRunner)`.

    It returns the same episodes, metrics and states as RLlib's own. Every sample has the same number of steps of every
    slot. An episode in which the environment failed is truncated after its last good step; a quarantined slot gives nothing.

    Example:
        >>> from ray.rllib.algorithms.ppo import PPOConfig
        >>> from envfleet.adapters import rllib
        >>> config = rllib.environment(PPOConfig(), "CartPole-v1", runner="fleet", backend="serial")
        >>> config.env_runner_cls.__name__
        'FleetEnvRunner'
    """

    env: Any  # a FleetVectorEnv, None in a runner without environments

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        refuse_what_is_skipped(config)
        self._collector: Collector | None = None
        self._ended_episodes: list[tuple[int, float, float]] = []  # length, return, seconds: since the last get_metrics
        self._num_faults = 0
        self._token = uuid.uuid4().hex[:12]  # ids of episodes must differ from those of every other runner
        super().__init__(config=config, **kwargs)
        if self.module is not None and self.module.is_stateful():
            raise BadArgument(_refusal("a stateful (recurrent) RLModule", "use RLlib's own runner"))

    def make_env(self) -> None:
        """Build the fleet of this runner, and the collector over it."""
        if self.env is not None:
            self.env.close()
        config = self.config
        creator: Any = config.env
        if isinstance(creator, str):
            creator = _global_registry.get(ENV_CREATOR, creator) if _global_registry.contains(ENV_CREATOR, creator) else creator
        if not isinstance(creator, FleetEnvCreator):
            raise BadArgument(
                _refusal(f"the environment {config.env!r}", "make it with envfleet.adapters.rllib.environment(config, …)")
            )
        context = EnvContext(config.env_config, worker_index=self.worker_index or 0, num_workers=self.num_workers)
        fleet = creator.fleet(config.num_envs_per_env_runner, context, on_end="reset")
        self.env = FleetVectorEnv(fleet, AutoresetMode.SAME_STEP)  # RLlib asks it for spaces; the collector steps the fleet
        self.num_envs = fleet.num_envs
        self._policy = _ModulePolicy(self)
        seed = secrets.randbits(62) if config.seed is None else int(config.seed)
        self._run_seed = episode_seed(seed, "rllib-eval" if config.in_evaluation else "rllib", self.worker_index or 0, 0)
        self._collector = Collector(fleet, self._policy, seed=self._run_seed, timing=False)
        self._num_faults = 0
        about = {"env_runner": self, "metrics_logger": self.metrics, "env": self.env, "env_context": context}
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=config.callbacks_on_environment_created,
            kwargs=about,
        )

    def faults(self) -> list[Fault]:
        """Every fault so far."""
        return [] if self.env is None else list(self.env.fleet.faults)

    def _sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[SingleAgentEpisode]:
        if num_timesteps is None:
            raise BadArgument(
                _refusal(
                    f"num_episodes={num_episodes}",
                    'for evaluation set evaluation_duration_unit="timesteps", or evaluation_config={"env_runner_cls": None}',
                )
            )
        if force_reset:
            self._begin_anew()
        collector = self._collector
        assert collector is not None
        self._policy.begin(explore)
        collector.policy = RandomPolicy(self.env.single_action_space) if random_actions else self._policy
        episodes: list[SingleAgentEpisode] = []
        missing = num_timesteps
        while missing > 0:  # again only where slots have failed: an algorithm that gets less than it asked for samples all anew
            began = time.perf_counter()
            segment = collector.segment(-(-missing // self.num_envs))
            seconds = time.perf_counter() - began
            episodes += self._cut(segment)
            self._count(segment, seconds)
            missing -= segment.num_scored
        return episodes

    def _begin_anew(self) -> None:
        """End the running episodes; the slots go on with their next ones."""
        old = self._collector
        assert old is not None
        state = old.segment_state(running=False)
        if state is not None:
            self._collector = Collector(self.env.fleet, self._policy, seed=self._run_seed, timing=False)
            self._collector.restore_segments(state, how="end")

    # -- a fragment as episodes ------------------------------------------------------------------------------------

    def _cut(self, segment: Segment) -> list[SingleAgentEpisode]:
        """The fragment as RLlib's episodes: those that ended first, then the chunks of those that go on."""
        columns = {name: _by_slot(values) for name, values in segment.extras.items()}
        # RLlib stores what the module chose, not what the environment was given.
        raw = {name: columns.pop(name) for name in list(columns) if name.startswith(_RAW_ACTION)}
        arrays = {
            "obs": tree_map(lambda leaf, last: _by_slot(np.concatenate([leaf, last[None]])), segment.obs, segment.bootstrap_obs),
            "action": _from_paths(tree_map(_by_slot, segment.action), raw),
            "reward": _by_slot(segment.reward.astype(np.float32)),
            "extras": columns,
        }
        ended, going = [], []
        final_row = {(t, b): k for k, (t, b) in enumerate(segment.end_index.tolist())}
        stops = segment.ended | ~segment.scored
        for b in range(segment.num_slots):
            first = 0
            for t in np.flatnonzero(stops[:, b]).tolist():
                # A row that is not scored holds no transition: the episode stopped where that row began.
                is_scored = bool(segment.scored[t, b])
                if (stop := t + is_scored) > first:
                    last = tree_rows(segment.final_obs, final_row[t, b]) if is_scored else None
                    ended.append(self._episode(segment, arrays, b, first, stop, last, done_at=t))
                first = t + 1
            if first < segment.num_steps:
                going.append(self._episode(segment, arrays, b, first, segment.num_steps, None, done_at=None))
        return ended + going

    def _episode(
        self, segment: Segment, arrays: dict[str, Any], slot: int, first: int, stop: int, last: Tree, done_at: int | None
    ) -> SingleAgentEpisode:
        """Steps `first` to `stop` of a slot. `last`: the observation it ended with, where that is not the next row."""
        obs = tree_map(lambda leaf: leaf[slot, first : stop + 1], arrays["obs"])
        if last is not None:
            obs = tree_map(np.copy, obs)  # the row after an end is the first of the next episode, which needs it too
            tree_put(obs, -1, last)
        count = stop - first
        infos: list[dict[str, Any]] = [{} for _ in range(count + 1)]
        failed = done_at is not None and not segment.scored[done_at, slot]
        if failed:
            infos[-1][FAULT_KEY] = True
        extras = {name: InfiniteLookbackBuffer(values[slot, first:stop]) for name, values in arrays["extras"].items()}
        extras[WEIGHTS_SEQ_NO] = InfiniteLookbackBuffer(np.full(count, self._weights_seq_no))
        return SingleAgentEpisode(
            id_=f"{self._token}-{slot}-{int(segment.episode[first, slot])}",
            observations=InfiniteLookbackBuffer(obs, space=self.env.single_observation_space),
            observation_space=self.env.single_observation_space,
            infos=InfiniteLookbackBuffer(infos),
            actions=InfiniteLookbackBuffer(
                tree_map(lambda leaf: leaf[slot, first:stop], arrays["action"]), space=self.env.single_action_space
            ),
            action_space=self.env.single_action_space,
            rewards=InfiniteLookbackBuffer(arrays["reward"][slot, first:stop]),
            extra_model_outputs=extras,
            terminated=done_at is not None and not failed and bool(segment.terminated[done_at, slot]),
            truncated=done_at is not None and (failed or bool(segment.truncated[done_at, slot])),
            t_started=int(segment.step[first, slot]),
            len_lookback_buffer=0,
        )

    # -- metrics ---------------------------------------------------------------------------------------------------

    def _count(self, segment: Segment, seconds: float) -> None:
        step_s = seconds / segment.num_steps
        num_ended = 0
        for (t, b), length, total in zip(segment.end_index.tolist(), segment.end_length.tolist(), segment.end_return.tolist()):
            if segment.scored[t, b]:
                self._ended_episodes.append((length, total, length * step_s))
                num_ended += 1
        self._log_env_steps(metric=self._metrics_num_env_steps_sampled, num_steps=segment.num_scored)
        self._increase_sampled_metrics(segment.num_scored, num_ended)
        num_faults = len(self.env.fleet.faults)
        self.metrics.log_value(NUM_FAULTS, num_faults - self._num_faults, reduce="lifetime_sum")
        self.metrics.log_value(NUM_QUARANTINED, len(self.env.fleet.quarantined), reduce="sum")
        self._num_faults = num_faults

    def get_metrics(self) -> Any:
        """RLlib's metrics. The duration of an episode is its length times the mean time of a step in its last fragment."""
        for length, total, seconds in self._ended_episodes:
            self._log_episode_metrics(length, total, seconds)
        self._ended_episodes.clear()
        return self.metrics.reduce()


class _ModulePolicy:
    """The runner's RLModule as a policy of a collector: RLlib's default connectors without their lists of single items."""

    def __init__(self, runner: FleetEnvRunner) -> None:
        self.runner = runner
        self.choose = GetActions()
        self.struct = get_base_struct_from_space(runner.env.single_action_space)
        config = runner.config
        self.bring = unsquash_action if config.normalize_actions else clip_action if config.clip_actions else None
        self.explore, self.num_steps = True, 0

    @property
    def version(self) -> int:
        """The number of the weights."""
        return int(self.runner._weights_seq_no)

    def begin(self, explore: bool) -> None:
        """A new sample."""
        self.explore, self.num_steps = explore, 0

    def act(self, ask: Ask) -> Answer:
        """Actions for the environments; what the module gave beside them is kept."""
        runner, module = self.runner, self.runner.module
        batch = {Columns.OBS: convert_to_torch_tensor(tree_map(np.copy, ask.obs), device=runner._device)}
        if self.explore:
            runners = runner.config.num_env_runners or 1
            now = (runner.num_env_steps_sampled_lifetime // runners + self.num_steps) * runners
            out = module.forward_exploration(batch, t=now)
        else:
            out = module.forward_inference(batch)
        self.num_steps += len(ask)
        out = convert_to_numpy(self.choose(rl_module=module, batch=out, episodes=[None], explore=self.explore))
        chosen = out.pop(Columns.ACTIONS)
        given = out.pop(Columns.ACTIONS_FOR_ENV, None)
        if given is None:
            given = chosen if self.bring is None else self.bring(chosen, self.struct)
        extras = {name: values for name, values in out.items() if isinstance(values, np.ndarray)}
        if given is not chosen:
            extras |= {f"{_RAW_ACTION}{path}": leaf for path, leaf in tree_leaves(chosen)}
        return Answer(given, extras)


def refuse_what_is_skipped(config: Any) -> None:
    """Refuse, by name, every setting that RLlib's own runner follows and `FleetEnvRunner` does not."""
    own = "use RLlib's own runner (leave env_runner_cls out)"
    if config.is_multi_agent:
        raise BadArgument(_refusal("multi_agent(policies=…)", "it samples environments with one agent"))
    for setting in ("env_to_module_connector", "module_to_env_connector"):
        if getattr(config, f"_{setting}") is not None:
            raise BadArgument(_refusal(f"env_runners({setting}=…)", f"put it into a wrapper of the environment, or {own}"))
    for pipeline in ("env_to_module", "module_to_env"):
        if not getattr(config, f"add_default_connectors_to_{pipeline}_pipeline"):
            raise BadArgument(_refusal(f"add_default_connectors_to_{pipeline}_pipeline=False", own))
    for callback in _IN_THE_LOOP:
        classes = [one for one in force_list(config.callbacks_class) if isinstance(one, type)]
        in_class = any(getattr(one, callback, None) is not getattr(RLlibCallback, callback) for one in classes)
        if in_class or getattr(config, f"callbacks_{callback}", None) is not None:
            raise BadArgument(_refusal(f"the callback {callback}", f"on_sample_end and on_train_result work; else {own}"))
    if config.batch_mode != "truncate_episodes":
        raise BadArgument(_refusal(f"batch_mode={config.batch_mode!r}", own))
    if not config.episodes_to_numpy:
        raise BadArgument(_refusal("episodes_to_numpy=False", own))
    if config.compress_observations:
        raise BadArgument(_refusal("compress_observations=True", own))
    if config.framework_str != "torch":
        raise BadArgument(_refusal(f"framework={config.framework_str!r}", "it needs torch"))


def _refusal(what: str, hint: str) -> str:
    return f"FleetEnvRunner does not support {what}: {hint}"


def _by_slot(values: Any) -> Any:
    """[B, T, ...] of [T, B, ...], so that an episode's steps stand side by side."""
    return np.ascontiguousarray(np.swapaxes(values, 0, 1))


def _from_paths(tree: Tree, found: dict[str, Any], path: str = "") -> Tree:
    """The tree with those leaves replaced that were found under their paths."""
    if isinstance(tree, dict):
        return {key: _from_paths(part, found, f"{path}/{key}" if path else str(key)) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_from_paths(part, found, f"{path}/{i}" if path else str(i)) for i, part in enumerate(tree))
    return found.get(f"{_RAW_ACTION}{path}", tree)
