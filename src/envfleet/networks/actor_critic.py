"""One actor-critic for every architecture: a Markov network is a memory network whose state has size 0.

::

    observation ─ encoder ─ layers or core (GRU/LSTM) ─ layer ─ head → action outputs      (actor)
    observation ─ encoder ─ layers or core (GRU/LSTM) ─ layer ─ head → value               (critic)

`markov` has no core, `memory` one in both rows, `memory_markov` one in the critic's row only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from torch import nn

from envfleet.errors import BadArgument
from envfleet.networks.action_heads import Actions
from envfleet.networks.features import Features
from envfleet.networks.numpy_layers import NumpyLayers
from envfleet.networks.recurrent import Recurrent
from envfleet.tasks.previous_step import PreviousStep

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}


@dataclass(frozen=True)
class NetworkConfig:
    """The shape of an actor-critic; `PPOConfig.network()` builds one from its own fields."""

    arch: str = "markov"
    rnn: str = "gru"
    state_size: int = 64
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    std: str = "free"
    log_std_init: float = 0.0
    squash: bool = False
    share_encoder: bool | None = None
    previous_step: bool = False


class Output(NamedTuple):
    """What a forward pass gives: action outputs [T, B, P], values [T, B], states after every step [C, T, B, W]."""

    actions: torch.Tensor
    value: torch.Tensor
    states: torch.Tensor


class ActorCritic(nn.Module):
    """The network of a PPO agent, for any observation and action space the library reads.

    Example:
        >>> spaces = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2)
        >>> net = ActorCritic(*spaces, NetworkConfig(arch="memory", state_size=8))
        >>> out = net({"vector": torch.zeros(5, 3, 4)}, net.initial_state(3), torch.zeros(5, 3, dtype=torch.bool))
        >>> tuple(out.actions.shape), tuple(out.value.shape)
        ((5, 3, 2), (5, 3))
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        config: NetworkConfig,
        state_space: gym.Space[Any] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.previous = PreviousStep(action_space) if config.previous_step else None
        self.features = Features(observation_space, state_space, self.previous.size if self.previous is not None else 0)
        state_size = self.features.state_size  # 0 unless the critic is centralised
        self.actions = Actions(action_space, std=config.std, squash=config.squash)
        has_images = bool(self.features.image_shapes)
        # A convolution costs far more than it can lose by being shared; small MLPs learn better apart.
        self.shared = has_images if config.share_encoder is None else config.share_encoder
        self.shared = self.shared and not state_size
        hidden = config.hidden
        self.num_cores = {"markov": 0, "memory": 2, "memory_markov": 1}[config.arch]
        # A core reads the observation itself and takes the place of all dense layers but the last.
        actor_hidden = () if self.num_cores == 2 or (self.num_cores and self.shared) else hidden[:-1]
        critic_hidden = () if self.num_cores else hidden[:-1]
        if state_size and self.num_cores == 2:
            # The two cores run as one, so what they read has one width; the critic's would be wider by the state.
            actor_hidden = critic_hidden = hidden[:1]
        self.actor_encoder = Encoder(self.features, actor_hidden, config.activation)
        self.critic_encoder = (
            self.actor_encoder if self.shared else Encoder(self.features, critic_hidden, config.activation, state_size)
        )
        if self.num_cores == 2 and self.actor_encoder.size != self.critic_encoder.size:
            raise BadArgument("a centralised critic with memory needs observations that have more than pictures")
        core_size = config.state_size if self.num_cores else 0
        self.core = Recurrent(config.rnn, self.critic_encoder.size, core_size, self.num_cores) if self.num_cores else None
        actor_width = core_size if self.num_cores == 2 else self.actor_encoder.size
        critic_width = core_size if self.num_cores else self.critic_encoder.size
        self.actor_layers = _mlp(actor_width, hidden[-1:], config.activation)
        self.critic_layers = _mlp(critic_width, hidden[-1:], config.activation)
        self.actor_head = _linear(hidden[-1], self.actions.num_outputs, gain=0.01)
        self.critic_head = _linear(hidden[-1], 1, gain=1.0)
        self._actor_end = _Dense([*self.actor_layers, self.actor_head])
        self._critic_end = _Dense([*self.critic_layers, self.critic_head])
        free = self.actions.num_free
        self.log_std = nn.Parameter(torch.full((free,), float(config.log_std_init))) if free else None

    def __setattr__(self, name: str, value: Any) -> None:
        # Acting and learning hold views of the layers this network was built with: another layer would be ignored.
        if isinstance(value, nn.Module) and name in self.__dict__.get("_modules", {}):
            raise BadArgument(f"{name} cannot be replaced: change its parameters, or build another network and policy")
        super().__setattr__(name, value)

    @property
    def state_width(self) -> int:
        """Width of one core's state; 0 for a Markov network."""
        return self.core.width if self.core is not None else 0

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.actor_head.weight.device

    def initial_state(self, rows: int) -> torch.Tensor:
        """Return the state at the beginning of an episode, [core, row, width]."""
        return torch.zeros(self.num_cores, rows, self.state_width, device=self.device)

    def forward(
        self, inputs: dict[str, torch.Tensor], state: torch.Tensor, fresh: torch.Tensor, states_too: bool = True
    ) -> Output:
        """Run [step, row, …] inputs from `state`; it restarts before the steps where `fresh` [step, row]."""
        for_actor = self.actor_encoder(inputs)
        for_critic = for_actor if self.shared else self.critic_encoder(inputs)
        states = state
        if self.core is not None:
            pair = [for_critic] if self.num_cores == 1 else [for_actor, for_critic]
            outputs, states = self.core(torch.stack(pair), state, fresh, states_too)
            each = outputs.unbind(0)  # not outputs[0]: the gradient of every index would be an array of its own
            for_critic = each[-1]
            for_actor = each[0] if self.num_cores == 2 else for_actor
        actions = self._actor_end(for_actor)
        value = self._critic_end(for_critic).squeeze(-1)
        return Output(actions, value, states)

    def act(self, inputs: dict[str, torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the actor alone for one step of rows [k, …]; `state` is the actor's, [k, width] or empty."""
        hidden = self.actor_encoder(inputs)
        if self.num_cores == 2:
            assert self.core is not None
            never = torch.zeros(1, hidden.shape[0], dtype=torch.bool, device=hidden.device)
            # Both cores run, the critic's on the actor's input and for nothing: one code path, and this
            # one serves pictures and accelerators only, where the encoder is what costs.
            both = torch.stack([hidden, hidden]).unsqueeze(1)
            outputs, states = self.core(both, torch.stack([state, state]), never)
            hidden, state = outputs[0, 0], states[0, -1]
        return self._actor_end(hidden), state


class Encoder(nn.Module):
    """Vector through an MLP, pictures through convolutions; what comes out is joined."""

    def __init__(self, features: Features, hidden: tuple[int, ...], activation: str, state_size: int = 0) -> None:
        super().__init__()
        self.reads_state = bool(state_size)
        self.scales = features.image_scales
        self.convs = nn.ModuleList([_convolutions(shape, activation) for shape in features.image_shapes])
        vector_size = features.vector_size + state_size
        self.layers = _mlp(vector_size, hidden, activation) if vector_size else None
        self._dense = _Dense(self.layers or ())
        self.size = sum(_conv_width(shape) for shape in features.image_shapes)
        if self.layers is not None:
            self.size += hidden[-1] if hidden else vector_size

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Encode inputs with any leading axes into [..., size]."""
        if self.reads_state:
            wide = [inputs[name] for name in ("vector", "central") if name in inputs]
            inputs = {**inputs, "vector": torch.cat(wide, dim=-1)}
        parts = []
        for index, (conv, scale) in enumerate(zip(self.convs, self.scales)):
            picture = inputs[f"image{index}"]
            lead = picture.shape[:-3]
            flat = picture.reshape(-1, *picture.shape[-3:]).float() / scale
            parts.append(conv(flat).view(*lead, -1))
        if self.layers is not None:
            parts.append(self._dense(inputs["vector"]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class _Dense:
    """Dense layers in a row: in NumPy on a CPU, in PyTorch elsewhere."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self.in_numpy = NumpyLayers(self.modules)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu" and x.dtype == torch.float32:
            return self.in_numpy.learn(x)
        for module in self.modules:
            x = module(x)
        return x


def _linear(size: int, out: int, gain: float = math.sqrt(2.0)) -> nn.Linear:
    layer = nn.Linear(size, out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _mlp(size: int, hidden: tuple[int, ...], activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for out in hidden:
        layers += [_linear(size, out), ACTIVATIONS[activation]()]
        size = out
    return nn.Sequential(*layers)


def _conv_width(shape: tuple[int, ...]) -> int:
    return 512 if min(shape[1:]) >= 36 else 128


def _convolutions(shape: tuple[int, ...], activation: str) -> nn.Sequential:
    """The three layers of the Nature DQN from 36 pixels on; two small ones for smaller pictures."""
    channels, height, width = shape
    if min(height, width) >= 36:
        plan = [(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)]
    elif min(height, width) >= 8:
        plan = [(16, 3, 1, 0), (32, 3, 2, 1)]  # unpadded, an even side would lose its last pixels
    else:
        plan = [(16, 3, 1, 0), (32, 3, 1, 0)]
    layers: list[nn.Module] = []
    for out, kernel, stride, padding in plan:
        conv = nn.Conv2d(channels, out, kernel, stride, padding)
        nn.init.orthogonal_(conv.weight, math.sqrt(2.0))
        assert conv.bias is not None
        nn.init.zeros_(conv.bias)
        layers += [conv, nn.ReLU()]
        channels = out
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
    if height < 1 or width < 1:
        raise BadArgument(f"pictures of {shape[1]}x{shape[2]} pixels are too small for the convolutions")
    return nn.Sequential(*layers, nn.Flatten(), _linear(channels * height * width, _conv_width(shape)), nn.ReLU())


def flatten_parameters(module: nn.Module) -> nn.Parameter:
    """Move all parameters of a module into one tensor, of which they become views, gradients included.

    An optimiser step, a gradient norm or zeroing is then one operation instead of one per layer. With a tensor per
    layer, a whole update of a 64 x 64 network takes 26 to 50 % more CPU time (fused Adam, `clip_grad_norm_`).
    """
    parameters = list(module.parameters())
    flat = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]))
    flat.grad = torch.zeros_like(flat)
    offset = 0
    for parameter in parameters:
        end = offset + parameter.numel()
        parameter.data = flat.data[offset:end].view_as(parameter)
        parameter.grad = flat.grad[offset:end].view_as(parameter)
        offset = end
    return flat


def check_flat(module: nn.Module, flat: nn.Parameter) -> None:
    """Refuse parameters that are no views of `flat` any more: they would silently stay as they are. Lost gradients are views again."""
    assert flat.grad is not None
    offset = 0
    for name, parameter in module.named_parameters():
        end = offset + parameter.numel()
        if not parameter.requires_grad:
            raise BadArgument(
                f"{name} has requires_grad=False: parameters are learned all together, so none can be left as it is"
            )
        if parameter.dtype != flat.dtype or parameter.data_ptr() != flat.data[offset:end].data_ptr():
            raise BadArgument(
                f"{name} was replaced or moved, so that it would not be learned: change weights in place (with torch.no_grad(): "
                "parameter.copy_(…)), or by load_state_dict without assign=True"
            )
        parameter.grad = flat.grad[offset:end].view_as(parameter)
        offset = end
