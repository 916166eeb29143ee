"""The small parts: environments, names, views, report, loggers."""

from __future__ import annotations

import inspect
import io
import json
import os
import re

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envfleet.envs.catch import PixelCatch
from envfleet.envs.hidden_velocity import cartpole_no_velocity
from envfleet.envs.registry import SHORT_NAMES, resolve_env
from envfleet.envs.tmaze import DOWN, LEFT, RIGHT, UP, TMaze
from envfleet.errors import BadArgument
from envfleet.train.chart import line_chart
from envfleet.train.html_report import write_comparison, write_report
from envfleet.train.loggers import TableLogger, read_rows
from envfleet.train.terminal import Lines, Live, View, box, choose_view
from envfleet.train.video import VideoError, fleet_for_video, write_video


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_shipped_environments_are_proper_ones(name):
    if SHORT_NAMES[name].startswith(("pettingzoo", "mpe2", "envfleet.envs.gridworld", "envfleet.envs.connect4_aec")):
        pytest.skip("many agents: tests/multiagent has PettingZoo's own tests for it")
    factory = resolve_env(name)
    if inspect.iscoroutinefunction(factory().step):
        pytest.skip("an async environment: Gymnasium's checker cannot await it, tests/remote has its own")
    check_env(factory(), skip_render_check=True)
    first, second = factory(), factory()
    assert np.array_equal(first.reset(seed=5)[0], second.reset(seed=5)[0])


def test_tmaze_pays_for_memory_and_for_not_lagging():
    env = TMaze(length=4)
    goals = []
    for seed in range(40):
        observation, _ = env.reset(seed=seed)
        goals.append(observation[1])
        for _ in range(4):
            observation, reward, *_ = env.step(np.int64(RIGHT))
            assert reward == 0 and observation[1] == 0
        assert observation[2] == 1
        right = UP if goals[-1] > 0 else DOWN
        assert env.step(np.int64(right))[1:3] == (1.0, True)
    assert 10 < goals.count(1.0) < 30
    env.reset(seed=0)
    assert env.step(np.int64(LEFT))[1] == -0.25
    with pytest.raises(ValueError, match="at least one cell"):
        TMaze(0)


def test_catch_can_be_won_and_lost():
    env, totals = PixelCatch(), []
    for seed in range(20):
        env.reset(seed=seed)
        ended = False
        while not ended:
            # Cheats by looking inside: follow the ball for half of the games, flee from it in the others.
            side = np.sign(env._ball[1] - env._paddle) * (1 if seed % 2 else -1)
            _, reward, ended, *_ = env.step(np.int64(1 + side))
        totals.append(reward)
    assert all(total == 1 for total in totals[1::2]) and -1 in totals[::2]
    assert env.render().shape == (160, 160, 3)


def test_hidden_columns():
    full, part = gym.make("CartPole-v1"), cartpole_no_velocity()
    assert (full.reset(seed=1)[0][[0, 2]] == part.reset(seed=1)[0]).all()


def test_an_environment_is_found_by_module_and_name():
    assert resolve_env("gymnasium.envs.classic_control:CartPoleEnv")().action_space.n == 2
    assert resolve_env(TMaze) is TMaze
    for name, told in (
        ("nowhere:Env", "cannot be loaded"),
        ("envfleet.envs.tmaze:Nothing", "has no 'Nothing'"),
        ("zzzzzz", "module:attribute"),
    ):
        with pytest.raises(BadArgument, match=told):
            resolve_env(name)


STATUS = {"step": 100, "total_steps": 1000, "sps": 50.0, "return": 3.25, "env": "CartPole-v1", "left_s": 18.0,
          "n_completed_episodes": 7, "num_episodes": None, "collect_share": 0.25, "num_faults": 0}  # fmt: skip


def test_lines_say_the_numbers_and_each_fault_once_with_a_limit():
    out = io.StringIO()
    lines = Lines(out, every_s=1000.0)
    lines.start(["PPO on CartPole-v1", "nothing is saved"])
    lines.show(STATUS)
    for slot in range(10):
        lines.fault(f"slot {slot} failed")
    lines.note("quarantined")
    lines.show({**STATUS, "step": 200, "num_faults": 10})
    lines.close()
    first, second, numbers, *faults, note, last = out.getvalue().splitlines()
    assert (first, second, note) == ("PPO on CartPole-v1", "nothing is saved", "quarantined")
    assert numbers == "step 100/1,000  episodes 7  return 3.25  length –  50 steps/s  0:18 left"
    assert faults == ["fault: slot 0 failed", "fault: slot 1 failed", "fault: slot 2 failed"]
    assert last.startswith("step 200/1,000") and last.endswith("faults 10 (7 not shown)")
    assert type(choose_view(quiet=True)) is View and type(choose_view()) is Lines


def test_lines_count_episodes_when_these_end_the_run():
    out = io.StringIO()
    Lines(out).show({**STATUS, "num_episodes": 40})
    assert out.getvalue().startswith("episode 7/40  steps 100  return")


@pytest.mark.parametrize("width", [30, 60, 79])
def test_the_box_has_one_height_and_one_width_whatever_is_in_it(width):
    wild = {**STATUS, "return": -1.23456e-300, "env": "x" * 200, "step": 10**15, "num_faults": 10**9, "num_quarantined": 64}
    for status, returns in ((STATUS, []), (wild, [float("nan"), 1.0, -5.0] * 50), ({**STATUS, "num_episodes": 40}, [2.0])):
        lines = [line for _, line in box(status, returns, width)]
        assert len(lines) == (9 if width >= 70 else 14) and {len(line) for line in lines} == {width}
    assert any("7 of 40" in line for line in lines)


@pytest.mark.parametrize("width", [45, 69, 70, 79])
def test_the_box_cuts_no_usual_value_and_marks_what_it_cuts(width):
    usual = {**STATUS, "step": 1_000_000, "total_steps": 2_000_000, "num_faults": 12, "num_quarantined": 3, "wall_s": 3000.0}
    text = "\n".join(line for _, line in box(usual, [], width))
    for value in ("1,000,000 of 2,000,000", "50:00, 0:18 left", "12, quarantined slots 3", "3.25 (last 100)"):
        assert value in text
    assert "…" not in text
    assert "1,000,000,000,…" in "\n".join(line for _, line in box({**usual, "step": 10**15}, [], 34))


def test_the_box_is_drawn_in_place_also_after_the_terminal_was_made_narrower(monkeypatch):
    out, columns = io.StringIO(), [120]
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns[0], 24)))
    live = Live(out, every_s=0.0)
    live.show(STATUS)
    assert "\x1b[9F" not in out.getvalue()
    live.show(STATUS)
    assert out.getvalue().count("\x1b[9F") == 1  # up over its 9 lines
    columns[0] = 60  # a line of 79 characters is two now
    live.show(STATUS)
    assert out.getvalue().count("\x1b[18F") == 1
    live.fault("slot 3 failed")
    assert out.getvalue().endswith("\x1b[14Ffault: slot 3 failed\x1b[K\n\x1b[J")
    live.fault("slot 3 " + 100 * "." + " killed by signal 9")
    assert out.getvalue().endswith(" killed by signal 9\x1b[K\n\x1b[J")  # the cause is not cut off


def test_twelve_lines_of_a_chart_have_twelve_colours():
    chart = line_chart({str(i): [(0, i), (1, i)] for i in range(12)}, "Return", "steps", "return")
    assert len(set(re.findall(r'polyline fill="none" stroke="(#\w+)"', chart))) == 12


def test_tables_grow_columns_and_are_cut_back(tmp_path):
    logger = TableLogger(tmp_path)
    logger.log({"update": 1, "a": 1.0}, 10)
    logger.log({"update": 2, "a": 2.0, "b": 5.0}, 20)
    logger.log({"update": 3, "a": 3.0}, 30)
    logger.close()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,update,a,b", "10,1,1.0,", "20,2,2.0,5.0", "30,3,3.0,"]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 40, "upd')  # a kill in the middle of a line
    logger = TableLogger(tmp_path, resumed_at=2)
    logger.log({"update": 3, "a": 9.0}, 30)
    logger.close()
    assert [row["update"] for row in read_rows(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "metrics.csv").read_text().splitlines()[-1] == "30,3,9.0,"


def test_report_escapes_and_stands_alone(tmp_path):
    rows = [{"step": i, "update": i, "return": i * 1.5, "value_loss": float("nan")} for i in range(1, 900)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.json").write_text(json.dumps({"env": "<b>x</b>", "gamma": 0.9}))
    page = write_report(tmp_path, {"faults": ["slot 3 failed & died"] * 60}).read_text()
    assert "&lt;b&gt;" in page and "failed &amp; died" in page and "60 in all" in page
    assert page.count("<svg") == 1 and "http" not in page and "<script" not in page and len(page) < 40_000
    assert "environment steps" in page and "mean of the last 100" in page
    again = write_report(tmp_path, path=tmp_path / "again.html")
    assert again.read_text() == page


def test_runs_are_compared_on_one_page(tmp_path):
    for name, rate in (("slow", 1), ("fast", 2)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"step": i * 10, "wall_s": i / rate, "update": i, "return": float(i)} for i in range(1, 20)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.json").write_text(json.dumps({"env": "X", "gamma": 0.9, "num_envs": rate, "out": str(folder)}))
    page = write_comparison([tmp_path / "slow", tmp_path / "fast"], tmp_path / "both.html").read_text()
    assert page.count("<svg") == 2 and page.count("<polyline") == 4  # over steps and over time, a line per run
    assert page.count(">fast</text>") == 2 and "training time (s)" in page
    assert "num_envs" in page and "gamma" not in page and "http" not in page
    with pytest.raises(BadArgument, match="there is no run in"):
        write_comparison([tmp_path / "slow", tmp_path / "gone"], tmp_path / "both.html")


def test_a_video_file_needs_frames(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    frames = [np.full((33, 47, 3), value, np.uint8) for value in range(0, 250, 10)]
    assert write_video(tmp_path / "deep" / "a.mp4", frames).stat().st_size > 500
    with pytest.raises(VideoError, match="no frame"):
        write_video(tmp_path / "b.mp4", [])
    with pytest.raises(VideoError, match="render_mode"):
        fleet_for_video(TMaze, {})


def test_the_demonstration_shows_five_parts_and_writes_a_page(tmp_path, capsys):
    from envfleet.cli.demo import run_demo

    solved = run_demo(str(tmp_path / "demo"), total_steps=1024)
    out = capsys.readouterr().out
    page = (tmp_path / "demo" / "demo.html").read_text()
    assert not solved and out.count("✓") == 4 and out.count("✗ not solved") == 1
    assert "kill -9" in out and "slots 2 and 3 have one row marked FAULT each" in out and "used 40 " in out
    assert page.count("<h2>") == 5 and page.count("<svg") == 4 and "http" not in page
    assert (tmp_path / "demo" / "run" / "report.html").exists()
    from envfleet.cli.demo import free_folder

    assert free_folder(tmp_path / "demo") == tmp_path / "demo-2"  # an earlier demo is not overwritten


def test_the_box_has_what_a_curriculum_assigns_the_likeliest_first():
    chances = {"probability/easy": 0.125, "probability/hard": 0.625, "probability/medium": 0.25}
    lines = [line for _, line in box({**STATUS, **chances}, [], 79)]
    assert [line for line in lines if "assigns" in line] == [
        "│ " + "assigns  hard: 0.625  medium: 0.25  easy: 0.125".ljust(75) + " │"
    ]
