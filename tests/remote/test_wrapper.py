import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import envfleet as ef
from envfleet.errors import BadArgument
from envfleet.remote import Connect4Client, EchoClient, OpenEnvGymnasiumWrapper, Server, SessionLost, space_views
from envfleet.remote.space_views import text_of
from envfleet.testing import ChaosProxy


@pytest.fixture(scope="module")
def cartpole():
    with Server("CartPole-v1", port=0, max_sessions=8, num_workers=2) as server:
        yield server.url


@pytest.mark.parametrize(
    ("client", "options"),
    [
        (EchoClient, {}),
        (EchoClient, {"observation_mode": "raw_text", "action_mode": "discrete", "actions": ["a", "bb"]}),
        (EchoClient, {"observation_mode": "json", "action_mode": "json"}),
        (Connect4Client, {"observation_mode": "vector", "action_mode": "discrete"}),
        (Connect4Client, {"observation_mode": "text", "action_mode": "json", "text_length": 64}),
    ],
    ids=["text", "raw_text-discrete", "json", "vector-discrete", "text-json"],
)
def test_it_is_a_gymnasium_environment(client, options):
    env = OpenEnvGymnasiumWrapper(client(), **options)
    check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("mode", ["text", "raw_text", "json"])
def test_an_official_server_as_gymnasium(official, mode):
    env = OpenEnvGymnasiumWrapper(official.url, mode, "discrete", actions=["hi", {"message": "longer"}], max_steps=3)
    if mode != "json":  # its observation counts the server's environments, which differ between two resets
        check_env(env, skip_render_check=True)
    obs, info = env.reset(seed=7, options={"horizon": 9})
    assert info["text"] == "ready 7" and obs in env.observation_space
    obs, reward, terminated, truncated, info = env.step(1)
    assert (round(reward, 3), terminated, truncated, info["text"]) == (0.6, False, False, "longer")
    env.step(0)
    assert env.step(0)[2:4] == (False, True), "max_steps truncates"
    env.close()


def test_text_is_bytes_with_the_string_beside():
    env = OpenEnvGymnasiumWrapper(EchoClient(), text_length=8)
    env.reset()
    obs, _, _, _, info = env.step("äöü and more")
    assert obs.dtype == np.uint8 and bytes(obs) == "äöü a".encode()
    assert info["text"] == "äöü and more"
    assert env.render() == "äöü and more"
    assert text_of({"a": "x", "b": "y"}) == '{"a":"x","b":"y"}' and text_of({"text": "t", "b": "y"}) == "t"


def test_the_space_of_the_served_environment_is_the_environments_own(cartpole):
    env = OpenEnvGymnasiumWrapper({"env_url": cartpole}, "vector", "discrete")
    import gymnasium

    own = gymnasium.make("CartPole-v1")
    assert env.observation_space == own.observation_space and env.action_space == spaces.Discrete(2)
    obs, _ = env.reset(seed=4)
    assert np.array_equal(obs, own.reset(seed=4)[0])
    check_env(env, skip_render_check=True)
    env.close()


SCHEMA = {
    "action": {
        "properties": {"move": {"$ref": "#/$defs/Move"}, "metadata": {"type": "object"}},
        "required": ["move"],
        "$defs": {"Move": {"enum": ["left", "right"], "type": "string"}},
    },
    "observation": {
        "properties": {
            "done": {"type": "boolean"},
            "metadata": {"type": "object"},
            "x": {"type": "number"},
            "pair": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
            "on": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "level": {"type": "integer", "minimum": 1, "maximum": 3},
        }
    },
}


class Scripted:
    def reset(self, **kwargs):
        return self._result()

    def step(self, action):
        self.action = action
        return self._result()

    def close(self):
        pass

    def _result(self):
        from envfleet.remote import StepResult

        return StepResult({"x": 0.5, "pair": [1, 2], "on": True, "level": 2}, None, False)


def test_spaces_from_a_pydantic_schema():
    client = Scripted()
    env = OpenEnvGymnasiumWrapper(client, "vector", "discrete", schema=SCHEMA)
    obs, _ = env.reset()
    assert obs.dtype == np.float32 and obs in env.observation_space and 0.5 in obs
    assert env.step(1)[1] == 0.0 and client.action == {"move": "right"}
    env = OpenEnvGymnasiumWrapper(client, "json", "discrete", schema=SCHEMA)
    assert env.reset()[0] in env.observation_space
    assert env.observation_space["level"] == spaces.Discrete(3, start=1)


def test_what_the_schema_does_not_say_is_an_error_with_a_remedy():
    free = {"action": {"properties": {"a": {"type": "string"}}}, "observation": {"properties": {"l": {"type": "array"}}}}
    for modes, text in [
        (("vector", "text"), "no fixed size"),
        (("json", "text"), "no fixed size"),
        (("text", "discrete"), r"pass actions="),
    ]:
        with pytest.raises(BadArgument, match=text):
            OpenEnvGymnasiumWrapper(Scripted(), *modes, schema=free)
    with pytest.raises(BadArgument, match="is not numbers"):
        OpenEnvGymnasiumWrapper(EchoClient(), "vector", "text")
    with pytest.raises(BadArgument, match="does not describe"):
        OpenEnvGymnasiumWrapper(Scripted(), "json", "json", schema={})
    with pytest.raises(BadArgument, match="observation_mode is one of"):
        OpenEnvGymnasiumWrapper(Scripted(), "pixels")


def test_interruptions_raise_or_truncate(cartpole):
    with ChaosProxy(cartpole) as proxy:
        strict = OpenEnvGymnasiumWrapper(proxy.url, "vector", "discrete")
        lenient = OpenEnvGymnasiumWrapper(proxy.url, "vector", "discrete", on_interrupt="truncate")
        for env in (strict, lenient):
            env.reset(seed=1)
            env.step(0)
        proxy.cut_all()
        with pytest.raises(SessionLost):
            strict.step(0)
        _, reward, terminated, truncated, info = lenient.step(0)
        assert (reward, terminated, truncated) == (0.0, False, True) and "closed" in info["interrupted"]
        for env in (strict, lenient):
            assert env.reset(seed=1)[0].shape == (4,)
            env.close()


def test_the_wrapper_runs_in_a_fleet(cartpole):
    def build():
        return OpenEnvGymnasiumWrapper(cartpole, "vector", "discrete")

    with ef.make(build, num_envs=3, backend="thread") as fleet:
        obs = fleet.reset(seed=0).obs
        assert obs.shape == (3, 4)
        for _ in range(30):
            batch = fleet.step([0, 1, 0])
        assert batch.episode.max() >= 1


@pytest.mark.learning
def test_sb3_learns_through_the_wire(cartpole):
    """PPO on a served CartPole: the return of the last episodes is clearly above that of the first."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.monitor import Monitor

    env = Monitor(OpenEnvGymnasiumWrapper(cartpole, "vector", "discrete"))
    torch.set_num_threads(1)  # the server and the client's loop need the other cores
    PPO("MlpPolicy", env, n_steps=512, batch_size=64, n_epochs=10, seed=0, device="cpu").learn(8_000)
    returns = env.get_episode_rewards()
    env.close()
    assert np.mean(returns[-10:]) > 2 * np.mean(returns[:20]), (returns[:20], returns[-10:])


def test_sb3_takes_text_observations():
    from stable_baselines3 import PPO

    env = OpenEnvGymnasiumWrapper(EchoClient(horizon=4), "text", "discrete", actions=["a", "bbbb"], text_length=16)
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=1, seed=0, device="cpu").learn(64)
    seen = model.rollout_buffer.observations.astype(np.uint8).reshape(32, 16)
    words = [bytes(row).rstrip(b"\0").decode() for row in seen]
    assert model.num_timesteps == 64 and set(words) == {"ready", "a", "bbbb"}
    after = [{0: "a", 1: "bbbb"}[int(action)] for action in model.rollout_buffer.actions.ravel()]
    begun = model.rollout_buffer.episode_starts.ravel()
    assert all(words[t + 1] == ("ready" if begun[t + 1] else after[t]) for t in range(31)), "the network saw what was said"


@pytest.mark.parametrize(
    "observation",
    [
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "object", "properties": {"b": {"$ref": "#/$defs/A"}}}}},
        {"properties": {"a": {"type": "integer", "minimum": 0, "maximum": 10**400}}},
        {"properties": {"a": {"type": "array", "minItems": 2**40, "maxItems": 2**40, "items": {"type": "number"}}}},
        {"properties": {"a": 3}},
        {"properties": {"a": {"type": "string", "maxLength": "x"}}},
        {"properties": {"obs": {}}, "x-gymnasium": {"space": "Box", "shape": [2**40, 2**40], "dtype": "<f4", "low": 0, "high": 1}},
        {"properties": {"obs": {}}, "x-gymnasium": {"space": "Box", "shape": [2], "dtype": "|O8", "low": 0, "high": 1}},
        {"properties": {"obs": {}}, "x-gymnasium": {"space": "Discrete", "n": "many"}},
        {"properties": {}, "x-gymnasium": {"space": "Discrete", "n": 2, "start": 0}},
        {"properties": {"obs": {}}, "x-gymnasium": [1]},
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_read_are_refused(observation):
    with pytest.raises(BadArgument):
        space_views.observation_view("json", {"observation": observation}, 16)


def test_fields_that_may_be_null_are_read_so():
    text = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    observation = {"properties": {"may": text, "must": {"type": "string"}, "flag": {"type": "boolean"}, "x": {"type": "number"}}}
    view = space_views.observation_view("json", {"observation": observation}, 16)
    fields = {"may": None, "must": "m", "flag": True, "x": None}
    seen = view.value(fields, "", False)
    assert (seen["may"], seen["must"], seen["flag"]) == ("", "m", 1) and np.isnan(seen["x"])
    for wrong in ({"must": None}, {"flag": 1}, {"flag": None}, {"x": "1"}, {"x": True}, {"may": 3}):
        with pytest.raises(BadArgument):
            view.value({**fields, **wrong}, "", False)
    with pytest.raises(BadArgument):
        view.value(fields, "", True)  # a server of ours has NaN for NaN
