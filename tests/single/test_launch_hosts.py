"""Lists and files of hosts, places of ranks, what crosses to other hosts. Pure."""

import json
import shlex
import socket
import subprocess
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.core import allocator
from tfdist.core.rendezvous.address import own_address, route_to
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.launch import (
    agent_checks,
    agent_job,
    agent_protocol,
    hosts,
    options,
    remote,
)
from tfdist.launch.hosts import Host, HostsError, Place, mark_local, places


def pairs(found):
    return [(host.name, host.slots) for host in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host1:2,host2:2", [("host1", 2), ("host2", 2)]),
        ("a", [("a", 1)]),
        ("a,b:3", [("a", 1), ("b", 3)]),
        (" a:1 , b:2 ", [("a", 1), ("b", 2)]),
        ("me@a.b-c.org:4", [("me@a.b-c.org", 4)]),
        ("10.0.0.1:2,[fe80::1%eth0]:3,[::1]", [
            ("10.0.0.1", 2), ("fe80::1%eth0", 3), ("::1", 1)
        ]),
        ("a:1,b:1,a:2", [("a", 3), ("b", 1)]),
    ],
)  # fmt: skip
def test_lists_of_hosts(text, expected):
    assert pairs(hosts.parse_list(text)) == expected


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "a:", "a:0", "a:-1", "a:1:2", "::1:2", "a b:1", "-a:1", "a;b:1"]
    + ["$(x):1", "a:5000", "a:１", "@a:1", "me@:1", "a'b", "[::1:2", "a\n:1"],
)
def test_malformed_lists_are_refused(text):
    with pytest.raises(HostsError, match="-H"):
        hosts.parse_list(text)


def test_files_of_hosts():
    text = """
    # the machines of the second floor
    host1 slots=2
    host2:3            # as Horovod writes it
    host3
    host1 slots=1 max_slots=4
    10.0.0.4 max-slots=2 slots=2
    """
    assert pairs(hosts.parse_file(text, "f")) == [
        ("host1", 3),
        ("host2", 3),
        ("host3", 1),
        ("10.0.0.4", 2),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# nothing\n", "no host in it"),
        ("a\nb slots=two\n", "f, line 2: expected a number of slots"),
        ("a 2\n", "f, line 1: expected slots=N after the host, got '2'"),
        ("a slots\n", "f, line 1: expected slots=N after the host, got 'slots'"),
        ("a:2 slots=2\n", "given twice"),
        ("a slots=1 slots=2\n", "given twice"),
        ("a slots=3 max_slots=2\n", "max_slots=2 is below 3"),
        ("a user=me\n", "got 'user=me'"),
        ("--x\n", "not the name"),
    ],
)
def test_malformed_files_name_the_line(text, says):
    with pytest.raises(HostsError) as caught:
        hosts.parse_file(text, "f")
    assert says in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(HostsError, match="No such file"):
        hosts.read_file(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HostsError, match="not a text file"):
        hosts.read_file(str(tmp_path / "binary"))


def test_this_machine_is_known_by_all_its_names():
    own = socket.gethostname()
    found = mark_local(
        [
            Host("localhost", 1),
            Host("far.invalid", 2),
            Host(own, 2),
            Host("127.0.0.3", 1),
        ]
    )
    assert found == [Host("localhost", 4, True), Host("far.invalid", 2, False)]
    # As another user it is not the same.
    assert mark_local([Host("me@localhost", 1)]) == [Host("me@localhost", 1, False)]


@pytest.mark.parametrize(
    ("name", "is_local"),
    [
        ("10.9.8.7", True),
        ("10.9.8.6", False),
        ("fe80::1%eth7", True),
        ("ours", True),
        ("ours-and-loopback", True),
        ("shared", False),
        ("theirs", False),
    ],
)
def test_a_host_is_this_machine_if_nothing_else_has_its_name(
    monkeypatch, name, is_local
):
    addresses = {
        "ours": ["10.9.8.7"],
        "ours-and-loopback": ["127.0.1.1", "10.9.8.7"],
        "shared": ["10.9.8.7", "10.9.8.6"],
        "theirs": ["10.9.8.6"],
    }

    def resolved(host, port, **named):
        return [(None, None, 6, "", (one, 0)) for one in addresses[host]]

    interface = [
        SimpleNamespace(address="10.9.8.7"),
        SimpleNamespace(address="FE80::1%eth7"),
    ]
    monkeypatch.setattr(hosts.psutil, "net_if_addrs", lambda: {"eth7": interface})
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert [one.is_local for one in mark_local([Host(name, 1)])] == [is_local]


@pytest.mark.parametrize(
    ("slots", "size", "expected"),
    [
        ((2, 2), 4, ["0:0/2 0/2", "0:1/2 0/2", "1:0/2 1/2", "1:1/2 1/2"]),
        ((1, 3), 4, ["0:0/1 0/2", "1:0/3 1/2", "1:1/3 0/1", "1:2/3 0/1"]),
        ((2, 1), 3, ["0:0/2 0/2", "0:1/2 0/1", "1:0/1 1/2"]),
        ((3, 3), 2, ["0:0/2 0/1", "0:1/2 0/1"]),
    ],
)
def test_hosts_are_filled_in_order(slots, size, expected):
    found = places([Host(f"h{i}", count) for i, count in enumerate(slots)], size)
    assert [place.rank for place in found] == list(range(size))
    assert [
        f"{p.host}:{p.local_rank}/{p.local_size} {p.cross_rank}/{p.cross_size}"
        for p in found
    ] == expected


def test_too_few_slots_say_how_many_there_are():
    with pytest.raises(HostsError, match=r"4 slots \(a: 1, b: 3\)"):
        places([Host("a", 1), Host("b", 3)], 5)


def test_a_place_as_variables():
    place = Place(
        rank=3, host=1, local_rank=2, local_size=3, cross_rank=0, cross_size=1
    )
    assert place.variables(4) == {
        "TFDIST_RANK": "3",
        "TFDIST_SIZE": "4",
        "TFDIST_LOCAL_RANK": "2",
        "TFDIST_LOCAL_SIZE": "3",
        "TFDIST_CROSS_RANK": "0",
        "TFDIST_CROSS_SIZE": "1",
    }


# ---- options ----


def test_the_hosts_are_those_of_the_list_or_of_the_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("b slots=2\n")

    def chosen(*words):
        parsed = options.parser().parse_args(["-np", "1", *words, "true"])
        return pairs(options.chosen_hosts(parsed))

    assert chosen() == []
    assert chosen("-H", "a:3") == [("a", 3)]
    assert chosen("--hostfile", str(path)) == [("b", 2)]
    with pytest.raises(HostsError, match="not both"):
        chosen("-H", "a", "--hostfile", str(path))


def test_a_variable_without_a_value_has_the_one_it_has_here(monkeypatch, capsys):
    monkeypatch.setenv("HERE", "a=b")
    monkeypatch.delenv("NOT_HERE", raising=False)
    words = ["-np", "1", "-x", "HERE", "-x", "SET=c=d", "-x", "EMPTY=", "true"]
    assert options.parser().parse_args(words).env == [
        ("HERE", "a=b"),
        ("SET", "c=d"),
        ("EMPTY", ""),
    ]
    with pytest.raises(SystemExit):
        options.parser().parse_args(["-np", "1", "-x", "NOT_HERE", "true"])
    assert "NOT_HERE is not set here" in capsys.readouterr().err


# ---- what crosses ----


def test_only_what_is_needed_crosses():
    here = {
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "x",
        "PYTHONPATH": "src",
        "TFDIST_TIMEOUT_S": "9",
        "TFDIST_SECRET_FILE": "/proc/1/fd/3",
        "TFDIST_ADDRESS": "10.0.0.1",
        "TFDIST_LOG_DIR": "/logs",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_VAR_x": "1",
    }
    crossed = agent_job.crossing(here, {"TF_NUM_INTEROP_THREADS": "2"})
    assert crossed == {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": "src",
        "TFDIST_TIMEOUT_S": "9",
        "TF_NUM_INTEROP_THREADS": "2",
    }
    assert agent_job.missed(here, crossed) == ["OMP_NUM_THREADS"]
    everywhere = allocator.settings({})
    assert agent_job.missed({**here, **everywhere}, crossed) == ["OMP_NUM_THREADS"]
    changed = {**here, **everywhere, allocator.USE_BFC: "false"}
    expected = ["OMP_NUM_THREADS", allocator.USE_BFC]
    assert agent_job.missed(changed, crossed) == expected


@pytest.mark.parametrize("choice", ["10.0.0.0/8", "eth1"])
def test_a_network_or_interface_is_chosen_for_all_hosts_alike(choice):
    assert (
        agent_job.crossing({"TFDIST_ADDRESS": choice}, {})["TFDIST_ADDRESS"] == choice
    )


def test_the_other_hosts_own_variables_stay_and_stale_ones_go():
    own = {"PATH": "/usr/bin:/bin", "LANG": "C", "TFDIST_RANK": "7"}
    found = agent_checks.rank_environ(own, {"A": "b"}, "/venv/bin:/bin")
    assert found == {"PATH": "/venv/bin:/bin:/usr/bin", "LANG": "C", "A": "b"}


NASTY = st.text(
    st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1
)


@given(python=NASTY, path=NASTY)
def test_the_line_means_the_same_to_a_shell(python, path):
    """One word each for the shell, whatever is in it."""
    line = remote.remote_line("/" + python, "/" + path.replace(":", ""))
    words = shlex.split(line)
    assert words[:2] == ["exec", "env"]
    assert words[2].startswith("PYTHONPATH=/")
    assert words[3:] == ["/" + python, "-P", "-m", "tfdist.launch.agent"]


def test_a_real_shell_agrees_about_quoting():
    name = '/tmp/it\'s $HOME `x` "y"\n\\é'
    line = remote.remote_line("/bin/echo", name)
    said = subprocess.run(
        ["sh", "-c", line.replace("/bin/echo -P", "printenv PYTHONPATH #")],
        capture_output=True,
        text=True,
        timeout=10,
    )
    assert said.stdout == name + "\n"


# ---- frames ----


@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from([agent_protocol.STDOUT, agent_protocol.STDERR]), st.binary()
        )
    ),
    cut=st.one_of(st.integers(1, 64), st.just(1 << 20)),
    noise=st.binary(max_size=50).filter(lambda b: agent_protocol.GREETING not in b),
)
def test_frames_survive_any_cutting(parts, cut, noise):
    """After what a shell printed, in pieces of any size."""
    if (noise + agent_protocol.GREETING).index(agent_protocol.GREETING) != len(noise):
        return
    data = noise + agent_protocol.GREETING
    data += b"".join(agent_protocol.output(kind, 3, body) for kind, body in parts)
    data += agent_protocol.message(event="x", text="é\n")
    decoder = agent_protocol.Decoder(agent_protocol.GREETING)
    assert not decoder.greeted
    found = []
    for start in range(0, len(data), cut):
        found += decoder.feed(data[start : start + cut])
    assert [(f.kind, f.rank, f.body) for f in found[:-1]] == [
        (kind, 3, body) for kind, body in parts
    ]
    assert found[-1].message == {"event": "x", "text": "é\n"}
    assert decoder.noise == noise
    assert decoder.greeted


def test_what_was_said_is_known_also_where_no_greeting_comes():
    decoder = agent_protocol.Decoder(agent_protocol.GREETING)
    for part in (b"Permission ", b"denied\n"):
        assert decoder.feed(part) == []
    assert decoder.noise == b"Permission denied\n"


def test_what_is_no_frame_is_refused():
    with pytest.raises(agent_protocol.FrameError):
        agent_protocol.Decoder().feed(b"z" + bytes(8))
    with pytest.raises(agent_protocol.FrameError):
        agent_protocol.Decoder().feed(b"o" + bytes(4) + b"\xff" * 4)
    with pytest.raises(agent_protocol.FrameError):
        agent_protocol.Decoder(b"hello").feed(bytes(agent_protocol.MAX_NOISE_BYTES + 1))
    for body in (b"{", b"[]", b"[" * 100_000):
        with pytest.raises(agent_protocol.FrameError):
            _ = agent_protocol.Frame(agent_protocol.MESSAGE, 0, body).message


def test_bytes_of_the_environment_that_are_no_text_cross_too():
    body = json.loads(json.dumps({"A": "\udcff"}))
    assert body == {"A": "\udcff"}


# ---- the agent's checks ----


def checks(tmp_path, **changes):
    return {
        "cwd": str(tmp_path),
        "command": ["sh"],
        "ranks": [{"rank": 0}],
        "slots": 1,
        "size": 1,
        "shm_bytes": 0,
        "store": "127.0.0.1:1",
        "secret": "00" * 32,
        "environ": {"TFDIST_JOB_ID": "tfdistrun:1"},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "says", "code"),
    [
        ({"cwd": "/no/such/folder"}, "the working directory /no/such/folder", 1),
        ({"command": ["nosuchprogram"]}, "nosuchprogram: command not found there", 127),
        ({}, "tfdistrun cannot be reached from there at 127.0.0.1:1: no rendezvous", 1),
    ],
)
def test_what_is_missing_on_a_host_is_told(tmp_path, monkeypatch, changes, says, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent_checks, "_STORE_S", 0.2)
    with pytest.raises(agent_checks.PrepareError) as caught:
        agent_checks.prepare(checks(tmp_path, **changes), {"PATH": "/usr/bin:/bin"})
    assert says in str(caught.value)
    assert caught.value.code == code


# ---- addresses ----

ANY = ".".join("0000")


def test_the_own_address_by_address_network_or_interface():
    assert own_address("10.9.8.7") == "10.9.8.7"  # listening there tells more
    assert own_address("127.0.0.0/8") == "127.0.0.1"
    assert own_address("lo") == "127.0.0.1"


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (ANY, "all network interfaces"),
        ("::", "all network interfaces"),
        (f"{ANY}/0", "all network interfaces"),
        ("203.0.113.0/24", "no address in that network"),
        ("eth99", "interface of this machine (lo: 127.0.0.1"),
        ("10.0.0.0/99", "is not an IP address"),
    ],
)
def test_a_choice_that_leads_nowhere_is_refused(choice, says):
    with pytest.raises(RendezvousError) as caught:
        own_address(choice)
    assert f"TFDIST_ADDRESS={choice}".replace("'", "") in str(caught.value).replace(
        "'", ""
    )
    assert says in str(caught.value)


def test_no_way_leads_to_what_has_no_address():
    assert route_to("no-such-host.invalid") is None
    assert route_to("127.0.0.1") is None
