"""Optional packages: which extra installs them, and an error that says so where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from envfleet.errors import MissingExtra

#: Which packages each extra brings that the core does not need. A test compares the names with pyproject.toml.
EXTRAS = {
    "cli": ("rich", "matplotlib"),
    "train": ("torch", "tensorboard", "pyyaml"),
    "sb3": ("stable-baselines3",),
    "torchrl": ("torchrl",),
    "tianshou": ("tianshou",),
    "mujoco": ("mujoco",),
    "curricula": ("scikit-learn",),
    "classic": ("pygame-ce",),
    "box2d": ("box2d",),
    "video": ("imageio-ffmpeg",),
    "multiagent": ("pettingzoo", "pygame-ce"),
    "remote": ("websockets", "uvicorn", "starlette"),
    "datasets": ("pyarrow",),
    "minari": ("minari", "h5py"),
    "wandb": ("wandb",),
    "jax": ("jax",),
    "envpool": ("envpool",),
    "ray": ("ray",),
    "rllib": ("ray",),
}

#: Where a module's name is not its package's.
_PACKAGE_OF = {"yaml": "pyyaml", "sklearn": "scikit-learn"}


def extra_of(module: str) -> str | None:
    """The extra that brings a module.

    Example:
        >>> extra_of("torch.nn"), extra_of("antigravity")
        ('train', None)
    """
    name = module.partition(".")[0]
    package = _PACKAGE_OF.get(name, name).replace("_", "-")
    return next((extra for extra, names in EXTRAS.items() if package in names), None)


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Around imports of optional packages: one that is missing becomes a `MissingExtra`.

    Example:
        >>> with from_extra("train"):
        ...     import no_such_package
        Traceback (most recent call last):
        ...
        envfleet.errors.MissingExtra: 'no_such_package' is not available here. Install it: pip install "envfleet[train]"
    """
    try:
        yield
    except ImportError as missing:
        raise MissingExtra(missing.name or extra, extra=extra) from missing
