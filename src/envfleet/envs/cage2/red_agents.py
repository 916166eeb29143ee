"""The three red agents. Each chooses its next action from its own memory, what red knows, and how the last action went."""

from __future__ import annotations

from typing import NamedTuple

from envfleet.envs.cage2.draws import Draws
from envfleet.envs.cage2.network import Network
from envfleet.envs.cage2.scenario import (
    ENTERPRISE,
    ENTERPRISE0,
    ENTERPRISE1,
    ENTERPRISE2,
    ESCALATE,
    EXPLOIT,
    HOSTS,
    IDLE,
    IMPACT,
    OP_SERVER0,
    OPERATIONAL,
    SCAN,
    SUBNETS,
    SWEEP,
    USER,
    USER1,
    USER2,
    USER4,
)
from envfleet.errors import BadArgument

FAILED, SUCCEEDED, NO_RESULT = 0, 1, 2


class RedAction(NamedTuple):
    """What red did: the kind, the host (the subnet of a sweep, -1 for none), and how it went."""

    kind: int = IDLE
    target: int = -1
    success: int = FAILED


class SleepAgent:
    """A red agent that does nothing."""

    def choose(self, network: Network, last: RedAction, draws: Draws) -> tuple[int, int]:
        """Kind and target of the next action."""
        return IDLE, -1


#: B_line's plan. The host of 1 to 3 is drawn once per episode, that of 4 to 6 follows from it; both are written as -1 here.
PLAN = (
    (SWEEP, USER),
    (SCAN, -1),
    (EXPLOIT, -1),
    (ESCALATE, -1),
    (SCAN, -1),
    (EXPLOIT, -1),
    (ESCALATE, -1),
    (SWEEP, ENTERPRISE),
    (SCAN, ENTERPRISE2),
    (EXPLOIT, ENTERPRISE2),
    (ESCALATE, ENTERPRISE2),
    (SCAN, OP_SERVER0),
    (EXPLOIT, OP_SERVER0),
    (ESCALATE, OP_SERVER0),
    (IMPACT, OP_SERVER0),
)
#: Where B_line goes on after a failure at each position.
AFTER_FAILURE = (0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 9, 9, 9, 12, 13)
FIRST_SCAN, FIRST_ENTERPRISE, EXPLOIT_SERVER = 1, 4, 12


class B_lineAgent:
    """A red agent that knows the network and takes the shortest way to Op_Server0."""

    def __init__(self) -> None:
        self.position = 0
        self.victim = -1  # one of User1 to User4, drawn when it is first needed

    def choose(self, network: Network, last: RedAction, draws: Draws) -> tuple[int, int]:
        """Kind and target of the next action."""
        if last.success == SUCCEEDED:
            self.position = min(self.position + 1, len(PLAN) - 1)
        else:
            self.position = AFTER_FAILURE[self.position]
        # The scan of an unreachable Op_Server0 came back empty, so it has never been scanned: begin again at once.
        if self.position == EXPLOIT_SERVER and network.scanned_ports[OP_SERVER0] is None:
            self.position = FIRST_SCAN
        if self.position == FIRST_SCAN and self.victim < 0:
            self.victim = draws.host(range(USER1, USER4 + 1))
        kind, target = PLAN[self.position]
        if target >= 0:
            return kind, target
        if self.position < FIRST_ENTERPRISE:
            return kind, self.victim
        return kind, ENTERPRISE1 if self.victim <= USER2 else ENTERPRISE0


class RedMeanderAgent:
    """A red agent that explores: it takes every subnet and every host that it can, in random order."""

    def __init__(self) -> None:
        self.swept: set[int] = set()
        self.scanned: set[int] = set()
        self.exploited: set[int] = set()
        self.escalated: set[int] = set()
        self.once_exploited: set[int] = set()

    def choose(self, network: Network, last: RedAction, draws: Draws) -> tuple[int, int]:
        """Kind and target of the next action."""
        self._learn(last)
        if OP_SERVER0 in self.escalated:
            return IMPACT, OP_SERVER0
        for subnet in range(len(SUBNETS)):
            if subnet in network.known_subnets - self.swept:
                self.swept.add(subnet)
                return SWEEP, subnet
        given_up = self.once_exploited - self.exploited
        for kind, tried, candidates in (
            (SCAN, self.scanned, network.known_addresses - self.scanned),
            (ESCALATE, self.escalated, network.known_names - self.escalated - given_up),
            (EXPLOIT, self.exploited, network.known_addresses - self.exploited),
        ):
            if candidates:
                host = draws.host(sorted(candidates))
                tried.add(host)
                return kind, host
        return IDLE, -1

    def _learn(self, last: RedAction) -> None:
        """Take back what the last result has shown to be lost."""
        if last.kind == EXPLOIT and last.success == SUCCEEDED:
            self.once_exploited.add(last.target)
        elif last.kind == EXPLOIT:
            self.exploited.discard(last.target)
            for subnet in (OPERATIONAL, ENTERPRISE):
                lost = {host for host in self.escalated if HOSTS[host].subnet == subnet}
                if lost:
                    self.escalated -= lost
                    self.exploited -= lost
                    break
        elif last.kind in (ESCALATE, IMPACT) and last.success == FAILED:
            self.escalated.discard(last.target)
            if last.target in self.once_exploited:
                self.exploited.discard(last.target)


RedAgent = SleepAgent | B_lineAgent | RedMeanderAgent
#: By number: the number is what compiled code and true states have.
RED_AGENTS: tuple[type[RedAgent], ...] = (B_lineAgent, RedMeanderAgent, SleepAgent)
RED_NAMES = ("bline", "meander", "sleep")


def red_number(agent: str | type[RedAgent]) -> int:
    """The number of a red agent, given by class, by the name of its class or by its short name.

    Example:
        >>> red_number(RedMeanderAgent), red_number("B_lineAgent"), red_number("sleep")
        (1, 0, 2)
        >>> red_number("beeline")
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: red_agent='beeline': choose B_lineAgent, RedMeanderAgent or SleepAgent ...
    """
    for number, kind in enumerate(RED_AGENTS):
        if agent is kind or (isinstance(agent, str) and agent.lower() in (kind.__name__.lower(), RED_NAMES[number])):
            return number
    raise BadArgument(
        f"red_agent={agent!r}: choose B_lineAgent, RedMeanderAgent or SleepAgent (the class or its name), "
        "or 'bline', 'meander', 'sleep'"
    )
