import asyncio

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envfleet.envs.connect4 import LEVELS, Connect4, Connect4Action, drop, evaluate, legal_columns, minimax_scores, wins
from envfleet.envs.echo import AsyncEcho, Echo, EchoAction
from envfleet.errors import BadArgument, ResetNeeded
from envfleet.remote import Connect4Client, EchoClient


@pytest.mark.parametrize(
    "env",
    [Echo(), Connect4(), Connect4(observation="text"), Connect4(first="random", opponent="minimax-2", illegal="skip")],
    ids=["echo", "connect4", "connect4-text", "connect4-minimax"],
)
def test_gymnasium_accepts_the_environments(env):
    check_env(env, skip_render_check=True)


def test_echo_counts_rewards_by_length_and_ends():
    env = Echo(horizon=2)
    assert env.reset(seed=0) == ("ready", {"n": 0})
    assert env.step("hello") == ("hello", 0.5, False, False, {"n": 1})
    assert env.step("") == ("", 0.0, True, False, {"n": 2})
    env.reset(options={"horizon": 1})
    assert env.step("x")[2]
    assert Echo(max_length=5).step("0123456789")[0] == "01234"
    with pytest.raises(BadArgument, match="string"):
        env.step(3)


def test_async_echo_has_the_same_life():
    async def talk():
        env = AsyncEcho(horizon=1, latency_s=0.001)
        await env.reset()
        return await env.step("hi")

    assert asyncio.run(talk()) == ("hi", 0.2, True, False, {"n": 1})


def brute_force_four(board, side):
    for row in range(6):
        for column in range(7):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                cells = [(row + i * down, column + i * right) for i in range(4)]
                if all(0 <= r < 6 and 0 <= c < 7 and board[r, c] == side for r, c in cells):
                    return True
    return False


def test_wins_agrees_with_a_search_of_the_whole_board():
    rng = np.random.default_rng(0)
    ended = 0
    for _ in range(80):
        board, side = np.zeros((6, 7), np.int8), 1
        while legal := legal_columns(board):
            column = int(rng.choice(legal))
            won = wins(board, drop(board, column, side), column)
            assert won == brute_force_four(board, side)
            if won:
                ended += 1
                break
            side = -side
    assert ended > 60


def test_minimax_takes_a_win_and_blocks_one():
    board = np.zeros((6, 7), np.int8)
    board[5, 0:3] = 1
    board[5, 4:7] = 0
    assert max(minimax_scores(board, 1, 1).items(), key=lambda kv: kv[1])[0] == 3
    blocking = minimax_scores(board, -1, 2)
    assert max(blocking, key=blocking.__getitem__) == 3
    assert not (board[5, 3:] != 0).any(), "scoring must leave the board as it was"
    assert evaluate(board, 1) == -evaluate(board, -1) > 0


def play(env, seed, choose):
    obs, info = env.reset(seed=seed)
    rng = np.random.default_rng(seed)
    total = 0.0
    while True:
        obs, reward, terminated, truncated, info = env.step(choose(rng, info))
        total += reward
        if terminated or truncated:
            return total, info["winner"], obs


def random_move(rng, info):
    return int(rng.choice(info["legal_actions"]))


def test_levels_are_ordered():
    rate = {level: np.mean([play(Connect4(LEVELS[level]), seed, random_move)[1] == 1 for seed in range(40)]) for level in LEVELS}
    assert rate["easy"] > rate["medium"] + 0.1 > rate["hard"], rate
    env = Connect4()
    env.reset(options={"level": "hard"})
    assert env._depth == 2


def test_same_seed_same_game():
    games = [play(Connect4("minimax-2", first="random"), 5, random_move) for _ in range(2)]
    assert games[0][:2] == games[1][:2]
    assert np.array_equal(games[0][2], games[1][2])


def full_column(env):
    env.reset(seed=0)
    env._board[:, 2] = [1, -1, 1, -1, 1, -1]
    return env


def test_an_illegal_move_loses_is_skipped_or_raises():
    obs, reward, terminated, _, info = full_column(Connect4(illegal="lose")).step(2)
    assert (reward, terminated, info["winner"]) == (-1.0, True, -1)
    env = full_column(Connect4(illegal="skip"))
    before = env._board.copy()
    obs, reward, terminated, _, info = env.step(2)
    assert (reward, terminated, info["action_mask"].tolist()) == (-0.1, False, [1, 1, 0, 1, 1, 1, 1])
    assert np.array_equal(obs, before)
    with pytest.raises(BadArgument, match="column 2 is full"):
        full_column(Connect4(illegal="raise")).step(2)
    with pytest.raises(BadArgument, match="column must be"):
        env.step(7)


def test_a_full_board_is_a_draw():
    env = Connect4()
    env.reset(seed=0)
    # One free cell, and no line of four anywhere.
    pattern = np.array([[1, 1, -1, -1, 1, 1, -1], [-1, -1, 1, 1, -1, -1, 1]], np.int8)
    env._board = np.concatenate([pattern, pattern, pattern])
    env._board[0, 0] = 0
    _, reward, terminated, _, info = env.step(0)
    assert (reward, terminated, info["winner"]) == (0.0, True, 0)


def test_client_twins_speak_openenv():
    with EchoClient(horizon=2) as client:
        with pytest.raises(ResetNeeded):
            client.step("too early")
        assert client.reset(seed=1, episode_id="e").observation == {"echoed": "ready", "n": 0}
        for action in (EchoAction("hey"), {"message": "hey"}):
            result = client.step(action)
            assert (result.observation.echoed, result.reward) == ("hey", 0.3)
        assert result.done and result.terminated and not result.truncated
        assert client.state() == {"episode_id": "e", "step_count": 2}
    with Connect4Client() as client:
        client.reset(seed=1, level="easy")
        result = client.step(Connect4Action(3))
        assert result.observation.board[5][3] == 1 and len(result.observation.text) == 55
        assert client.step(3).metadata["action_mask"] == [1] * 7
        with pytest.raises(BadArgument, match="column"):
            client.step({"row": 1})
