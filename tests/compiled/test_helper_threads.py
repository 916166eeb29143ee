"""Threads that help with a pass of a dense network: the same bits whoever helps, in forked children too, and none left when nothing is to do."""

import os
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from envfleet.networks.numpy_layers import DENSE, NumpyLayers
from tests.support.system import until

pytestmark = pytest.mark.skipif(DENSE is None, reason="envfleet._dense is not built")


def layers_and_rows(rows):
    torch.manual_seed(rows)
    layers = NumpyLayers([nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)])
    return layers, torch.randn(rows, 5).numpy()


def in_a_child(check):
    """Whether a forked process finds it true."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    ended = []
    until(lambda: ended.append(os.waitpid(child, os.WNOHANG)) or ended[-1][0])
    return ended[-1][1] == 0


def num_threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("rows", [1, 64, 127, 128, 300, 5000])
def test_a_row_has_the_same_bits_whoever_helps(rows):
    layers, x = layers_and_rows(rows)
    whole = layers(x)
    for threads in (2, 3, 8, 100):
        for _ in range(50):
            assert np.array_equal(layers(x, threads), whole)


def test_helpers_round_as_their_caller_does():
    """Whether numbers near zero become zero is a setting of each thread, and may change while helpers stay."""
    only = nn.Linear(64, 64)
    nn.init.zeros_(only.bias)
    layers, x = NumpyLayers([only]), torch.randn(5000, 64).numpy() * np.float32(1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush numbers near zero")
    torch.set_flush_denormal(False)

    def same():
        for flush in (True, False):  # in this order: numbers near zero are slow, so that helpers take their part of them
            torch.set_flush_denormal(flush)
            whole = layers(x)
            if np.any(whole) == flush or not all(np.array_equal(layers(x, 8), whole) for _ in range(50)):
                return False
        return True

    assert in_a_child(same)  # where no helper of another test is left


def test_callers_in_several_threads_do_not_disturb_each_other():
    """One of them has the helpers, the others work alone."""
    jobs = [layers_and_rows(rows) for rows in (256, 1500, 5000)]
    wrong = []

    def work(layers, x, whole):
        for _ in range(100):
            if not np.array_equal(layers(x, 3), whole):
                wrong.append(len(x))

    threads = [threading.Thread(target=work, args=(layers, x, layers(x))) for layers, x in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_helpers_end_when_nothing_is_to_do():
    layers, x = layers_and_rows(5000)
    layers(x)  # whatever the first call of a process starts
    before = num_threads()
    layers(x, 4)
    until(lambda: num_threads() <= before)


@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_has_helpers_of_its_own(busy):
    """Also where another thread's pass is under way at the moment of the fork."""
    layers, x = layers_and_rows(5000)
    whole, stop = layers(x), threading.Event()

    def work():
        while not stop.is_set():
            layers(x, 3)

    worker = threading.Thread(target=work)
    layers(x, 3)
    if busy:
        worker.start()
    try:
        for _ in range(5):
            assert in_a_child(lambda: all(np.array_equal(layers(x, 3), whole) for _ in range(20)))
            assert np.array_equal(layers(x, 3), whole)
    finally:
        stop.set()
        if busy:
            worker.join(60)


PIECES = """
#include <stdint.h>
#include <stdlib.h>
#include "helpers.h"
typedef struct { int next, done[40]; } Piece;
static void *take(void *argument) {
    Piece *piece = argument;
    for (int at; (at = __atomic_fetch_add(&piece->next, 1, __ATOMIC_RELAXED)) < 40;) piece->done[at]++;
    return NULL;
}
static void *call(void *wrong) {
    for (int i = 0; i < 1000; i++) {
        Piece piece = {0};
        with_helpers(i % 5, i % 3, take, &piece);
        for (int at = 0; at < 40; at++) *(int *)wrong += piece.done[at] != 1;
    }
    return NULL;
}
int main(void) {
    pthread_t other;
    int wrong = 0, others = 0;
    helpers_begin();
    pthread_create(&other, NULL, call, &others);
    call(&wrong);
    pthread_join(other, NULL);
    return wrong || others;
}
"""


def test_helpers_and_callers_do_not_race(tmp_path):
    """Under the thread sanitizer, with two callers."""
    source, program = tmp_path / "pieces.c", tmp_path / "pieces"
    source.write_text(PIECES)
    flags = ["-O1", "-g", "-D_GNU_SOURCE", "-fsanitize=thread", f"-I{Path(__file__).parents[2] / 'compiled'}", "-pthread"]
    if (
        not (gcc := shutil.which("gcc"))
        or subprocess.run([gcc, *flags, source, "-o", program, "-lm"], capture_output=True).returncode
    ):
        pytest.skip("no gcc with a thread sanitizer")
    env = {**os.environ, "LD_PRELOAD": ""}  # under another sanitizer
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, env=env)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert not done.returncode, done.stderr
