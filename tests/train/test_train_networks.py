"""Networks: what is written by hand agrees with PyTorch, and every space trains."""

from __future__ import annotations

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envfleet.errors import BadArgument
from envfleet.networks import numpy_layers, recurrent
from envfleet.networks.action_heads import Actions
from envfleet.networks.actor_critic import ACTIVATIONS, ActorCritic, Encoder, NetworkConfig, flatten_parameters
from envfleet.networks.features import Features
from envfleet.networks.network_policy import NotFinite, NumpyActor, Policy
from envfleet.networks.numpy_layers import NumpyLayers
from envfleet.networks.recurrent import Recurrent

VECTOR = spaces.Box(-1, 1, (5,), np.float32)


@pytest.fixture(params=["compiled", "python"])
def way(request, monkeypatch):
    """Both ways through the layers on CPU: in C where it was built, and in NumPy and PyTorch."""
    if request.param == "python":
        monkeypatch.setattr(recurrent, "COMPILED", None)
        monkeypatch.setattr(numpy_layers, "COMPILED", None)
    elif recurrent.COMPILED is None:
        pytest.skip("envfleet._scan is not built")
    return request.param


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_numpy_actor_equals_the_modules(activation, rows, way):
    torch.manual_seed(0)
    net = ActorCritic(VECTOR, spaces.Discrete(3), NetworkConfig(hidden=(32, 32), activation=activation))
    x = torch.randn(rows, 5)
    ours, _ = NumpyActor(net)(x.numpy(), None)
    wanted = net.actor_head(net.actor_layers(net.actor_encoder.layers(x)))
    torch.testing.assert_close(torch.from_numpy(ours), wanted.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("by_input", [False, True])
def test_layers_in_numpy_and_their_gradients_equal_the_modules(activation, outputs, by_input, way):
    torch.manual_seed(0)
    kind = ACTIVATIONS[activation]
    modules = torch.nn.Sequential(torch.nn.Linear(5, 32), kind(), torch.nn.Linear(32, 16), kind(), torch.nn.Linear(16, outputs))
    x = torch.randn(7, 20, 5, requires_grad=by_input)
    layers = NumpyLayers(modules)
    leaves = [*modules.parameters(), *([x] if by_input else [])]
    for _ in range(2):  # the second time on parameters that were changed in place, and moved
        ours, theirs = layers.learn(x), modules(x)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        weight = torch.randn_like(theirs)
        for got, wanted in zip(
            torch.autograd.grad((ours * weight).sum(), leaves), torch.autograd.grad((theirs * weight).sum(), leaves)
        ):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            modules[0].weight.mul_(2.0)
        modules[0].weight.data = modules[0].weight.data.clone()


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("cores", [1, 2])
def test_recurrent_layers_equal_torchs_own_where_nothing_restarts(kind, cores, way):
    torch.manual_seed(0)
    layer = Recurrent(kind, 4, 6, cores)
    with torch.no_grad():
        layer.b_in.normal_()
    inputs, state = torch.randn(cores, 9, 3, 4, requires_grad=True), torch.randn(cores, 3, layer.width)
    outputs, states = layer(inputs, state, torch.zeros(9, 3, dtype=torch.bool))
    weight = torch.randn_like(outputs)
    (by_inputs,) = torch.autograd.grad((outputs * weight).sum(), inputs)
    # torch.nn.LSTM has its gates in the order input, forget, candidate, output.
    order = torch.arange(18) if kind == "gru" else torch.arange(24).view(4, 6)[[0, 1, 3, 2]].flatten()
    for core in range(cores):
        theirs = (torch.nn.GRU if kind == "gru" else torch.nn.LSTM)(4, 6)
        with torch.no_grad():
            theirs.weight_ih_l0.copy_(layer.w_in[core].T[order])
            theirs.weight_hh_l0.copy_(layer.w_state[core].T[order])
            theirs.bias_ih_l0.copy_(layer.b_in[core, 0][order])
            theirs.bias_hh_l0.zero_()
        hidden, cell = state[core, None, :, :6].contiguous(), state[core, None, :, 6:].contiguous()
        wanted, last = theirs(inputs[core], hidden if kind == "gru" else (hidden, cell))
        torch.testing.assert_close(outputs[core], wanted, atol=1e-5, rtol=1e-5)
        end = last[0] if kind == "gru" else torch.cat([last[0][0], last[1][0]], dim=-1)
        torch.testing.assert_close(states[core, -1], end.detach(), atol=1e-5, rtol=1e-5)
        (gradient,) = torch.autograd.grad((wanted * weight[core]).sum(), inputs)
        torch.testing.assert_close(by_inputs[core], gradient[core], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(recurrent.COMPILED is None, reason="envfleet._scan is not built")
@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 10, 16])  # every remainder of the blocks that C works in
@pytest.mark.parametrize("size", [5, 16, 24])
def test_compiled_scan_equals_the_loop_in_torch(kind, cores, rows, size, monkeypatch):
    torch.manual_seed(rows)
    layer = Recurrent(kind, 3, size, cores)
    with torch.no_grad():
        layer.b_in.normal_()
    inputs, state = torch.randn(cores, 6, rows, 3, requires_grad=True), torch.randn(cores, rows, layer.width)
    fresh, weight = torch.rand(6, rows) < 0.3, torch.randn(cores, 6, rows, size)

    def run():
        outputs, states = layer(inputs, state, fresh)
        gradients = torch.autograd.grad((outputs * weight).sum(), [inputs, layer.w_in, layer.w_state, layer.b_in])
        return [outputs.detach(), states, *gradients]

    compiled = run()
    monkeypatch.setattr(recurrent, "COMPILED", None)
    for got, wanted in zip(compiled, run()):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


def test_scan_keeps_nan_and_refuses_what_does_not_fit(way):
    layer = Recurrent("gru", 2, 4)
    x = torch.zeros(1, 3, 2, 2)
    x[0, 1, 0, 0] = torch.nan
    outputs, _ = layer(x, torch.zeros(1, 2, layer.width), torch.zeros(3, 2, dtype=torch.bool))
    assert outputs.isnan().any(-1)[0].tolist() == [[False, False], [True, False], [True, False]]
    if way == "compiled":
        with pytest.raises(TypeError, match="the array w_in is missing"):
            recurrent.COMPILED.forward(3, 3, 2, 2, 4, x=np.zeros((3, 2, 2), np.float32))
        with pytest.raises(ValueError, match="x has 8 bytes, not 48"):
            recurrent.COMPILED.forward(3, 3, 2, 2, 4, x=np.zeros(2, np.float32))
        with pytest.raises(ValueError, match="3 gates"):
            recurrent.COMPILED.backward(5, 3, 2, 2, 4)
        with pytest.raises(ValueError, match="float32 arrays"):
            recurrent.COMPILED.bias_tanh(np.zeros((2, 3)), np.zeros(3))
        with pytest.raises(ValueError, match="float32 arrays"):
            recurrent.COMPILED.bias_tanh(np.zeros((2, 3), np.float32), np.zeros(4, np.float32))


def test_saturated_gates_stay_finite(way):
    layer = Recurrent("lstm", 1, 4)
    x = torch.tensor([1e30, -1e30, 500.0, -500.0]).view(1, 1, 4, 1)
    outputs, _ = layer(x, torch.zeros(1, 4, layer.width), torch.zeros(1, 4, dtype=torch.bool))
    assert outputs.isfinite().all() and outputs.abs().max() <= 1


def test_a_fresh_row_forgets():
    layer = Recurrent("gru", 2, 4)
    x = torch.randn(1, 6, 2, 2)
    fresh = torch.zeros(6, 2, dtype=torch.bool)
    fresh[3, 0] = True
    outputs, _ = layer(x, torch.randn(1, 2, 4), fresh)
    alone, _ = layer(x[:, 3:, :1], torch.zeros(1, 1, layer.width), torch.zeros(3, 1, dtype=torch.bool))
    torch.testing.assert_close(outputs[:, 3:, :1], alone)


@pytest.mark.parametrize("arch", ["markov", "memory", "memory_markov"])
@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_numpy_policy_gives_what_the_network_gives(arch, rnn, way):
    torch.manual_seed(1)
    net = ActorCritic(VECTOR, spaces.Discrete(3), NetworkConfig(arch=arch, rnn=rnn, state_size=8, hidden=(16, 16)))
    flatten_parameters(net)
    with torch.no_grad():
        net.actor_head.weight.mul_(100)  # so that the three actions differ
    policy = Policy(net, 4, None)
    rng = np.random.default_rng(0)
    observations = rng.standard_normal((7, 4, 5)).astype(np.float32)
    fresh = rng.random((7, 4)) < 0.3
    fresh[0] = True
    chosen = np.stack([policy.choose(observations[t], None, fresh[t])[0] for t in range(7)])
    with torch.no_grad():
        inputs = {"vector": torch.from_numpy(observations)}
        out = net(inputs, net.initial_state(4), torch.from_numpy(fresh))
    assert (out.actions.argmax(-1).numpy() == chosen).all()


def test_policy_for_some_slots_keeps_the_others_memory():
    net = ActorCritic(VECTOR, spaces.Discrete(2), NetworkConfig(arch="memory", state_size=8))
    policy = Policy(net, 3, np.random.default_rng(0))
    policy.choose(np.ones((3, 5), np.float32))
    before = policy.state.copy()
    policy.choose(np.ones((1, 5), np.float32), np.array([1]))
    assert (policy.state[[0, 2]] == before[[0, 2]]).all()
    assert (policy.state[1] != before[1]).any()


SPACES = {
    "box": VECTOR,
    "discrete": spaces.Discrete(4, start=2),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "multibinary": spaces.MultiBinary(3),
    "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
    "image2d": spaces.Box(0, 255, (10, 10), np.uint8),
    "atari": spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "dict": spaces.Dict(pos=VECTOR, map=spaces.Box(0, 255, (8, 8, 1), np.uint8), kind=spaces.Discrete(3)),
    "tuple": spaces.Tuple((VECTOR, spaces.Discrete(2))),
}


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("arch", ["markov", "memory"])
def test_every_observation_space_is_read(name, arch):
    space = SPACES[name]
    batched = gym.vector.utils.batch_space(space, 2)
    net = ActorCritic(space, spaces.Discrete(2), NetworkConfig(arch=arch, state_size=8))
    policy = Policy(net, 2, np.random.default_rng(0))
    batched.seed(0)
    action, _ = policy.choose(batched.sample(), None, np.array([True, True]))
    assert action.shape == (2,)


@pytest.mark.parametrize("side", [5, 7, 8, 9, 10, 16, 35, 84])
def test_the_whole_picture_is_seen(side):
    """Up to its last row and column, which convolutions with a stride may leave out: there is catch's paddle."""
    torch.manual_seed(0)
    encoder = Encoder(Features(spaces.Box(0, 255, (side, side, 1), np.uint8)), (8,), "tanh")
    pictures = torch.rand(8, 1, side, side, requires_grad=True)
    encoder({"image0": 255 * pictures}).sum().backward()
    assert pictures.grad is not None and (pictures.grad != 0).any(dim=0).all()


def test_discrete_with_a_start_is_one_hot_from_there():
    features = Features(spaces.Discrete(3, start=5))
    assert features(np.array([5, 7]))["vector"].tolist() == [[1, 0, 0], [0, 0, 1]]


def test_unreadable_spaces_are_named():
    with pytest.raises(BadArgument, match="words is a Text space"):
        Features(spaces.Dict(words=spaces.Text(5)))
    with pytest.raises(BadArgument, match="PPO cannot act in"):
        Actions(spaces.Box(0, 10, (2,), np.int64))
    with pytest.raises(BadArgument, match="finite action bounds"):
        Actions(spaces.Box(-np.inf, np.inf, (2,)), squash=True)


# -- distributions against torch.distributions ---------------------------------------------------------------------------


def test_categorical_scores():
    actions = Actions(spaces.MultiDiscrete([3, 4]))
    outputs = torch.randn(6, 7)
    raw = torch.stack([torch.randint(0, 3, (6,)), torch.randint(0, 4, (6,))], dim=1)
    log_prob, entropy = actions.score(outputs, None, raw)
    parts = [torch.distributions.Categorical(logits=outputs[:, :3]), torch.distributions.Categorical(logits=outputs[:, 3:])]
    torch.testing.assert_close(log_prob, sum(part.log_prob(raw[:, i]) for i, part in enumerate(parts)))
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))


@pytest.mark.parametrize("std", ["free", "state"])
def test_gaussian_scores(std):
    actions = Actions(spaces.Box(-2, 2, (3,)), std=std)
    outputs = torch.randn(5, actions.num_outputs)
    log_std = torch.randn(3) if std == "free" else None
    scale = (log_std if std == "free" else outputs[:, 3:].clamp(-8, 2)).exp()
    raw = torch.randn(5, 3)
    wanted = torch.distributions.Normal(outputs[:, :3], scale.expand(5, 3))
    log_prob, entropy = actions.score(outputs, log_std, raw)
    torch.testing.assert_close(log_prob, wanted.log_prob(raw).sum(-1))
    torch.testing.assert_close(entropy, wanted.entropy().sum(-1))


def test_squashed_gaussian_scores_and_stays_inside():
    space = spaces.Box(np.array([-1.0, 0.0]), np.array([3.0, 1.0]), dtype=np.float64)
    actions = Actions(space, squash=True)
    mean, log_std, raw = torch.randn(4, 2).double(), torch.zeros(2).double(), torch.randn(4, 2).double()
    base = torch.distributions.Normal(mean, torch.ones(2).double())
    transforms = [
        torch.distributions.TanhTransform(),
        torch.distributions.AffineTransform(torch.tensor([1.0, 0.5]).double(), torch.tensor([2.0, 0.5]).double()),
    ]
    wanted = torch.distributions.TransformedDistribution(base, transforms)
    env = torch.from_numpy(actions.to_env(raw.numpy()))
    log_prob, _ = actions.score(mean, log_std, raw)
    torch.testing.assert_close(log_prob, wanted.log_prob(env).sum(-1), atol=1e-6, rtol=1e-6)
    far = actions.to_env(np.array([[1e9, -1e9]], np.float32))
    assert space.contains(far[0])


def test_draws_follow_the_logits():
    actions = Actions(spaces.Discrete(3))
    logits = np.log(np.array([0.2, 0.5, 0.3], np.float32))
    drawn = actions.draw(np.tile(logits, (20_000, 1)), None, np.random.default_rng(0))
    assert np.abs(np.bincount(drawn, minlength=3) / 20_000 - [0.2, 0.5, 0.3]).max() < 0.02


def test_masked_actions_are_never_drawn_and_have_no_gradient():
    actions = Actions(spaces.Discrete(3))
    mask = np.array([[True, False, True]] * 1000)
    drawn = actions.draw(np.zeros((1000, 3), np.float32), None, np.random.default_rng(0), mask)
    assert set(drawn.tolist()) == {0, 2}
    logits = torch.zeros(1, 3, requires_grad=True)
    log_prob, entropy = actions.score(logits, None, torch.tensor([0]), torch.tensor([[True, False, True]]))
    (log_prob + entropy).sum().backward()
    assert logits.grad[0, 1] == 0
    assert entropy.item() == pytest.approx(np.log(2))


def test_noise_of_zero_does_not_beat_a_mask():
    class Zero:
        def standard_exponential(self, shape, dtype):
            return np.zeros(shape, dtype)

    mask = np.array([[False, True]])
    assert Actions(spaces.Discrete(2)).draw(np.zeros((1, 2), np.float32), None, Zero(), mask).tolist() == [1]


def test_every_action_space_gives_members():
    for space in (
        spaces.Discrete(3, start=4),
        spaces.MultiDiscrete([2, 5], start=[1, 3]),
        spaces.MultiBinary((2, 2)),
        spaces.Box(-1, 1, (2, 3), np.float32),
    ):
        net = ActorCritic(VECTOR, space, NetworkConfig())
        drawn, _ = Policy(net, 4, np.random.default_rng(0)).choose(np.zeros((4, 5), np.float32))
        assert all(space.contains(one.item() if one.ndim == 0 else one) for one in drawn), space


def test_nan_is_found_with_its_row():
    net = ActorCritic(VECTOR, spaces.Discrete(2), NetworkConfig())
    observation = np.zeros((4, 5), np.float32)
    observation[2, 1] = np.nan
    with pytest.raises(NotFinite) as caught:
        Policy(net, 4, None).choose(observation)
    assert caught.value.rows == [2]
    Policy(net, 4, None, skip_nan=True).choose(observation)


def _net(arch="markov"):
    return ActorCritic(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), NetworkConfig(arch=arch))


def _triple(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3.0)


def test_an_unpickled_network_follows_its_own_weights():
    inputs, fresh = {"vector": torch.randn(1, 3, 4)}, torch.zeros(1, 3, dtype=torch.bool)

    def pickled_after_use():
        net = _net()
        net(inputs, net.initial_state(3), fresh)
        return pickle.dumps(net)

    for _ in range(20):  # the address of a parameter that is gone is likely to be used again
        net = pickle.loads(pickled_after_use())
        assert net._actor_end.in_numpy._memory.has_moved()  # so that no view that was copied is used
        before = net(inputs, net.initial_state(3), fresh)
        _triple(net)
        after = net(inputs, net.initial_state(3), fresh)
        assert not torch.equal(before.actions, after.actions) and not torch.equal(before.value, after.value)


def test_a_replaced_parameter_is_used():
    net = _net()
    inputs, fresh = {"vector": torch.randn(1, 3, 4)}, torch.zeros(1, 3, dtype=torch.bool)
    net(inputs, net.initial_state(3), fresh)
    net.actor_head.weight = torch.nn.Parameter(torch.zeros_like(net.actor_head.weight))
    assert net(inputs, net.initial_state(3), fresh).actions.abs().max() == 0


@pytest.mark.parametrize("arch", ["markov", "memory"])
@pytest.mark.parametrize("how", ["in place", "flattened", "deepcopy", "pickle"])
def test_a_policy_acts_with_the_weights_its_network_has_now(arch, how, way):
    policy = Policy(_net(arch), 3, None)
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    policy.choose(obs)
    if how == "flattened":
        flatten_parameters(policy.net)
    elif how != "in place":
        policy = copy.deepcopy(policy) if how == "deepcopy" else pickle.loads(pickle.dumps(policy))
    _triple(policy.net)
    state = np.zeros_like(policy.state) if policy.remembers else None
    outputs, _ = policy._run({"vector": obs}, state)
    hidden = torch.zeros(3, policy.state.shape[1])
    wanted, _ = policy.net.act({"vector": torch.from_numpy(obs)}, hidden)
    np.testing.assert_allclose(outputs, wanted.detach().numpy(), atol=1e-5)


def test_a_network_in_double_precision_still_runs():
    net = _net().double()
    out = net({"vector": torch.randn(1, 3, 4, dtype=torch.float64)}, net.initial_state(3), torch.zeros(1, 3, dtype=torch.bool))
    assert out.actions.dtype == torch.float64


def test_a_layer_cannot_be_replaced_because_its_views_would_be_ignored() -> None:
    net = ActorCritic(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), NetworkConfig())
    with pytest.raises(BadArgument, match="actor_head cannot be replaced"):
        net.actor_head = torch.nn.Linear(64, 2)
    with torch.no_grad():
        net.actor_head.weight.zero_()  # parameters can be changed
