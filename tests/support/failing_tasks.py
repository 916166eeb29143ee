"""GridNavi that fails where a test wants it, for tests of tasks and faults."""

from __future__ import annotations

import os

from envfleet.envs.gridnavi import GridNavi


class FailsOnTasks(GridNavi):
    """Its step fails in the episodes of some tasks, every time."""

    def __init__(self, bad=(), horizon=15):
        super().__init__(horizon=horizon)
        self.bad = {tuple(task) for task in bad}
        self.resets = []  # options of every reset

    def reset(self, *, seed=None, options=None):
        self.resets.append(options)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if tuple(self.task) in self.bad:
            raise RuntimeError(f"task {self.task} cannot be played")
        return super().step(action)

    def pid(self):
        return os.getpid()
