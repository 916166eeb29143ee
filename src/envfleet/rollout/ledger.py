"""The ledger: every started episode is counted exactly once as used, dropped or failed, with a reason."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from envfleet.errors import LedgerWarning


@dataclass
class Ledger:
    """started = used + dropped + failed + in flight, at any moment.

    An attempt counts: an episode that failed and was begun again was started twice and failed once. Only
    counts are kept, so the ledger of a billion episodes is as small as that of ten.

    Example:
        >>> ledger = Ledger()
        >>> for _ in range(3):
        ...     ledger.start()
        >>> ledger.use()
        >>> ledger.fail("lost in step")
        >>> print(ledger)
        started 3 = used 1 + dropped 0 + failed 1 + in flight 1 (failed: 1 lost in step)
    """

    started: int = 0
    used: int = 0
    retried: int = 0  # of the failed: those that were begun again
    dropped: Counter[str] = field(default_factory=Counter)  # reason → count
    failed: Counter[str] = field(default_factory=Counter)  # reason → count

    def start(self, count: int = 1) -> None:
        """Count episodes that begin."""
        self.started += count

    def use(self, count: int = 1) -> None:
        """Count episodes that were handed to the caller complete."""
        self.used += count

    def drop(self, reason: str, count: int = 1) -> None:
        """Count episodes that were dropped although they did not fail."""
        if count:
            self.dropped[reason] += count

    def fail(self, reason: str, retried: bool = False) -> None:
        """Count an episode that its environment did not finish."""
        self.failed[reason] += 1
        self.retried += retried

    @property
    def in_flight(self) -> int:
        """Episodes that run, or are complete and not yet handed over."""
        return self.started - self.used - self.dropped.total() - self.failed.total()

    @property
    def lost(self) -> int:
        """Failed episodes that were not begun again: what the caller will not get."""
        return self.failed.total() - self.retried

    def state(self) -> dict[str, Any]:
        """The counts as plain values, for a checkpoint."""
        return {**vars(self), "dropped": dict(self.dropped), "failed": dict(self.failed)}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.started, self.used, self.retried = state["started"], state["used"], state["retried"]
        self.dropped, self.failed = Counter(state["dropped"]), Counter(state["failed"])

    def __add__(self, other: Ledger) -> Ledger:
        """The counts of both."""
        return Ledger(*(mine + vars(other)[name] for name, mine in vars(self).items()))

    def __str__(self) -> str:
        reasons = [
            f"{name}: " + ", ".join(f"{count} {reason}" for reason, count in bin_.most_common())
            for name, bin_ in (("dropped", self.dropped), ("failed", self.failed))
            if bin_
        ]
        if self.retried:
            reasons.append(f"{self.retried} of the failed were started again")
        notes = f" ({'; '.join(reasons)})" if reasons else ""
        return (
            f"started {self.started} = used {self.used} + dropped {self.dropped.total()} "
            f"+ failed {self.failed.total()} + in flight {self.in_flight}{notes}"
        )

    def warn_if_lost(self, lost_before: int) -> None:
        """Warn if episodes were lost since `lost` had this value: the caller gets fewer than were started."""
        lost = self.lost - lost_before
        if lost:
            message = f"{lost} episodes failed and are missing from what was returned, which may bias it: {self}"
            warnings.warn(message, LedgerWarning, stacklevel=3)
