"""The network during an episode: what blue, green and red can do to it, one primitive at a time."""

from __future__ import annotations

from envfleet.envs.cage2.draws import Draws
from envfleet.envs.cage2.scenario import (
    DECOYS,
    DEFENDER,
    ENTERPRISE0,
    ENTERPRISE2,
    EXPLOITS,
    HOSTS,
    LEADS_TO,
    NUM_HOSTS,
    OP_SERVER0,
    OPERATIONAL,
    SQL_INJECTION,
    SSH_BRUTE_FORCE,
    USER,
    USER0,
)

#: Blue's memory of a host. The numbers are those of true states.
NO, UNKNOWN, USER_LEVEL, PRIVILEGED = range(4)
#: The remote port of a reverse shell; its local port is a fresh one, written as 0 here.
SHELL_PORT, FRESH_PORT = 4444, 0


class Network:
    """Hosts, what red has and knows, what blue remembers. Every method is one rule of the game.

    Example:
        >>> network = Network()
        >>> network.scan(10), sorted(network.scanned_ports[10])
        (True, [135, 139, 445, 3389])
        >>> network.scan(7), network.scanned_ports[7]
        (True, None)
    """

    def __init__(self) -> None:
        self.privileged = [host == USER0 for host in range(NUM_HOSTS)]
        self.lasting = [False] * NUM_HOSTS  # a user session that Remove cannot end
        self.removable = [False] * NUM_HOSTS  # a user session that Remove ends
        self.malware = [False] * NUM_HOSTS  # the file that Analyse finds
        self.decoys: list[set[int]] = [set() for _ in HOSTS]
        self.memory = [NO] * NUM_HOSTS  # what blue believes
        self.scanned_ports: list[frozenset[int] | None] = [None] * NUM_HOSTS  # what red saw at its last scan; None: never
        self.known_addresses = {USER0}
        self.known_names = {USER0}
        self.known_subnets = {USER}
        self.ot_up = True
        self.ot_bound = True  # an Impact can stop the OT service; a Restore of Op_Server0 unbinds it for good
        self.ot_known = False
        # What the last step did: the network events (local port, remote port) per host, the decoy that was placed.
        self.events: list[list[tuple[int, int]]] = [[] for _ in HOSTS]
        self.new_decoy_on = -1
        self.exploit_used = -1
        self.shell_noticed = -1

    def begin_step(self) -> None:
        """Forget the events of the step before."""
        self.events = [[] for _ in HOSTS]
        self.new_decoy_on = self.exploit_used = self.shell_noticed = -1

    def sockets(self, host: int) -> list[int]:
        """The ports that listen on a host now, real and decoys."""
        return [*HOSTS[host].sockets, *(DECOYS[decoy].opens for decoy in sorted(self.decoys[host]))]

    def access(self, host: int) -> int:
        """Red's best access: 0 none, 1 user, 2 privileged."""
        return 2 if self.privileged[host] else int(self.lasting[host] or self.removable[host])

    def reachable(self, host: int) -> bool:
        """Operational hosts can be reached only through a session on an Enterprise server."""
        return HOSTS[host].subnet != OPERATIONAL or any(self.access(i) for i in range(ENTERPRISE0, ENTERPRISE2 + 1))

    # What blue does.

    def remove(self, host: int) -> None:
        """Ends removable sessions; blue is then unsure about a host that it suspected."""
        self.removable[host] = False
        if self.memory[host] != NO:
            self.memory[host] = UNKNOWN

    def place_decoy(self, host: int, decoy: int) -> None:
        """Places a decoy if its system and port fit, else nothing."""
        kind = DECOYS[decoy]
        if kind.needs not in self.sockets(host) and kind.linux in (None, HOSTS[host].linux):
            self.decoys[host].add(decoy)
            self.new_decoy_on = host

    def restore(self, host: int) -> None:
        """Puts a host back; red keeps User0, and what it has learned."""
        self.privileged[host] = host == USER0
        self.lasting[host] = self.removable[host] = self.malware[host] = False
        self.decoys[host].clear()
        self.memory[host] = NO
        if host == OP_SERVER0:
            self.ot_up, self.ot_bound = True, False

    # What green and red do. Red's methods say whether the action succeeded.

    def touch_sockets(self, host: int) -> None:
        """A port scan: one event per listening socket."""
        self.events[host] += [(port, 0) for port in self.sockets(host)]

    def sweep(self, subnet: int) -> bool:
        """Learns all addresses of a subnet."""
        hosts = [i for i, host in enumerate(HOSTS) if host.subnet == subnet]
        if not self.reachable(hosts[0]):
            return False
        self.known_addresses.update(hosts)
        return True

    def scan(self, host: int) -> bool:
        """Learns the open ports of a host; an unreachable one gives an empty success."""
        if self.reachable(host):
            self.scanned_ports[host] = frozenset(self.sockets(host))
            self.touch_sockets(host)
        return True

    def exploit(self, host: int, draws: Draws) -> bool:
        """Tries to get a session with one of the exploits that the ports of the last scan offer."""
        ports = self.scanned_ports[host]
        options = options_of(ports) if ports is not None else []
        if not options:
            return False
        self.exploit_used = draws.exploit(options)
        kind = EXPLOITS[self.exploit_used]
        if not self.reachable(host):
            return False
        if host in kind.privileged or host in kind.user:
            self._break_in(host, draws)
            self.known_names.add(host)
            return True
        brute_force = self.exploit_used == SSH_BRUTE_FORCE
        if (brute_force and host == DEFENDER) or any(DECOYS[decoy].opens == kind.port for decoy in self.decoys[host]):
            self.events[host] += [(kind.port, 0)] * (10 if brute_force else 2)
        return False

    def _break_in(self, host: int, draws: Draws) -> None:
        """An exploit that meets a real service."""
        kind = EXPLOITS[self.exploit_used]
        if self.exploit_used == SSH_BRUTE_FORCE:
            self.events[host] += [(kind.port, 0)] * 11
            self.lasting[host] = True
            return
        self.events[host].append((kind.port, 0))
        self.malware[host] = True
        noticed = draws.noticed()
        self.shell_noticed = int(noticed)
        if noticed:
            self.events[host].append((FRESH_PORT, SHELL_PORT))
        if host in kind.privileged:
            self.privileged[host] = True
        elif noticed:
            self.removable[host] = True
        else:
            self.lasting[host] = True

    def escalate(self, host: int) -> bool:
        """Turns a session into a privileged one, and learns where the host leads to."""
        if not self.access(host):
            return False
        if not self.privileged[host]:
            self.privileged[host] = self.malware[host] = True
        self.known_addresses.add(host)
        self.known_subnets.add(HOSTS[host].subnet)
        if host in LEADS_TO:
            self.known_addresses.add(LEADS_TO[host])
        if host == OP_SERVER0:
            self.ot_known = True
        return True

    def impact(self) -> bool:
        """Stops the OT service on Op_Server0; any session is enough once red knows of the service."""
        if not (self.access(OP_SERVER0) and self.ot_known):
            return False
        if self.ot_bound:
            self.ot_up = self.ot_bound = False
        return True


def options_of(ports: frozenset[int]) -> list[int]:
    """The exploits that a set of open ports offers, the best first. SQLInjection also needs a web port.

    Example:
        >>> options_of(frozenset({22, 80, 443}))
        [3, 2, 4]
    """
    offered = [i for i, kind in enumerate(EXPLOITS) if kind.port in ports and (i != SQL_INJECTION or ports & {80, 443})]
    return sorted(offered, key=lambda i: -EXPLOITS[i].weight)
