"""Run many reinforcement-learning environments at once, on one small supervised core.

Importing this module does nothing but define names: every public name is imported when it is first used.
"""

from __future__ import annotations

from envfleet.util.lazy_names import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__)
