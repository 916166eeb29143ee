"""The true state of an episode: `STATE`, the compact record that compiled code keeps, and `TRUE_STATE`, what users read.

In `STATE` a set of hosts is a number whose bit i stands for host i. In `TRUE_STATE` everything about hosts is an array of 13.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.envs.cage2.scenario import NUM_HOSTS, SUBNETS

_HOST_SETS = (
    "privileged",
    "lasting",
    "removable",
    "malware",
    "suspected",
    "levels",
    "known_addresses",
    "known_names",
    "scanned",
    "exploited",
    "escalated",
    "once_exploited",
    "active",
    "alarmed",
)

#: Byte for byte the struct `State` of compiled/native/cage2.cpp.
STATE = np.dtype(
    [
        ("steps", "<u4"),
        *((name, "<u2") for name in _HOST_SETS),
        ("scanned_ports", "<u2", (NUM_HOSTS,)),
        ("decoys", "u1", (NUM_HOSTS,)),
        ("known_subnets", "u1"),
        ("swept", "u1"),
        ("ot_up", "u1"),
        ("ot_bound", "u1"),
        ("ot_known", "u1"),
        ("position", "u1"),
        ("victim", "i1"),
        ("red_kind", "i1"),
        ("red_target", "i1"),
        ("red_success", "i1"),
        ("exploit", "i1"),
        ("noticed", "i1"),
        ("green_host", "i1"),
    ]
)

#: What `true_state()` gives; every field is explained in docs/cage2.md.
TRUE_STATE = np.dtype(
    [
        ("access", "u1", (NUM_HOSTS,)),  # red's best session: 0 none, 1 user, 2 privileged
        ("removable", "?", (NUM_HOSTS,)),  # red has user access, and a Remove ends at least one of its sessions
        ("malware", "?", (NUM_HOSTS,)),  # the file that Analyse finds
        ("decoys", "u1", (NUM_HOSTS,)),  # bit i: the decoy DECOY_NAMES[i]
        ("activity", "u1", (NUM_HOSTS,)),  # what blue saw in the last step: 0 nothing, 1 a scan, 2 an exploit
        ("memory", "u1", (NUM_HOSTS,)),  # what blue believes: 0 no, 1 unknown, 2 user, 3 privileged
        ("scanned_ports", "u2", (NUM_HOSTS,)),  # what red saw at its last scan, bit i: PORTS[i]; 0: never scanned
        ("known_addresses", "?", (NUM_HOSTS,)),  # red knows the address
        ("known_names", "?", (NUM_HOSTS,)),  # red knows the name
        ("known_subnets", "?", (len(SUBNETS),)),  # red knows Enterprise, Operational, User
        ("ot_up", "?"),  # the OT service runs
        ("ot_bound", "?"),  # an Impact can still stop it
        ("ot_known", "?"),  # red knows of it
        ("red_kind", "i1"),  # red's last action: the index in RED_KINDS
        ("red_target", "i1"),  # its host, the subnet of a sweep, -1 for none
        ("red_success", "i1"),  # 0 failed, 1 succeeded, 2 no result
        ("exploit", "i1"),  # the exploit it used, an index in EXPLOIT_NAMES; -1: none
        ("noticed", "i1"),  # whether its reverse shell was noticed: 0, 1; -1: there was none
        ("green_host", "i1"),  # the host that green scanned; -1: none
        ("steps", "u4"),  # steps of the episode so far
    ]
)

_COPIED = (
    "scanned_ports",
    "decoys",
    "ot_up",
    "ot_bound",
    "ot_known",
    "red_kind",
    "red_target",
    "red_success",
    "exploit",
    "noticed",
    "green_host",
    "steps",
)


def true_states(states: NDArray[Any]) -> NDArray[Any]:
    """Compact records, of any shape, as records of `TRUE_STATE`.

    Example:
        >>> state = np.zeros(3, STATE)
        >>> state["privileged"][1] = 1 << 8
        >>> true_states(state)["access"][1].tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]
    """
    out = np.empty(states.shape, TRUE_STATE)
    for name in _COPIED:
        out[name] = states[name]
    for name in ("malware", "known_addresses", "known_names"):
        out[name] = _bits(states[name], NUM_HOSTS)
    out["known_subnets"] = _bits(states["known_subnets"], len(SUBNETS))
    privileged = _bits(states["privileged"], NUM_HOSTS)
    out["access"] = np.where(privileged, 2, _bits(states["lasting"] | states["removable"], NUM_HOSTS))
    out["removable"] = _bits(states["removable"] & ~states["privileged"], NUM_HOSTS)
    out["activity"] = _bits(states["active"], NUM_HOSTS) + _bits(states["alarmed"], NUM_HOSTS)
    out["memory"] = _bits(states["suspected"], NUM_HOSTS) + 2 * _bits(states["levels"], NUM_HOSTS)
    return out


def _bits(sets: NDArray[Any], count: int) -> NDArray[np.uint8]:
    bits: NDArray[np.uint8] = ((sets[..., None] >> np.arange(count, dtype=sets.dtype)) & 1).astype(np.uint8)
    return bits
