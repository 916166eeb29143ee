"""What a fleet asks of Ray: which cluster, what each worker needs, where workers go, and how messages reach them."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from typing import Any, Literal

from envfleet.errors import BadArgument
from envfleet.util.extras import from_extra

RayTransport = Literal["stream", "call"]

#: What Ray itself calls a worker's needs; every other name in `resources` is a custom resource.
_KNOWN = ("num_cpus", "num_gpus", "memory", "accelerator_type", "label_selector", "runtime_env")
_STRATEGIES = ("SPREAD", "DEFAULT")
#: How long a cluster may take to accept a connection.
_KNOCK_S = 5.0


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """The arguments of `envfleet.make` that only go with `backend="ray"`, checked.

    Example:
        >>> RayOptions(resources={"num_cpus": 1, "tpu_host": 1}).actor_options()
        {'scheduling_strategy': 'SPREAD', 'num_cpus': 1, 'resources': {'tpu_host': 1}}
    """

    resources: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"num_cpus": 1})
    ray_address: str | None = None
    placement: Any = "SPREAD"  # "SPREAD", "DEFAULT", a placement group, or a scheduling strategy of Ray's
    transport: RayTransport = "stream"
    ports: tuple[int, int] | None = None
    spawn_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.resources, Mapping) or not all(isinstance(name, str) for name in self.resources):
            raise BadArgument(f"resources={self.resources!r}: give names and amounts, e.g. {{'num_cpus': 1}}")
        for name, value in self.resources.items():
            is_amount = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
            if not is_amount and name not in ("accelerator_type", "label_selector", "runtime_env"):
                raise BadArgument(f"resources[{name!r}]={value!r}: give an amount of 0 or more")
        if isinstance(self.placement, str) and self.placement not in _STRATEGIES:
            raise BadArgument(f"placement={self.placement!r}: choose one of {', '.join(_STRATEGIES)}, or a placement group")
        if self.transport not in ("stream", "call"):
            raise BadArgument(f"transport={self.transport!r}: choose 'stream' or 'call'")
        if not self.spawn_timeout_s > 0:
            raise BadArgument(f"spawn_timeout_s={self.spawn_timeout_s!r}: give seconds above 0")
        self._check_ports()

    def _check_ports(self) -> None:
        if self.ports is None:
            return
        if self.transport == "call":
            raise BadArgument("ports only goes with transport='stream': calls use Ray's own ports")
        good = isinstance(self.ports, (tuple, list)) and len(self.ports) == 2 and all(type(port) is int for port in self.ports)
        if not good or not 1 <= self.ports[0] <= self.ports[1] <= 65535:
            raise BadArgument(f"ports={self.ports!r}: give the first and the last port, e.g. (20000, 20100)")

    def actor_options(self) -> dict[str, Any]:
        """Options of the actors, as Ray's `.options` takes them."""
        options: dict[str, Any] = {"scheduling_strategy": self.placement}
        if _is_group(self.placement):
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.placement)
        custom = {name: value for name, value in self.resources.items() if name not in _KNOWN}
        options |= {name: value for name, value in self.resources.items() if name in _KNOWN}
        return options | ({"resources": custom} if custom else {})

    @property
    def may_avoid_nodes(self) -> bool:
        """Whether workers may be kept away from a machine: where the user has not chosen machines himself."""
        return isinstance(self.placement, str) and "label_selector" not in self.resources

    def connect(self) -> bool:
        """Use the Ray that is there, or the one at `ray_address`; returns whether this call connected to it.

        A cluster is never started, and never guessed.
        """
        with from_extra("ray"):
            import ray
        if ray.is_initialized():
            if self.ray_address is not None and self.ray_address not in ("auto", ray.get_runtime_context().gcs_address):
                raise BadArgument(
                    f"ray_address={self.ray_address!r}, but this process is connected to {ray.get_runtime_context().gcs_address}: "
                    "leave ray_address out, or call ray.shutdown() first"
                )
            return False
        if self.ray_address is None:
            raise BadArgument(
                "backend 'ray' needs a Ray cluster, and this process is not connected to one: call ray.init(...) first, or give "
                "ray_address='auto' (the cluster of this machine) or 'HOST:PORT'. A cluster of one machine: ray start --head"
            )
        if self.ray_address == "local":
            raise BadArgument("ray_address='local' would start a cluster: do that yourself, with ray.init(address='local')")
        _knock(self.ray_address)
        try:
            ray.init(address=self.ray_address, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = f"there is no Ray cluster at ray_address={self.ray_address!r}"
            if self.ray_address != "auto":  # somebody has answered
                why = (
                    f"ray.init could not connect to the cluster at ray_address={self.ray_address!r}. If it asks for a token, set "
                    "RAY_AUTH_MODE=token here too (see docs/ray.md). Ray says"
                )
            raise BadArgument(f"{why}: {str(error)[:300]}") from error
        return True


def _knock(address: str) -> None:
    """Refuse an address at which nobody listens: Ray would try for two minutes, and cannot be interrupted meanwhile."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:  # "auto", or an address of another kind
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise BadArgument(
            f"there is no Ray cluster at ray_address={address!r}: nobody listens there ({error}). `ray status` on its machine says whether it runs"
        ) from error


def _is_group(placement: Any) -> bool:
    return type(placement).__name__ == "PlacementGroup"
