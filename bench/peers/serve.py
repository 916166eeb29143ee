"""The other end of `remote`: runs in a peer's own venv, so it imports nothing of ours."""

import json
import sys
import time


def serve(run):
    """Answer each line with a slice. `run(seconds)` gives the steps it did, or (steps, seconds)."""
    out = sys.stdout
    run(0.1)
    out.write("bench " + json.dumps({"steps": 0, "seconds": 0.0}) + "\n")
    out.flush()
    for line in sys.stdin:
        start = time.perf_counter()
        done = run(float(line))
        steps, took = done if isinstance(done, tuple) else (done, time.perf_counter() - start)
        out.write("bench " + json.dumps({"steps": steps, "seconds": took}) + "\n")
        out.flush()


def plain(env_name, slots):
    """The plain loop of this venv's Gymnasium."""
    import gymnasium as gym

    envs = [gym.make(env_name) for _ in range(slots)]
    actions = [[env.action_space.sample() for env in envs] for _ in range(16)]
    for i, env in enumerate(envs):
        env.reset(seed=i)

    def run(seconds):
        steps, end, turn = 0, time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            for env, action in zip(envs, actions[turn % 16]):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            steps += slots
            turn += 1
        return steps

    return run
