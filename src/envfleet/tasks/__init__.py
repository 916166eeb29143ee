"""Tasks: where they are drawn from, who gets which, and curricula. Nothing here steps an environment."""

from envfleet.util.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__)
