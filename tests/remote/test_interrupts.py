"""Ctrl-C, or any exception of a signal handler, at any moment: no later request meets the answer of an earlier one."""

import random
import signal

import pytest

from envfleet.errors import FleetError
from envfleet.remote import CapacityTable, HttpEnvClient, Server
from tests.support.lying_proxy import Counting, LyingProxy, in_thread, model_row, official_server


class Alarm(Exception):
    """An exception of the caller's own, as a time limit raises it."""


@pytest.fixture(params=[KeyboardInterrupt, Alarm], ids=["ctrl-c", "handler"])
def alarm(request):
    """Calling it has this thread interrupted after so many seconds; 0 takes the alarm back."""

    def ring(*_):
        raise request.param

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted_run(client, alarm, count, seed):
    """Steps and resets with an alarm at a random moment in each; every answer that arrives must be the model's."""
    rng = random.Random(seed)
    actions, episode, hits, good = None, 0, 0, 0
    while hits < count:
        try:
            # From now on, at whatever it is doing: also between two of our own lines, where the row is lost, not wrong.
            alarm(rng.uniform(1e-5, rng.choice([0.001, 0.004, 0.02, 0.1])))
            try:
                if actions is None:
                    episode += 1
                    result = client.reset(seed=episode, horizon=50)
                    asked = []
                else:
                    asked = [*actions, rng.randint(0, 4)]
                    result = client.step({"action": asked[-1]})
            finally:
                alarm(0)
        except (KeyboardInterrupt, Alarm):
            hits += 1
            # What the caller does not know, it must be told: the next step may not just go on.
            try:
                after = client.step({"action": 0})
            except FleetError:
                actions = None
            else:  # interrupted before anything was sent, or after the answer was handed over
                told = int(after.observation["obs"][0])
                known = len(actions) if actions is not None else 0
                assert told in (known + 1, known + 2), (told, known)
                actions = None
            continue
        except FleetError:
            actions = None
            continue
        obs, reward = model_row(episode, asked)
        assert [int(number) for number in result.observation["obs"]] == obs, (asked, result)
        assert not asked or result.reward == reward
        actions = None if result.done else asked
        good += 1
    return good


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an alarm in a weakref's callback is lost
@pytest.mark.parametrize("kind", ["ours", "official"])
def test_a_client_interrupted_at_random_moments(request, alarm, kind):
    count = 1000 if request.config.getoption("--full") else 60
    with Server(Counting, port=0, max_sessions=8, backend="serial") as server, in_thread(official_server) as port:
        target = server.port if kind == "ours" else port
        with in_thread(lambda: LyingProxy(target, {"delay": 0.2}, exact=kind == "ours")) as proxy:
            client = HttpEnvClient(proxy.url, capacity=CapacityTable(), message_timeout_s=5, down_timeout_s=10)
            good = interrupted_run(client, alarm, count, seed=4)
            result = client.reset(seed=9)
            assert result.observation["obs"][1] == 9 and good > 0
            assert client.step({"action": 1}).observation["obs"][0] == 1
            client.close()
