"""Interrupts at any moment of `add` and `close`, writers that die, readers and second writers beside one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import envfleet
from envfleet.errors import DatasetError, FolderBusy
from envfleet.rollout import DatasetWriter, Rollout, iter_rollouts
from envfleet.rollout.datasets import store
from tests.support.dataset_files import episode, killed, numbers_on_disk, resumed
from tests.support.system import child_env

pytest.importorskip("pyarrow")
SOURCE = str(Path(envfleet.__file__).parent)


class Interrupt(BaseException):
    """What a signal handler raises."""


def interrupted_at(line, call):
    """Run a call and raise when it comes to its n-th line of our source; True if it came that far."""
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def without_a_step(number):
    return Rollout(observations=[], actions=[], rewards=[], terminated=[], truncated=[], episode=number)


STRIDES = [pytest.param(13, id="some"), pytest.param(1, id="all", marks=pytest.mark.full)]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("case", ["first", "later", "rolling", "early", "early moves"])
def test_an_interrupt_at_any_line_of_add(tmp_path, case, stride):
    line, reached = 0, True
    while reached:
        line += stride
        place = tmp_path / str(line)
        writer = DatasetWriter(place, shard_episodes=3)
        numbers = {"first": 0, "later": 1, "rolling": 2, "early": 0, "early moves": 0}[case]
        for number in range(numbers):
            writer.add(episode(number, 2))
        if case == "early moves":
            writer.add(without_a_step(0))
            numbers = 1
        last = without_a_step(numbers) if case == "early" else episode(numbers, 2)
        reached = interrupted_at(line, lambda w=writer, one=last: w.add(one))
        there = {rollout.episode for rollout in iter_rollouts(place)} if store.data_files(place) else set()
        assert there == writer.ids and there >= set(range(numbers)), line
        for number in range(numbers, numbers + 3):  # and it goes on
            if number not in writer.ids:
                writer.add(without_a_step(number) if (case, number) == ("early", 0) else episode(number, 2))
        writer.close()
        found = [rollout.episode for rollout in iter_rollouts(place)]
        assert sorted(found) == list(range(numbers + 3)), line
        assert not list(place.glob("_tail*")) and not list(place.glob("_early*")), line
    assert line > 26


@pytest.mark.parametrize("stride", STRIDES)
def test_an_interrupt_at_any_line_of_close_and_of_resuming(tmp_path, stride):
    for kind in ("close", "resume"):
        line, reached = 0, True
        while reached:
            line += stride
            place = tmp_path / kind / str(line)
            writer = DatasetWriter(place)
            for number in range(3):
                writer.add(episode(number, 2))
            if kind == "close":
                reached = interrupted_at(line, writer.close)
                assert numbers_on_disk(place, 2) == [0, 1, 2], line
                writer.close()
            else:
                writer._sink.close()
                writer._lock.close()
                reached = interrupted_at(line, lambda at=place: DatasetWriter(at, resume=True).close())
            assert numbers_on_disk(place, 2) == [0, 1, 2], line
            again, told = resumed(place)
            again.close()
            assert again.ids == {0, 1, 2} and not told
            assert numbers_on_disk(place, 2) == [0, 1, 2] and not list(place.glob("_tail*"))


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.full)])
def test_signals_at_random_moments(tmp_path, count):
    """A timer whose handler raises, at moments nobody chose, also inside system calls and compiled code."""

    def handler(number, frame):
        raise Interrupt

    rng = random.Random(5)
    before = signal.signal(signal.SIGALRM, handler)
    writer, number, interrupts = DatasetWriter(tmp_path, shard_episodes=40), 0, 0
    window = 1e-3  # follows the machine: as many calls are interrupted as are not
    try:
        deadline = time.monotonic() + 120
        while interrupts < count and time.monotonic() < deadline:
            one = episode(number, 30)
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, window))
                writer.add(one)
                signal.setitimer(signal.ITIMER_REAL, 0)
                window = max(window / 1.1, 1e-4)
            except Interrupt:
                interrupts += 1
                window *= 1.1
                if interrupts % (count // 10) == 0 and writer.ids:
                    assert {rollout.episode for rollout in iter_rollouts(tmp_path)} == writer.ids
            number += one.episode in writer.ids
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    writer.close()
    assert interrupts == count and number > 20 and numbers_on_disk(tmp_path, 30) == list(range(number))


# -- beside each other -----------------------------------------------------------------------------------------------------

WRITER = """
import sys
from tests.support.dataset_files import episode
from envfleet.rollout import DatasetWriter
with DatasetWriter(sys.argv[1], shard_episodes=5) as writer:
    for number in range(150):
        writer.add(episode(number, 4))
        print(number, flush=True)
"""


def test_a_reader_beside_a_writer_misses_nothing(tmp_path):
    words = [sys.executable, "-c", WRITER, str(tmp_path)]
    process = subprocess.Popen(words, env=child_env(), stdout=subprocess.PIPE, text=True)
    reads = 0
    for line in process.stdout:  # each line: so many are committed
        if int(line) % 10 == 3:
            assert set(range(int(line) + 1)) <= {rollout.episode for rollout in iter_rollouts(tmp_path)}
            reads += 1
    assert process.wait() == 0 and reads == 15
    process.stdout.close()
    assert numbers_on_disk(tmp_path, 4) == list(range(150))


def test_a_tail_that_becomes_a_shard_between_listing_and_opening(tmp_path, monkeypatch):
    writer = DatasetWriter(tmp_path)
    for number in range(4):
        writer.add(episode(number))
    real, calls = store.data_files, []

    def list_then_close(directory):
        found = real(directory)
        if not calls:
            writer.close()
        calls.append(found)
        return found

    monkeypatch.setattr("envfleet.rollout.datasets.parquet.data_files", list_then_close)
    assert numbers_on_disk(tmp_path) == list(range(4)) and len(calls) == 2


def test_a_tail_that_becomes_a_shard_while_it_is_listed(tmp_path, monkeypatch):
    writer = DatasetWriter(tmp_path)
    for number in range(4):
        writer.add(episode(number))
    real = store.tails

    def close_then_list(directory):
        writer.close()
        return real(directory)

    monkeypatch.setattr("envfleet.rollout.datasets.store.tails", close_then_list)
    assert numbers_on_disk(tmp_path) == list(range(4))


def test_the_owner_of_the_lock_is_named_and_a_dead_one_does_not_block(tmp_path):
    words = [sys.executable, "-c", WRITER.replace("print(number", "(number and input()); print(number")]
    words += [str(tmp_path)]
    process = subprocess.Popen(words, env=child_env(), stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    process.stdout.readline()
    with pytest.raises(FolderBusy, match=f"another process is writing to .* \\(process {process.pid} on ") as busy:
        DatasetWriter(tmp_path, resume=True)
    assert busy.value.owner["pid"] == process.pid
    process.kill()
    process.communicate()
    writer, told = resumed(tmp_path)
    writer.close()
    assert writer.ids >= {0} and not told


def test_a_forked_child_neither_holds_the_lock_nor_writes(tmp_path):
    writer = DatasetWriter(tmp_path)
    writer.add(episode(0))
    begun, ready = os.pipe()
    child = os.fork()
    if not child:
        try:
            writer.add(episode(1))
        except DatasetError:
            writer.close()  # does nothing here
            os.write(ready, b"refused")
            signal.pause()
        os._exit(1)
    try:
        assert os.read(begun, 100) == b"refused"
        writer.add(episode(1))
        writer.close()
        with DatasetWriter(tmp_path, resume=True) as again:  # the child lives, and holds nothing
            again.add(episode(2))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(begun)
        os.close(ready)
    assert numbers_on_disk(tmp_path) == [0, 1, 2]


def test_nothing_is_left_open(tmp_path, no_leaks):
    killed(tmp_path / "a", 3)
    writer, _ = resumed(tmp_path / "a")
    writer.add(episode(3))
    writer.close()
    assert numbers_on_disk(tmp_path / "a") == [0, 1, 2, 3]
