import pytest

from tests.support.official_servers import NEW, OLD, OfficialServer


@pytest.fixture(
    scope="session", params=[NEW, pytest.param(OLD, marks=pytest.mark.full)], ids=["openenv-0.10", "openenv-core-0.3"]
)
def officials(request):
    """Official servers with session limits 1, 4 and 16: one process for the whole run."""
    with OfficialServer(request.param, sessions=(1, 4, 16)) as server:
        yield server.parts


@pytest.fixture
def official(officials):
    """An official server with room for 16."""
    return officials[2]


@pytest.fixture
def small(officials):
    """Official servers with limits 1, 4 and 16."""
    return officials
