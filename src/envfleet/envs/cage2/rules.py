"""The reference simulator of one episode: plain Python, written to be read. Compiled code must do exactly the same."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from envfleet.envs.cage2.draws import Draws
from envfleet.envs.cage2.network import NO, PRIVILEGED, SHELL_PORT, UNKNOWN, USER_LEVEL, Network
from envfleet.envs.cage2.red_agents import FAILED, NO_RESULT, RED_AGENTS, SUCCEEDED, RedAction, RedAgent
from envfleet.envs.cage2.scenario import (
    ANALYSE,
    ESCALATE,
    EXPLOIT,
    FIRST_DECOY,
    HOSTS,
    IMPACT,
    MONITOR,
    NUM_BITS,
    NUM_HOSTS,
    REMOVE,
    RESTORE,
    SCAN,
    SWEEP,
    ports_mask,
)
from envfleet.envs.cage2.true_state import STATE

ObservationRule = Literal["strict", "source"]
OBSERVATION_RULES: tuple[ObservationRule, ...] = ("strict", "source")

#: The two bits of a host's activity, and of what blue remembers of it.
QUIET, SCANNED, EXPLOITED = (0, 0), (1, 0), (1, 1)
MEMORY_BITS = {NO: (0, 0), UNKNOWN: (1, 0), USER_LEVEL: (0, 1), PRIVILEGED: (1, 1)}
#: Tenths of reward: per step with the OT service down, per Restore.
OT_PENALTY, RESTORE_PENALTY = 100, 10


class Simulator:
    """One episode after the other. `draws` is asked for everything random.

    Args:
        red: the number of the red agent in `RED_AGENTS`.
        green: whether the green agent scans hosts.
        rule: the observation rule, "strict" or "source".

    Example:
        >>> from envfleet.envs.cage2.draws import RandomDraws
        >>> simulator = Simulator(red=0)
        >>> draws = RandomDraws(np.random.default_rng(0))
        >>> observation = simulator.reset()
        >>> [simulator.step(0, draws)[1] for _ in range(5)]
        [0.0, 0.0, -0.1, -0.1, -0.1]
    """

    def __init__(self, red: int, green: bool = False, rule: ObservationRule = "strict") -> None:
        self._red, self._green, self._rule = red, green, rule
        self.reset()

    def reset(self) -> NDArray[np.uint8]:
        """A new episode; it begins with nothing seen."""
        self.network = Network()
        self.red_agent: RedAgent = RED_AGENTS[self._red]()
        self.last = RedAction()
        self.green_host = -1
        self.steps = 0
        self.activity = [QUIET] * NUM_HOSTS
        return np.zeros(NUM_BITS, np.uint8)

    def step(self, action: int, draws: Draws) -> tuple[NDArray[np.uint8], float]:
        """Blue, green, red, the reward, and what blue then sees."""
        network = self.network
        network.begin_step()
        kind, host = divmod(action - MONITOR - 1, NUM_HOSTS) if action > MONITOR else (-1, -1)
        analysed = host if kind == ANALYSE and network.malware[host] else -1  # the files as they are before red's move
        if kind == REMOVE:
            network.remove(host)
        elif FIRST_DECOY <= kind < RESTORE:
            network.place_decoy(host, kind - FIRST_DECOY)
        elif kind == RESTORE:
            network.restore(host)
        self.green_host = draws.green_host() if self._green else -1
        if self.green_host >= 0:
            network.touch_sockets(self.green_host)
        self._act_red(draws)
        self.steps += 1
        return self._observe(analysed), self._reward(kind == RESTORE)

    def _act_red(self, draws: Draws) -> None:
        network = self.network
        kind, target = self.red_agent.choose(network, self.last, draws)
        success = NO_RESULT
        if kind == SWEEP:
            success = int(network.sweep(target))
        elif kind == SCAN:
            success = int(network.scan(target))
        elif kind == EXPLOIT:
            success = int(network.exploit(target, draws))
        elif kind == ESCALATE:
            success = int(network.escalate(target))
        elif kind == IMPACT:
            success = int(network.impact())
        assert success in (FAILED, SUCCEEDED, NO_RESULT)
        self.last = RedAction(kind, target, success)

    def _reward(self, restored: bool) -> float:
        tenths = sum(host.penalty for host, lost in zip(HOSTS, self.network.privileged, strict=True) if lost)
        tenths += 0 if self.network.ot_up else OT_PENALTY
        tenths += RESTORE_PENALTY if restored else 0
        return -tenths / 10 if tenths else 0.0

    def _observe(self, analysed: int) -> NDArray[np.uint8]:
        """The bits of all hosts; also brings blue's memory up to date."""
        memory = self.network.memory
        self.activity = [self._seen(host) for host in range(NUM_HOSTS)]
        bits: list[int] = []
        for host, activity in enumerate(self.activity):
            if activity == EXPLOITED:
                memory[host] = USER_LEVEL
            if host == analysed:
                memory[host] = PRIVILEGED
            bits += (*activity, *MEMORY_BITS[memory[host]])
        return np.array(bits, np.uint8)

    def _seen(self, host: int) -> tuple[int, int]:
        """What the events of a host look like to blue. A decoy that was placed now is one more record."""
        events = self.network.events[host]
        placed = self.network.new_decoy_on == host
        records, ports = len(events) + placed, len({local for local, _ in events})
        if not events and (not records or self._rule == "source"):
            return QUIET
        if records >= 3 and ports >= 3:
            return SCANNED
        if any(remote == SHELL_PORT for _, remote in events):
            return EXPLOITED
        if records >= 3 and ports == 1:
            return EXPLOITED
        return QUIET if placed and self._rule == "strict" else SCANNED

    def state(self) -> NDArray[Any]:
        """Everything that the next steps depend on, as one record of `STATE`."""
        network, agent = self.network, self.red_agent
        record = np.zeros((), STATE)
        for name in ("privileged", "lasting", "removable", "malware"):
            record[name] = _mask(i for i, is_set in enumerate(getattr(network, name)) if is_set)
        record["suspected"] = _mask(i for i, level in enumerate(network.memory) if MEMORY_BITS[level][0])
        record["levels"] = _mask(i for i, level in enumerate(network.memory) if MEMORY_BITS[level][1])
        record["active"] = _mask(i for i, activity in enumerate(self.activity) if activity[0])
        record["alarmed"] = _mask(i for i, activity in enumerate(self.activity) if activity[1])
        record["known_addresses"] = _mask(network.known_addresses)
        record["known_names"] = _mask(network.known_names)
        record["known_subnets"] = _mask(network.known_subnets)
        record["decoys"] = [_mask(decoys) for decoys in network.decoys]
        record["scanned_ports"] = [ports_mask(ports) if ports is not None else 0 for ports in network.scanned_ports]
        record["ot_up"], record["ot_bound"], record["ot_known"] = network.ot_up, network.ot_bound, network.ot_known
        record["red_kind"], record["red_target"], record["red_success"] = self.last
        record["exploit"], record["noticed"] = network.exploit_used, network.shell_noticed
        record["green_host"], record["steps"] = self.green_host, self.steps
        record["victim"] = getattr(agent, "victim", -1)
        record["position"] = getattr(agent, "position", 0)
        for name in ("swept", "scanned", "exploited", "escalated", "once_exploited"):
            record[name] = _mask(getattr(agent, name, ()))
        return record


def _mask(numbers: Any) -> int:
    return sum(1 << number for number in numbers)
