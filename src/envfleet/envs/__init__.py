"""Environments that ship. Importing this package registers them with Gymnasium: `gymnasium.make("envfleet/GridNavi-v0")`."""

from envfleet.envs.registry import register
from envfleet.util.lazy_names import attach

register()

__getattr__, __dir__, __all__ = attach(__name__)
