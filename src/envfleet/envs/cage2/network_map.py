"""The network as text: a line per host with what red has, what blue saw and believes, and the decoys."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from envfleet.envs.cage2.scenario import DECOY_NAMES, EXPLOIT, EXPLOIT_NAMES, HOSTS, IDLE, RED_KINDS, SUBNETS, SWEEP

_ACCESS = ("-", "user", "PRIVILEGED")
_ACTIVITY = ("-", "scan", "exploit")
_MEMORY = ("-", "unknown", "user", "privileged")
_RESULT = ("failed", "succeeded", "no result")


def network_map(state: NDArray[Any]) -> str:
    """A record of `TRUE_STATE` as text.

    Example:
        >>> import numpy as np
        >>> from envfleet.envs.cage2.true_state import TRUE_STATE
        >>> state = np.zeros((), TRUE_STATE)
        >>> state["access"][8] = 2
        >>> print(network_map(state).splitlines()[13])
          User0        PRIVILEGED   -         -
    """
    lines = [f"step {int(state['steps'])}, red: {_red(state)}, OT service {'runs' if state['ot_up'] else 'is DOWN'}"]
    lines.append(f"{'':2}{'host':12} {'red has':12} {'blue saw':9} {'believes':11} decoys")
    for number, subnet in enumerate(SUBNETS):
        lines.append(f"{subnet}{'' if state['known_subnets'][number] else ' (unknown to red)'}")
        for i, host in enumerate(HOSTS):
            if host.subnet == number:
                decoys = " ".join(name for bit, name in enumerate(DECOY_NAMES) if state["decoys"][i] >> bit & 1)
                access, seen, memory = state["access"][i], state["activity"][i], state["memory"][i]
                lines.append(f"  {host.name:12} {_ACCESS[access]:12} {_ACTIVITY[seen]:9} {_MEMORY[memory]:11} {decoys}".rstrip())
    return "\n".join(lines)


def _red(state: NDArray[Any]) -> str:
    kind, target = int(state["red_kind"]), int(state["red_target"])
    if kind == IDLE:
        return "nothing"
    where = SUBNETS[target] if kind == SWEEP else HOSTS[target].name
    how = f" with {EXPLOIT_NAMES[int(state['exploit'])]}" if kind == EXPLOIT and state["exploit"] >= 0 else ""
    return f"{RED_KINDS[kind]} {where}{how} {_RESULT[int(state['red_success'])]}"
