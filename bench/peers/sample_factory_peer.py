"""Sample Factory: its own sampler with two workers. It always has a (tiny) model in the loop, so it is beside the others."""

import os
import sys
import time
from queue import Empty

from serve import plain, serve


def make_env(name, cfg, env_config, render_mode=None):
    import gymnasium as gym

    return gym.make(name)


def sampler(env_name, slots):
    from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
    from sample_factory.algo.utils.env_info import obtain_env_info_in_a_separate_process
    from sample_factory.algo.utils.rl_utils import samples_per_trajectory
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env

    register_env(env_name, make_env)
    words = [f"--env={env_name}", "--experiment=bench", "--train_dir=/tmp/envfleet-bench-sf", "--device=cpu",
             "--num_workers=2", f"--num_envs_per_worker={max(2, slots // 2)}", "--worker_num_splits=2",
             "--rollout=16", "--use_rnn=False", "--encoder_mlp_layers", "64", "64"]  # fmt: skip
    parser, _ = parse_sf_args(words)
    cfg = parse_full_cfg(parser, words)
    api = SyncSamplingAPI(cfg, obtain_env_info_in_a_separate_process(cfg))
    api.start()
    queue = api.traj_queue

    def fill():
        # It samples on by itself until its queue is full: only then is it idle, as it must be while others are measured.
        end = time.perf_counter() + 30
        while not queue.full() and time.perf_counter() < end:
            time.sleep(0.01)

    def run(seconds):
        while True:  # what was sampled before the slice does not count
            try:
                queue.get_nowait()
            except Empty:
                break
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            steps += samples_per_trajectory(api.get_trajectories_sync())
        took = time.perf_counter() - start
        fill()
        return steps, took

    return run


if __name__ == "__main__":
    mode, env_name, slots = sys.argv[1], sys.argv[2], int(sys.argv[3])
    serve((plain if mode == "plain" else sampler)(env_name, slots))
    os._exit(0)  # its sampling thread would not let us go
