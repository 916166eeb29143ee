"""PPO over a fleet: configuration, advantage, update, loop, checkpoints, loggers, video and report."""
