"""The small parts: environments, names, views, report, loggers."""

from __future__ import annotations

import inspect
import io
import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envfleet.envs.catch import PixelCatch
from envfleet.envs.hidden_velocity import cartpole_no_velocity
from envfleet.envs.registry import SHORT_NAMES, resolve_env
from envfleet.envs.tmaze import DOWN, LEFT, RIGHT, UP, TMaze
from envfleet.errors import BadArgument
from envfleet.train.loggers import TableLogger, read_rows
from envfleet.train.report import write_report
from envfleet.train.terminal import Lines, View, choose_view, table
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


STATUS = {"step": 100, "total_steps": 1000, "sps": 50.0, "return": 3.25, "env": "CartPole-v1", "plan": "shm, 2 workers",
          "n_completed_episodes": 7, "n_envs": 8, "collect_share": 0.25}  # fmt: skip


def test_views_show_the_status_as_lines_or_as_a_table(capsys):
    out = io.StringIO()
    lines = Lines(out, every_s=1000.0)
    lines.show(STATUS)
    lines.show({**STATUS, "step": 200})
    lines.close()
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["100/1,000", "200/1,000"]
    assert type(choose_view(quiet=True)) is View and isinstance(choose_view(), Lines)
    rich = pytest.importorskip("rich.console")
    console = rich.Console(file=io.StringIO(), width=100)
    console.print(table(STATUS))
    text = console.file.getvalue()
    for part in ("3.25", "shm, 2 workers", "n_completed_episodes", "0:18", "25% / 75%"):
        assert part in text


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
    about = {"title": "<b>x</b>", "faults": ["slot 3 failed & died"] * 60, "config": {"gamma": 0.9}}
    page = write_report(tmp_path, about).read_text()
    assert "&lt;b&gt;" in page and "failed &amp; died" in page and "60 in all" in page
    assert page.count("<svg") == 1 and "http" not in page and len(page) < 40_000


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
