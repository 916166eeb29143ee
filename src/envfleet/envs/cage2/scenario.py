"""What CAGE Challenge 2 is made of: hosts, ports, decoys, exploits and the names of blue's 145 actions.

Hosts are numbered in the order of `HOSTS` everywhere: in actions, in observations, in true states and in recorded episodes.
"""

from __future__ import annotations

from typing import NamedTuple

ENTERPRISE, OPERATIONAL, USER = range(3)
SUBNETS = ("Enterprise", "Operational", "User")


class Host(NamedTuple):
    """A host as it is before anything happens."""

    name: str
    subnet: int
    linux: bool
    sockets: tuple[int, ...]  # the ports that its real services listen on, one entry per socket
    penalty: int  # tenths of reward that blue loses per step while red has privileged access


_WINDOWS_SERVER = (22, 135, 3389, 445, 139, 80, 443)

HOSTS = (
    Host("Defender", ENTERPRISE, True, (22, 53, 53, 68), 1),
    Host("Enterprise0", ENTERPRISE, True, (22,), 10),
    Host("Enterprise1", ENTERPRISE, False, _WINDOWS_SERVER, 10),
    Host("Enterprise2", ENTERPRISE, False, _WINDOWS_SERVER, 10),
    Host("Op_Host0", OPERATIONAL, True, (22,), 1),
    Host("Op_Host1", OPERATIONAL, True, (22,), 1),
    Host("Op_Host2", OPERATIONAL, True, (22,), 1),
    Host("Op_Server0", OPERATIONAL, True, (22,), 10),
    Host("User0", USER, False, (22, 21), 0),
    Host("User1", USER, False, (22, 21), 1),
    Host("User2", USER, False, (445, 139, 135, 3389), 1),
    Host("User3", USER, True, (80, 3389, 443, 25), 1),
    Host("User4", USER, True, (22, 80, 3390, 443, 25), 1),
)
NUM_HOSTS = len(HOSTS)
HOST_NAMES = tuple(host.name for host in HOSTS)
DEFENDER, ENTERPRISE0, ENTERPRISE1, ENTERPRISE2 = range(4)
OP_SERVER0, USER0, USER1, USER2, USER3, USER4 = range(7, 13)

#: Every port that a host can listen on; a set of ports is a number whose bit i stands for PORTS[i].
PORTS = (21, 22, 25, 53, 68, 80, 135, 139, 443, 445, 3389, 3390)


class Decoy(NamedTuple):
    """A false service that blue can place."""

    name: str
    needs: int  # this port must be free
    opens: int  # this port listens afterwards
    linux: bool | None  # the system it runs on; None: any


#: Vsftpd asks for port 21 and opens 80: placed a second time it fits again, and it keeps Apache out.
DECOYS = (
    Decoy("Apache", 80, 80, None),
    Decoy("Femitter", 21, 21, False),
    Decoy("HarakaSMPT", 25, 25, True),
    Decoy("Smss", 139, 139, False),
    Decoy("SSHD", 22, 22, None),
    Decoy("Svchost", 3389, 3389, False),
    Decoy("Tomcat", 443, 443, None),
    Decoy("Vsftpd", 21, 80, True),
)
DECOY_NAMES = tuple(decoy.name for decoy in DECOYS)


class Exploit(NamedTuple):
    """A way for red to get into a host through a port."""

    name: str
    port: int
    weight: float  # only ranks the exploits that a host offers
    privileged: frozenset[int]  # hosts where it gives privileged access
    user: frozenset[int]  # hosts where it gives user access


_WEB = frozenset({ENTERPRISE1, ENTERPRISE2, USER3, USER4})
EXPLOITS = (
    Exploit("EternalBlue", 139, 2, frozenset({USER2}), frozenset()),
    Exploit("BlueKeep", 3389, 1, frozenset({ENTERPRISE1, ENTERPRISE2}), frozenset({USER2})),
    Exploit("HTTPRFI", 80, 3, frozenset(), _WEB),
    Exploit("HTTPSRFI", 443, 4, frozenset(), _WEB),
    Exploit(
        "SSHBruteForce", 22, 0.1, frozenset(), frozenset(i for i, host in enumerate(HOSTS) if 22 in host.sockets) - {DEFENDER}
    ),
    Exploit("SQLInjection", 3390, 5, frozenset({USER4}), frozenset()),
    Exploit("HarakaRCE", 25, 6, frozenset({USER3, USER4}), frozenset()),
    Exploit("FTPDirectoryTraversal", 21, 7, frozenset({USER0, USER1}), frozenset()),
)
EXPLOIT_NAMES = tuple(exploit.name for exploit in EXPLOITS)
SSH_BRUTE_FORCE, SQL_INJECTION = 4, 5

#: What an escalation on a host tells red: the addresses of these hosts.
LEADS_TO = {USER1: ENTERPRISE1, USER2: ENTERPRISE1, USER3: ENTERPRISE0, USER4: ENTERPRISE0, ENTERPRISE2: OP_SERVER0}

#: Red's kinds of action; the first five are also the numbers in recorded episodes.
SWEEP, SCAN, EXPLOIT, ESCALATE, IMPACT, IDLE = range(6)
RED_KINDS = ("Sweep", "Scan", "Exploit", "Escalate", "Impact", "Sleep")

#: Blue's kinds of action on a host, in the order of their blocks of 13 ids after Sleep (0) and Monitor (1).
BLUE_KINDS = ("Analyse", "Remove", *(f"Decoy{name}" for name in DECOY_NAMES), "Restore")
ANALYSE, REMOVE, FIRST_DECOY, RESTORE = 0, 1, 2, 10
SLEEP, MONITOR = 0, 1
ACTION_MEANINGS = ("Sleep", "Monitor", *(f"{kind} {host}" for kind in BLUE_KINDS for host in HOST_NAMES))
NUM_ACTIONS = len(ACTION_MEANINGS)
NUM_BITS = 4 * NUM_HOSTS


def action_id(kind: str, host: str) -> int:
    """The number of an action on a host.

    Example:
        >>> action_id("Restore", "Op_Server0"), ACTION_MEANINGS[139]
        (139, 'Restore Op_Server0')
    """
    return ACTION_MEANINGS.index(f"{kind} {host}")


def ports_mask(ports: frozenset[int] | set[int]) -> int:
    """A set of ports as one number.

    Example:
        >>> ports_mask({21, 25})
        5
    """
    return sum(1 << i for i, port in enumerate(PORTS) if port in ports)
