"""What a stranger's or a member's bytes can do to the Python parsers: nothing.

Hypothesis makes the inputs. A small sample runs with the suite; for longer (`make
fuzz`), each test for SECONDS of processor time:

    python tests/fuzz/test_fuzz_python.py SECONDS
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tests")]

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.address import split_address
from tfdist.core.rendezvous.auth import AuthenticationError, Sealer
from tfdist.core.rendezvous.channel import Channel, ChannelClosed
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.links import LinkCredentials
from tfdist.core.rendezvous.secret import MeetingPoint
from tfdist.core.rendezvous.store import StoreServer

SECRET = bytes(range(32))
CLAIMS = {"purpose": "store", "job": "", "generation": 0}
EXAMPLES = 500 if __name__ == "__main__" else 60  # of one call of a test

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner)
    ),
    max_leaves=12,
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["set", "add", "wait"]) | json_values,
        "key": st.text(max_size=5) | json_values,
        "keys": st.lists(st.text(max_size=5), max_size=3) | json_values,
        "value": json_values,
        "amount": st.integers() | json_values,
        "timeout_s": st.floats(max_value=0.0) | json_values.filter(lambda x: x != x),
    },
)


@st.composite
def hellos(draw: st.DrawFn) -> bytes:
    """A right hello with parts changed, cut, or followed by more."""
    data = bytearray(auth.hello("0.1.0", draw(st.binary(min_size=32, max_size=32)), {}))
    for at, value in draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)))
    ):
        data[at] = value
    end = draw(st.integers(0, len(data)))
    return bytes(data[:end]) + draw(st.binary(max_size=64))


def run(coroutine: Any) -> Any:
    """On a loop of its own."""
    return asyncio.run(coroutine)


async def talk(
    data: bytes, act: Callable[[Channel], Any]
) -> tuple[BaseException | None, bytes]:
    """Lets a channel read `data` and then the end; the error, and what it sent."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    try:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        try:
            await act(channel)
            error = None
        except (AuthenticationError, ChannelClosed, OSError) as found:
            error = found
        channel.close()
        sent = b""
        try:
            while part := theirs.recv(1 << 16):
                sent += part
        except ConnectionResetError:
            pass  # closed with bytes unread
        return error, sent
    finally:
        channel.close()
        theirs.close()


@given(hellos() | st.binary(max_size=300))
@settings(max_examples=EXAMPLES, deadline=None, derandomize=False)
def test_a_server_answers_no_hello_with_more_than_one_proof(data: bytes) -> None:
    error, sent = run(talk(data, lambda c: c.handshake_as_server(SECRET)))
    assert error is not None
    assert len(sent) in (0, auth.PREAMBLE_BYTES, auth.ANSWER_BYTES)


@given(st.binary(max_size=300) | hellos())
@settings(max_examples=EXAMPLES, deadline=None, derandomize=False)
def test_a_client_believes_no_answer(data: bytes) -> None:
    error, sent = run(talk(data, lambda c: c.handshake_as_client(SECRET, CLAIMS)))
    assert error is not None
    assert not isinstance(error, auth.RefusedError)
    assert len(sent) == len(auth.hello("", bytes(32), CLAIMS))  # no proof of ours


@given(st.lists(st.binary(max_size=80), max_size=4), st.binary(max_size=80))
@settings(max_examples=EXAMPLES, deadline=None, derandomize=False)
def test_an_opener_takes_what_was_sealed_in_its_order_only(
    bodies: list[bytes], forged: bytes
) -> None:
    sealer, opener = Sealer(SECRET), Sealer(SECRET)
    sealed = [sealer.seal(body) for body in bodies]
    assert [opener.open(message) for message in sealed] == bodies
    with pytest.raises(AuthenticationError):
        opener.open(forged)
    for message in sealed:
        with pytest.raises(AuthenticationError):
            opener.open(message)


@given(st.binary(max_size=200) | json_values.map(lambda v: json.dumps(v).encode()))
@settings(max_examples=EXAMPLES, deadline=None, derandomize=False)
def test_a_message_is_an_object_or_an_error(body: bytes) -> None:
    try:
        message = auth.decode(body)
    except AuthenticationError:
        return
    assert isinstance(message, dict)
    try:
        assert len(auth.decode_bytes(message, "nonce", 4)) == 4
    except AuthenticationError:
        pass


def sealed_frames(messages: list[Any], key: bytes) -> bytes:
    sealer = Sealer(key)
    frames = [sealer.seal(json.dumps(message).encode()) for message in messages]
    return b"".join(len(f).to_bytes(4, "big") + f for f in frames)


@given(st.lists(requests | json_values, min_size=1, max_size=4))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
)
def test_a_member_of_the_job_cannot_bring_the_store_down(messages: list[Any]) -> None:
    """Authenticated requests of any form: an answer or the end of that connection."""

    async def go() -> None:
        server = StoreServer(socket.socket(), SECRET)

        async def serve(channel: Channel) -> None:
            channel.claims = CLAIMS
            channel._receive, channel._send = Sealer(SECRET), Sealer(SECRET)
            await server._serve(channel)

        async with asyncio.timeout(20):
            error, _ = await talk(sealed_frames(messages, SECRET), serve)
        assert error is not None  # at the latest: closed
        server._listener._sock.close()

    run(go())


@given(requests | json_values)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=False)
def test_claims_are_refused_or_exactly_right(claims: Any) -> None:
    if not isinstance(claims, dict):
        return
    credentials = LinkCredentials(
        secret=SECRET, job="j", generation=3, rank=0, frames="control"
    )
    own = LinkCredentials(
        secret=SECRET, job="j", generation=3, rank=2, frames="control"
    )
    right = own.claims("tcp", 0)
    assert credentials.refusal("tcp", 3, right) == ""
    for name, value in claims.items():
        # Equal in JSON's eyes is equal: 3.0 is no other number than 3.
        if name in right and right[name] != value:
            assert credentials.refusal("tcp", 3, {**right, name: value})
    assert credentials.refusal("tcp", 3, claims)


@given(st.text(max_size=40) | st.from_regex(r"\[?[\w.:]*\]?:\d*", fullmatch=True))
@settings(max_examples=EXAMPLES, deadline=None, derandomize=False)
def test_an_address_is_split_or_refused(text: str) -> None:
    try:
        host, port = split_address(text)
    except RendezvousError:
        return
    assert host
    assert 0 < port < 65536


@given(st.binary(max_size=200) | json_values.map(lambda v: json.dumps(v).encode()))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_meeting_file_of_any_content_is_read_or_ignored(tmp_path, data) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = MeetingPoint._parse(folder, "file")
    finally:
        os.close(folder)
    assert found is None or isinstance(found["pid"], int)


@given(st.binary(max_size=400))
@settings(max_examples=EXAMPLES, deadline=None, derandomize=False)
def test_an_object_of_any_bytes_is_plain_data_or_an_error(data: bytes) -> None:
    objects = pytest.importorskip(
        "tfdist.collectives.object_codec", reason="needs TensorFlow"
    )
    try:
        value = objects.decode(data)
    except ValueError:
        return
    objects.encode(value)


@given(json_values, st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255))))
@settings(max_examples=EXAMPLES, deadline=None, derandomize=False)
def test_a_damaged_object_is_plain_data_or_an_error(
    value: Any, changes: list[tuple[int, int]]
) -> None:
    objects = pytest.importorskip(
        "tfdist.collectives.object_codec", reason="needs TensorFlow"
    )
    try:
        data = bytearray(objects.encode(value))
    except (TypeError, ValueError):
        return
    for at, byte in changes:
        data[at % len(data)] = byte
    try:
        objects.decode(bytes(data))
    except ValueError:
        pass


def main(seconds: float) -> None:
    """Runs every test above again and again, each for `seconds` of processor time."""
    import tempfile

    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        inner = test.hypothesis.inner_test
        arguments: dict[str, Any] = {}
        folder = tempfile.TemporaryDirectory()
        if "tmp_path" in inner.__code__.co_varnames:
            arguments["tmp_path"] = Path(folder.name)
        begin, examples = time.process_time(), 0
        while time.process_time() - begin < seconds:
            test(**arguments)
            examples += EXAMPLES
        folder.cleanup()
        print(
            f"{name}: {examples} examples, {time.process_time() - begin:.0f} s of "
            "processor time, 0 failures",
            flush=True,
        )


if __name__ == "__main__":
    main(float(sys.argv[1]))
