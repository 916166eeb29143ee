"""PPO over a fleet: configuration, advantage, update, loop, checkpoints, loggers, video and report.

Names are imported when they are first used, so that `import envfleet.train` needs no PyTorch.
"""

from __future__ import annotations

from envfleet.util.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__)
