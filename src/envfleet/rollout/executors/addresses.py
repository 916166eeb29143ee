"""Addresses of servers in place of clients."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envfleet.errors import BadArgument


@dataclass(frozen=True)
class Address:
    """A factory of clients from an address, or from a mapping with `env_url` and client options.

    Example:
        >>> Address("http://localhost:8000")()
        HttpEnvClient('http://localhost:8000')
    """

    where: str | Mapping[str, Any] = field(repr=False)

    def __call__(self) -> Any:
        """A client, not yet connected."""
        # By name: `envfleet.remote` is above this package.
        return importlib.import_module("envfleet.remote.official_clients").as_client(self.where)


class AsyncAddress(Address):
    """The same for an event loop."""

    async def __call__(self) -> Any:
        """An async client, not yet connected."""
        return super().__call__().as_async()


def client_or_factory(client: Any, index: int, is_async: bool) -> Any:
    """What a job runs on: an address becomes a factory. What cannot be a client is refused."""
    if isinstance(client, (str, Mapping)):
        address = (AsyncAddress if is_async else Address)(client)
        try:
            Address(client)()
        except BadArgument as error:
            raise BadArgument(f"clients[{index}]: {error}") from None
        return address
    if not callable(client) and not (hasattr(client, "reset") and hasattr(client, "step")):
        raise BadArgument(
            f"clients[{index}] is {type(client).__name__}: give an object with reset() and step(), a factory of one, or an address"
        )
    return client
