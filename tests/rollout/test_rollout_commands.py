import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from envfleet.cli.main import main
from envfleet.rollout import Rollouts

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")


def collect(out, *more, env="CartPole-v1"):
    return main(["collect", env, "--out", str(out), "--num-envs", "4", "--backend", "serial", *more])


def test_collect_inspect_and_go_on(tmp_path, capsys):
    assert collect(tmp_path / "a", "--episodes", "12") == 0
    told = capsys.readouterr().out
    assert "ledger: started 12 = used 12" in told and "verdict: " in told and "12 episodes in" in told
    assert collect(tmp_path / "a", "--episodes", "20", "--num-envs", "3", "--mode", "async") == 0
    assert "12 of 20 episodes are there already" in capsys.readouterr().out
    assert collect(tmp_path / "a", "--episodes", "20") == 0  # complete: nothing to do
    assert collect(tmp_path / "b", "--episodes", "20") == 0
    assert Rollouts.load(tmp_path / "a").digest() == Rollouts.load(tmp_path / "b").digest()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "a")]) == 0
    told = capsys.readouterr().out
    assert "episodes                20" in told and "observations: float32 [4] per step" in told
    assert (tmp_path / "a" / "_returns.png").read_bytes()[:4] == b"\x89PNG"
    assert not list((tmp_path / "a").glob(".*.tmp"))
    assert main(["inspect", str(tmp_path / "a"), "--json", "--no-plot"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_episodes"] == 20 and found["run"]["env"] == "CartPole-v1"


def test_collect_refuses_what_is_another_collection(tmp_path, capsys):
    assert collect(tmp_path, "--episodes", "2") == 0
    assert collect(tmp_path, "--episodes", "4", "--seed", "1") == 2
    assert "seed: 0 then, 1 now" in capsys.readouterr().err
    capsys.readouterr()
    assert collect(tmp_path / "x", "--policy", "nonsense") == 2
    told = capsys.readouterr()
    assert "'random', an existing checkpoint, or MODULE:NAME" in told.err
    assert not told.out  # refused before a fleet was made
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    (tmp_path / "file").write_text("")
    assert collect(tmp_path / "file" / "below") == 2
    assert "cannot be made" in capsys.readouterr().err


def test_a_plot_replaces_the_one_before_only_when_it_is_complete(tmp_path, monkeypatch):
    from envfleet.cli import plot

    picture = tmp_path / "a.png"
    picture.write_bytes(b"the one before")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        plot.draw(picture, "title", [lambda axes: axes.plot([1, 2])])
    assert picture.read_bytes() == b"the one before" and [found.name for found in tmp_path.iterdir()] == ["a.png"]


def test_lost_episodes_are_one_line_in_a_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_raising.py").write_text(
        "from envfleet.envs.probe import Faulty\ndef make():\n    return Faulty('step', 'raise', at=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert collect(tmp_path / "d", "--episodes", "1", "--max-retries", "0", env="my_raising:make") != 0
    told = capsys.readouterr().err
    assert "envfleet: warning: 1 episodes failed" in told and "collect.py" not in told


def test_an_interrupted_collection_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_impatience.py").write_text(
        "import numpy as np\ncalls = []\ndef stop(obs):\n    calls.append(1)\n    if len(calls) == 60:\n"
        "        raise KeyboardInterrupt\n    return np.zeros(len(obs), np.int64)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--episodes", "100", "--policy", "my_impatience:stop"]
    assert collect(tmp_path / "d", *words) == 130
    there = len(Rollouts.load(tmp_path / "d"))
    assert there and f"{there} of 100 episodes are in" in capsys.readouterr().out
    assert collect(tmp_path / "d", *words) == 0
    assert len(Rollouts.load(tmp_path / "d")) == 100


def test_collect_with_a_policy_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_policy.py").write_text("import numpy as np\ndef left(obs):\n    return np.zeros(len(obs), np.int64)\n")
    monkeypatch.chdir(tmp_path)
    assert collect(tmp_path / "d", "--episodes", "5", "--policy", "my_policy:left") == 0
    assert all((rollout.actions == 0).all() for rollout in Rollouts.load(tmp_path / "d"))


def test_collect_with_a_checkpoint(tmp_path, capsys):
    pytest.importorskip("torch")
    run = ["--num-envs", "4", "--num-steps", "32", "--total-steps", "256", "--backend", "serial", "--quiet"]
    assert main(["train", "CartPole-v1", *run, "--out", str(tmp_path / "run")]) == 0
    for name, mode in (("a", "sync"), ("b", "async")):
        assert collect(tmp_path / name, "--episodes", "6", "--policy", str(tmp_path / "run"), "--mode", mode) == 0
    a, b = Rollouts.load(tmp_path / "a"), Rollouts.load(tmp_path / "b")
    assert [len(rollout) for rollout in a] == [len(rollout) for rollout in b]
    assert set(a[0].policy_version.tolist()) == {2}


@pytest.mark.parametrize("name", ["tmaze", "cartpole-novel"])
def test_minari_recovers_environments_that_are_not_registered(tmp_path, name):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    words = ["--out", str(tmp_path), "--num-envs", "2", "--episodes", "2", "--max-steps", "5", "--format", "minari"]
    assert main(["collect", name, "--backend", "serial", *words]) == 0
    dataset = minari.MinariDataset(tmp_path / name / "random-v0" / "data")
    env = dataset.recover_environment()
    np.testing.assert_array_equal(env.reset(seed=Rollouts.load(tmp_path)[0].seed)[0], dataset[0].observations[0])


def test_collect_minari(tmp_path, capsys):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    assert collect(tmp_path / "m", "--episodes", "6", "--format", "minari") == 0
    assert collect(tmp_path / "p", "--episodes", "6") == 0
    assert Rollouts.load(tmp_path / "m").digest() == Rollouts.load(tmp_path / "p").digest()
    dataset = minari.MinariDataset(tmp_path / "m" / "CartPole" / "random-v0" / "data")
    assert dataset.total_episodes == 6
    assert dataset.recover_environment().spec.id == "CartPole-v1"
    assert not (tmp_path / "m" / "_parts").exists()
    assert collect(tmp_path / "m", "--episodes", "6", "--format", "minari") == 0
    assert main(["inspect", str(tmp_path / "m"), "--no-plot"]) == 0


def test_a_killed_collection_loads_and_the_same_command_completes_it(tmp_path):
    words = [sys.executable, "-m", "envfleet", "collect", "CartPole-v1", "--out", str(tmp_path / "a"), "--episodes", "150",
             "--num-envs", "4", "--backend", "shm", "--workers", "2", "--mode", "async"]  # fmt: skip
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    tail = tmp_path / "a" / "_tail-00000.records"
    while not (tail.exists() and tail.stat().st_size > 40_000):
        try:
            process.wait(timeout=0.02)
            break
        except subprocess.TimeoutExpired:
            continue
    process.send_signal(signal.SIGKILL)
    process.wait()
    half = Rollouts.load(tmp_path / "a")
    assert 0 < len(half) < 150
    assert [rollout.episode for rollout in half] == list(range(len(half)))  # in ticket order: an unbiased beginning
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=100)
    assert collect(tmp_path / "b", "--episodes", "150") == 0
    completed, straight = Rollouts.load(tmp_path / "a"), Rollouts.load(tmp_path / "b")
    assert len(completed) == 150 and completed.digest() == straight.digest()
    assert len({rollout.episode for rollout in completed}) == 150


def test_sweep_prints_the_best_setting_and_draws_a_plot(tmp_path, capsys):
    picture = tmp_path / "sweep.png"
    words = ["sweep", "CartPole-v1", "--workers", "1,2", "--backends", "serial,thread", "--seconds", "0.1", "--out"]
    assert main([*words, str(picture)]) == 0
    told = capsys.readouterr().out
    assert "serial" in told and "thread" in told and "best: " in told
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main(["sweep", "CartPole-v1", "--workers", "two"]) == 2
    assert main(["sweep", "CartPole-v1", "--workers", "1", "--backends", "nope", "--no-plot"]) == 2


def test_a_progress_bar_on_a_terminal_only(monkeypatch):
    rich = pytest.importorskip("rich")
    import envfleet as ef
    from envfleet.rollout import Collector

    class Terminal:
        def __init__(self):
            self.text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    assert rich is not None
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal gets no bar
    with ef.make("CartPole-v1", num_envs=2, backend="serial") as fleet:
        collector = Collector(fleet, random_actions=True)
        stream = collector.episodes(3, progress=True)
        assert len(list(stream)) == 3  # pytest's stderr is no terminal
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        assert len(list(collector.episodes(3, progress=True))) == 3
        assert len(list(collector.episodes(num_steps=30, progress=True))) > 0
    assert "mean return" in terminal.text
    assert np.isfinite(collector.stats().mean_return)
