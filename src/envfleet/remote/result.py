"""What a client gives back, and what it takes as an action: plain records, no dependency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from envfleet.errors import BadArgument


class Fields(dict[str, Any]):
    """A dict whose keys also read as attributes, as typed OpenEnv clients are used to.

    Example:
        >>> Fields(echoed="hi").echoed
        'hi'
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a reset or a step.

    OpenEnv knows only `done`. A server of ours sends which end it was; any other server's counts as terminated, unless
    its metadata has `truncated: true`.

    Example:
        >>> StepResult({"echoed": "hi"}, 0.2, True, {"truncated": True}).terminated
        False
    """

    observation: Any
    reward: float | None = None
    done: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[bool, bool] | None = field(default=None, repr=False)  # (terminated, truncated), from a server of ours

    @property
    def truncated(self) -> bool:
        """The episode was cut, not finished."""
        return self.ends[1] if self.ends is not None else self.done and self.metadata.get("truncated") is True

    @property
    def terminated(self) -> bool:
        """The episode came to its own end."""
        return self.ends[0] if self.ends is not None else self.done and not self.truncated


def action_payload(action: Any, name: str = "action") -> dict[str, Any]:
    """The fields that go on the wire for an action: a mapping, a dataclass, a pydantic model, or one value."""
    if isinstance(action, Mapping):
        return dict(action)
    if is_dataclass(action) and not isinstance(action, type):
        return asdict(action)
    dump = getattr(action, "model_dump", None)
    if dump is not None:
        # `metadata` is the base class's empty default; most servers' actions forbid fields they do not know.
        return {key: value for key, value in dump().items() if key != "metadata" or value}
    if isinstance(action, type) or callable(action):
        raise BadArgument(f"an action must be a mapping, a dataclass, a pydantic model or a value, not {action!r}")
    return {name: action}
