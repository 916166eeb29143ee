"""A reply with a missing field, a wrong type or a made-up flag is ProtocolBroken, never a zero."""

import asyncio
import copy
import json
import struct

import pytest

import envfleet as ef
from envfleet.remote import CapacityTable, ProtocolBroken, Server, SessionInterrupted
from envfleet.remote.remote_backend import remote_factory
from envfleet.remote.space_codec import Dialect
from envfleet.slots.layout import FAULT, READY
from tests.support.lying_proxy import Counting, LyingProxy, in_thread, official_server

SCHEMA = Dialect.of(Counting()).schemas()
OFFICIAL_SCHEMA = {
    "action": {"properties": {"action": {"type": "integer", "minimum": 0, "maximum": 4}}, "required": ["action"]},
    "observation": {"properties": {"kind": {"type": "string"}, "n": {"type": "integer", "minimum": 0, "maximum": 50},
                                   "obs": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}}},
}  # fmt: skip
INSTEAD = [None, True, False, "", "1", "false", 3.7, 10**400, 2**70, -(2**70), [], [[1]], [1, 2, 3], {}, {"a": 1}, {"$x": 1}]


def kind_of(value):
    return "number" if type(value) in (int, float) else type(value).__name__


def mutations(value, skip, path=()):
    """Every way to drop, replace or add one thing: (path, the whole value with that change)."""
    if path in skip:
        return
    if path:
        for other in INSTEAD:
            no_integer = type(value) is int and type(other) in (int, float)
            if kind_of(other) != kind_of(value) or no_integer:
                yield (*path, "=", repr(other)[:20]), other
    if isinstance(value, dict):
        for key in value:
            yield (*path, "-", key), {name: inner for name, inner in value.items() if name != key}
            for where, inner in mutations(value[key], skip, (*path, key)):
                yield where, {**value, key: inner}
        yield (*path, "+flag"), {**value, "flag": True}
    if isinstance(value, list):
        yield (*path, "-", 0), value[1:]
        yield (*path, "+", 0), [*value, *value[:1]]
        for i, item in enumerate(value):
            for where, inner in mutations(item, skip, (*path, i)):
                yield where, [*value[:i], inner, *value[i + 1 :]]


def opened(frame):
    """A frame as data, and how to close it again."""
    if isinstance(frame, str):
        return json.loads(frame), json.dumps
    size = struct.unpack_from("<I", frame, 4)[0]
    rest = frame[8 + size :]

    def close(head):
        text = json.dumps(head).encode()
        return frame[:4] + struct.pack("<I", len(text)) + text + rest

    return json.loads(frame[8 : 8 + size]), close


async def survey(port, exact, schema, skip, **options):
    """Make every mutation of a step's answer; gives those that were taken for an answer, and how many there were."""
    taken, count = [], 0
    async with LyingProxy(port, {}, exact=exact) as proxy:
        client = {"capacity": CapacityTable(), "message_timeout_s": 0.15, "down_timeout_s": 10}
        env = remote_factory([proxy.url], {"schema": schema, **client, **options})()
        seen = []
        proxy.mutate = lambda frame: seen.append(frame) or frame
        await env.reset(seed=1)
        await env.step(2)
        data, _ = opened(seen[-1])
        places = [where for where, _ in mutations(data, skip)]
        for where in places:

            def mutate(frame, where=where):
                message, close = opened(frame)
                # Answers of another shape (to a check) have no such place, and are passed on.
                return close(next((changed for at, changed in mutations(message, skip) if at == where), message))

            proxy.mutate = None
            await env.reset(seed=1)
            proxy.mutate = mutate
            count += 1
            try:
                taken.append((where, await env.step(2)))
            except SessionInterrupted as error:
                # Another number is another request's: dropped, and nothing else comes.
                assert isinstance(error, ProtocolBroken) or "id" in where, (where, error)
        proxy.mutate = None
        await env.close()
    return taken, count


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "text"])
def test_every_change_of_an_exact_answer_is_noticed(binary, caplog):
    # An info may hold anything; error frames are another answer altogether.
    skip = {("data", "info"), ("message", "data", "info")}
    with Server(Counting, port=0, max_sessions=8, backend="serial") as server:
        taken, count = asyncio.run(survey(server.port, True, SCHEMA, skip, binary=binary))
    # Shape [2] and [2] elsewhere; a flag beside the fields of the observation is a field of the info's there.
    unnoticed = [where for where, _ in taken if where[-2:] != ("observation", "+flag")]
    assert unnoticed == [] and count > 60 and not caplog.records


def test_every_change_of_an_official_answer_is_noticed(caplog):
    async def run():
        async with official_server() as port:
            return await survey(port, False, OFFICIAL_SCHEMA, set())

    taken, count = asyncio.run(run())
    # OpenEnv allows more fields than are known, and a reward of null.
    allowed = {"+flag"}
    unnoticed = [where for where, _ in taken if where[-1] not in allowed and where != ("data", "reward", "=", "None")]
    assert unnoticed == [] and count > 60 and not caplog.records


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["observation"].pop("n"),
        lambda data: data["observation"].update(n=3.7),
        lambda data: data.update(done="false"),
        lambda data: data.update(reward=True),
        lambda data: data["observation"].update(obs=[1]),
        lambda data: data["observation"].update(obs=["1", "2"]),
        lambda data: data["observation"].update(n=None),
        lambda data: data["observation"].update(n=51),
        lambda data: data.pop("reward"),
    ],
)  # fmt: skip
def test_a_broken_reply_is_a_fault_row_of_its_slot(change):
    """The review's e_client: obsmissing, obsfloat, donestr, rewardbool, and their kin."""

    def mutate(frame):
        message = json.loads(frame)
        if message["type"] == "observation" and message["data"]["reward"] is not None:
            change(message["data"])
        return json.dumps(message)

    with in_thread(official_server) as port, in_thread(lambda: LyingProxy(port, {})) as liar:
        with in_thread(lambda: LyingProxy(port, {})) as honest:
            options = {"schema": OFFICIAL_SCHEMA, "capacity": CapacityTable()}
            with ef.make([liar.url, honest.url], num_envs=2, env_kwargs=options) as fleet:
                fleet.reset(seed=0)
                urls = [life.env.client.url for life in fleet._backend.lives]
                assert set(urls) == {liar.url, honest.url}
                liar.mutate = mutate
                batch = fleet.step([1, 2])
                assert batch.status.tolist() == [FAULT if url == liar.url else READY for url in urls]
                assert batch.scored.tolist() == [url != liar.url for url in urls]
                assert len(fleet.faults) == 1 and "ProtocolBroken" in fleet.faults[0].cause


def test_mutations_are_mutations():
    data = {"type": "observation", "id": 1, "data": {"reward": 1.0, "x": [1, 2]}}
    before = copy.deepcopy(data)
    changed = [after for _, after in mutations(data, set())]
    assert data == before and len(changed) > 60 and all(json.dumps(after) != json.dumps(data) for after in changed)
