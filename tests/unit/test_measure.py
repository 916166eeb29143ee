"""The measuring code: pairs, intervals, discarding, accounting."""

import os
import time

import pytest

from bench import stats
from bench.stats import Slice, difference_ns, estimate, ratio, take_turns

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="CPU shares are read from /proc")


def slices(*rates: float) -> dict[int, Slice]:
    return {turn: Slice(int(rate), 1.0, 1e9, 0.0) for turn, rate in enumerate(rates)}


def test_ratio_is_the_median_over_rounds_both_have():
    ours, theirs = slices(100, 200, 400), slices(50, 100)
    found = ratio(ours, theirs)
    assert (found.median, found.count) == (2.0, 2)
    assert ratio(ours, 100.0).median == 2.0


def test_interval_holds_the_median_and_shrinks():
    few, many = estimate([1.0, 2.0, 3.0]), estimate([1.0, 2.0, 3.0] * 30)
    assert few.low <= few.median <= few.high
    assert many.high - many.low <= few.high - few.low
    assert estimate([]).count == 0


def test_difference_is_in_cpu_time_per_step():
    assert difference_ns(slices(1_000_000), slices(2_000_000)).median == 500.0


def test_noisy_slices_are_repeated_up_to_a_bound(monkeypatch):
    shares = iter([0.5, 0.0, 0.5, 0.5, 0.5])
    monkeypatch.setattr(stats, "measure_slice", lambda run, seconds: Slice(1, 1.0, 1.0, next(shares)))
    found, thrown = take_turns({"a": lambda seconds: (1, seconds)}, rounds=2, seconds=0.1, max_repeats=3)
    assert thrown == 3
    assert [one.foreign for one in found["a"].values()] == [0.0, 0.5]


def test_a_contestant_that_raises_is_left_out():
    def broken(seconds):
        raise RuntimeError("broken")

    told = []
    runs = {"bad": broken, "good": lambda seconds: (1, 0.1)}
    found, _ = take_turns(runs, 3, 0.0, max_repeats=0, on_error=lambda name, error: told.append((name, str(error))))
    assert told == [("bad", "broken")]
    assert len(found["good"]) == 3 and not found["bad"]
    with pytest.raises(RuntimeError, match="broken"):
        take_turns(runs, 1, 0.0)


def test_cpu_of_the_tree_is_what_the_process_used():
    pids = stats.descendants(os.getpid())
    assert os.getpid() in pids
    before, own = stats.tree_cpu_ns([os.getpid()]), time.process_time_ns()
    while time.process_time_ns() - own < 20_000_000:
        pass
    assert stats.tree_cpu_ns([os.getpid()]) - before >= 20_000_000
    assert stats.tree_pss_bytes(os.getpid()) > 1_000_000


def test_order_rotates():
    order = []

    def runner(name):
        return lambda seconds: (order.append(name) or 1, 0.1)

    take_turns({name: runner(name) for name in "abc"}, 3, 0.0, max_foreign=2.0)
    assert "".join(order) == "abcbcacab"
