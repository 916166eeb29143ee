"""Views of a fleet for other libraries: `envfleet.adapters.sb3`, `.torchrl`, `.tianshou`, `.rllib`, `.gymnasium`,
loaded when first used."""

from __future__ import annotations

from envfleet.util.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__)
