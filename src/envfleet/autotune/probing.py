"""The probe of `backend="auto"`: one env, built and timed in a worker of its own, within the fleet's deadlines."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable
from typing import Any

from envfleet.errors import FleetError, KeeperLost
from envfleet.faults.failure import Failure, exit_words, init_fault
from envfleet.multiagent.agent_env import AgentEnv
from envfleet.slots.env_contract import unpack_result
from envfleet.slots.factories import Recipe
from envfleet.util.text import first_line
from envfleet.util.trees import tree_leaves

#: How long the probe steps an env; up to MOST times that where steps are slow.
PROBE_S, MOST = 0.25, 2


class ProbeFailed(FleetError):
    """The env died, hung or raised while it was probed; the message says which."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """What one env costs: seconds of wall clock and of CPU per step (resets included), bytes per observation."""

    step_s: float
    cpu_s: float
    obs_bytes: int
    is_async: bool = False
    pauses: float = 1.0  # mean number of voluntary context switches in a step

    @property
    def waits(self) -> bool:
        """Whether a step mostly waits (I/O, a server, a sleep) rather than computes.

        A step that is slow because other programs use the core does not wait: it has no voluntary context switch.
        """
        return self.step_s > 200e-6 and self.cpu_s < 0.5 * self.step_s and self.pauses > 0.02


def measure_env(env: Any, seconds: float = PROBE_S) -> dict[str, Any]:
    """Step an env with random actions for a while, in its worker. Resets are part of what a step costs."""
    if _is_async(env):
        return {"step_s": 0.0, "cpu_s": 0.0, "obs_bytes": 0, "is_async": True}
    if isinstance(env, AgentEnv):
        return _measure_agents(env, seconds)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]
    obs, _ = unpack_result(env.reset(seed=0), 2, "reset")
    steps, warm, begun = 0, 3, _marks()
    while not _is_over(steps, time.perf_counter() - begun[0], seconds):
        result = env.step(actions[steps % 64])
        try:
            _, _, terminated, truncated, _ = result
        except (TypeError, ValueError):
            unpack_result(result, 5, "step")  # raises what a slot would
            raise
        if terminated or truncated:
            env.reset()
        steps += 1
        if steps == warm:  # the first steps run checks and fill caches; where they are slow, they are all there is
            steps, warm, begun = 0, 0, _marks()
    wall_s, cpu_s, pauses = (now - then for now, then in zip(_marks(), begun))
    size = sum(getattr(leaf, "nbytes", 8) for _, leaf in tree_leaves(obs))
    return {"step_s": wall_s / steps, "cpu_s": cpu_s / steps, "obs_bytes": int(size), "is_async": False, "pauses": pauses / steps}


def _is_over(steps: int, elapsed_s: float, seconds: float) -> bool:
    """Whether enough was measured: at least four steps, or fewer if they are very slow."""
    return steps > 0 and elapsed_s >= seconds * (1 if steps >= 4 else MOST)


def _marks() -> tuple[float, float, float]:
    return time.perf_counter(), time.process_time(), _pauses()


def _pauses() -> float:
    """Voluntary context switches of this thread; where the system does not count them, one more at every call."""
    try:
        import resource

        return float(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw)
    except (ImportError, AttributeError):  # not on this system
        return time.perf_counter() * 1e6


def _measure_agents(agent_env: AgentEnv, seconds: float) -> dict[str, Any]:
    """`measure_env` for many agents; choosing legal actions is not counted."""
    agent_env.begin(agent_env.reset(seed=0))
    steps, wall_s, cpu_s, begun = 0, 0.0, 0.0, time.perf_counter()
    while not _is_over(steps, time.perf_counter() - begun, seconds):
        action = agent_env.actions(agent_env.sample())
        start, cpu = time.perf_counter(), time.process_time()
        agent_env.take(agent_env.step(action))
        if agent_env.over:
            agent_env.begin(agent_env.reset())
        wall_s, cpu_s = wall_s + time.perf_counter() - start, cpu_s + time.process_time() - cpu
        steps += 1
    size = sum(array.nbytes for array in agent_env.obs)
    return {"step_s": wall_s / steps, "cpu_s": cpu_s / steps, "obs_bytes": size, "is_async": False}


def first_reset(env: Any) -> float:
    """Reset the env once, in its worker; seconds it took."""
    if _is_async(env):
        return 0.0
    start = time.perf_counter()
    env.reset(seed=0)
    return time.perf_counter() - start


def run_probe(recipe: Recipe, also: Callable[[Any], Any] | None = None) -> tuple[Probe, Any]:
    """Build one env in a worker of its own and measure it there: it never runs in the parent.

    `also` is a function over the env whose result comes second. Raises ProbeFailed when the env dies, hangs or raises; a
    hang is bounded by the deadline of what it hangs in.
    """
    from envfleet.backends.pipe import PipeBackend

    backend, patience_s = PipeBackend(num_workers=1), 0.0  # an env that failed gets no time to close
    try:
        built = backend.start(dataclasses.replace(recipe, factories=recipe.factories[:1]))[0]
        if not isinstance(built, dict):
            raise ProbeFailed(first_line(init_fault(0, built)))
        reset_s = _ask(backend, first_reset, recipe.reset_timeout_s, f"reset_timeout_s={recipe.reset_timeout_s:g}")
        # A hang from here on is most likely in a step. Resets among the steps may be slow, if the first one was.
        resets_s = min(recipe.reset_timeout_s, 0.5 + 10.0 * reset_s)
        limit_s = 2 * MOST * PROBE_S + resets_s + recipe.step_timeout_s
        probe = Probe(**_ask(backend, measure_env, limit_s, f"step_timeout_s={recipe.step_timeout_s:g}"))
        second = _ask(backend, also, recipe.step_timeout_s, "step_timeout_s") if also else None
        patience_s = 2.0
        return probe, second
    finally:
        backend.close(patience_s)


def _ask(backend: Any, function: Callable[[Any], Any], timeout_s: float, name: str) -> Any:
    """Run a function over the env in its worker."""
    backend.call([0], "call", "__apply__", (function,), {})
    deadline = time.monotonic() + timeout_s
    while not (replies := backend.replies(0.05)):
        backend.wait(0, 0.0)
        if backend.is_broken:
            raise KeeperLost
        if backend.losses:
            raise ProbeFailed(f"its worker {exit_words(backend.losses[0].exit_code)}")
        if time.monotonic() > deadline:
            raise ProbeFailed(f"it took longer than {name}")
    if isinstance(replies[0], Failure):
        raise ProbeFailed(replies[0].summary)
    return replies[0]


def _is_async(env: Any) -> bool:
    return inspect.iscoroutinefunction(env.step) or inspect.iscoroutinefunction(env.reset)
