"""Environments that ship. Importing this package registers them with Gymnasium: `gymnasium.make("envfleet/GridNavi-v0")`."""

from envfleet.envs.registry import register

register()
