import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from servers import NEW, OLD, OfficialServer


@pytest.fixture(
    scope="session",
    params=[NEW, pytest.param(OLD, marks=pytest.mark.full)],
    ids=["openenv-0.10", "openenv-core-0.3"],
)
def official(request):
    """An official server with room for many; one process for the whole run."""
    with OfficialServer(request.param, sessions=16) as server:
        yield server


@pytest.fixture(scope="session")
def small():
    """Servers with limits 1, 4 and 16."""
    servers = [OfficialServer(NEW, sessions=n) for n in (1, 4, 16)]
    try:
        for server in servers:
            server.launch()
        yield [server.wait() for server in servers]
    finally:
        for server in servers:
            server.kill()
