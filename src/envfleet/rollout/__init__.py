"""Episode and segment records, executors, collector, statistics, ledger, datasets.

Names are imported when first used: a thread executor does not pay for pyarrow.
"""

from __future__ import annotations

from envfleet.util.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__)
