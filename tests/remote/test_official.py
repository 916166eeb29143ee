import pytest

from envfleet.errors import BadArgument
from envfleet.remote import AsyncEnvClient, EchoClient, HttpEnvClient, as_client
from tests.support.official_servers import run_official
from tests.support.our_server import OurServer


def test_official_clients_against_ours_and_behind_our_guard(official):
    with OurServer("Echo", "--max-sessions", "2", "--backend", "thread") as server:
        said = run_official(official.package, "official_clients.py", server.url, official.url)
        assert said.strip() == "all well"
        assert server.stop() == 0


def test_what_is_a_client():
    with EchoClient() as local:
        assert as_client(local) is local
        with pytest.raises(BadArgument, match="go with an address"):
            as_client(local, token="x")
    for given in ("http://a:1", ["http://a:1", "http://b:1"], {"env_url": "http://a:1"}):
        assert isinstance(as_client(given), HttpEnvClient)
    ours = as_client(AsyncEnvClient("http://a:1", message_timeout_s=7.0))
    assert isinstance(ours, HttpEnvClient) and ours._client.config.message_timeout_s == 7.0
    with pytest.raises(BadArgument, match="no client"):
        as_client(3)
