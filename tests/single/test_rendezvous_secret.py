"""Where the secret lies, the folder where ranks of one host meet, and `connect`."""

import asyncio
import json
import os
import stat
import subprocess
import sys
import textwrap
import time

import pytest
from helpers.deadline import deadline
from helpers.ports import free_ports

from tfdist.core.rendezvous import secret as secret_module
from tfdist.core.rendezvous.connect import Options, connect
from tfdist.core.rendezvous.environment import Placement, detect
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.secret import (
    MeetingPoint,
    keep_in_memory,
    parent_job,
    read_secret_file,
    start_time,
)

SECRET = bytes(range(32))
OPTIONS = Options(
    generation=1,
    timeout_s=10.0,
    transport="auto",
    shm_bytes=4096,
    window_bytes=4096,
    rows={},
)

# One rank: connects, prints its place as JSON, leaves.
RANK = textwrap.dedent(
    """
    import json, os, sys
    from tfdist.core.rendezvous.environment import detect
    from tfdist.core.rendezvous.errors import RendezvousError
    from tfdist.core.rendezvous.connect import Options, connect
    options = Options(
        generation=1, timeout_s=float(sys.argv[1]), transport="auto",
        shm_bytes=4096, window_bytes=4096, rows={},
    )
    try:
        mesh = connect(os.environ, detect(os.environ), options)
    except RendezvousError as error:
        sys.exit(error.message)
    print(json.dumps([mesh.topology.rank, [link.peer for link in mesh.links]]))
    """
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """No test meets ranks of a real job."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in list(os.environ):
        if name.startswith("TFDIST_"):
            monkeypatch.delenv(name)


def spawn(environ, *, timeout_s=10.0):
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(timeout_s)],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes, timeout_s=20.0):
    try:
        return [p.communicate(timeout=timeout_s) for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


# ---- the file of the secret ----


def write(path, data, mode=0o600):
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def test_a_secret_is_read_raw_or_in_hexadecimal(tmp_path):
    assert read_secret_file(write(tmp_path / "raw", SECRET)) == SECRET
    text = SECRET.hex().encode() + b"\n"
    assert read_secret_file(write(tmp_path / "hex", text)) == SECRET


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o660, 0o601])
def test_a_secret_that_others_can_read_or_write_is_refused(tmp_path, mode):
    path = write(tmp_path / "open", SECRET, mode)
    with pytest.raises(RendezvousError, match="open to other users") as caught:
        read_secret_file(path)
    assert f"{mode:04o}" in caught.value.message
    assert SECRET.hex() not in caught.value.message


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change an owner")
def test_a_secret_of_another_user_is_refused(tmp_path):
    path = write(tmp_path / "other", SECRET)
    os.chown(path, 12345, 12345)
    with pytest.raises(RendezvousError, match="owner 12345"):
        read_secret_file(path)


@pytest.mark.parametrize("data", [b"", b"short", SECRET + b"x", b"zz" * 32])
def test_what_is_no_secret_is_refused(tmp_path, data):
    with pytest.raises(RendezvousError, match="must hold 32 random bytes"):
        read_secret_file(write(tmp_path / "bad", data))


def test_a_missing_secret_or_a_folder_is_refused(tmp_path):
    with pytest.raises(RendezvousError, match="cannot be opened"):
        read_secret_file(str(tmp_path / "none"))
    with pytest.raises(RendezvousError, match="is not a file"):
        read_secret_file(str(tmp_path))


@deadline(20)
def test_a_secret_in_memory_can_be_read_by_a_child_as_long_as_we_live():
    fd, path = keep_in_memory(SECRET)
    try:
        code = "import sys; from tfdist.core.rendezvous.secret import read_secret_file;"
        code += "print(read_secret_file(sys.argv[1]).hex())"
        told = subprocess.run(
            [sys.executable, "-c", code, path],
            capture_output=True,
            text=True,
            timeout=15,
            check=True,
        )
        assert told.stdout.strip() == SECRET.hex()
    finally:
        os.close(fd)
    with pytest.raises(RendezvousError):
        read_secret_file(path)


# ---- the meeting point ----


def meeting(job="j", generation=1):
    return MeetingPoint(job, generation, os.environ)


def find(point, timeout_s=0.1):
    return asyncio.run(point.find(deadline=time.monotonic() + timeout_s))


def test_the_file_is_private_found_and_removed():
    point = meeting()
    point.publish("127.0.0.1:80", SECRET)
    path = point.folder / point.name
    assert stat.S_IMODE(point.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find(meeting()) == ("127.0.0.1:80", SECRET)
    for other in (meeting(job="k"), meeting(generation=2)):
        with pytest.raises(RendezvousError, match="rank 0 did not call"):
            find(other)
    point.remove()
    assert not path.exists()


def stale(point, **change):
    point.publish("127.0.0.1:80", SECRET)
    path = point.folder / point.name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return path


def test_files_of_dead_processes_are_ignored_and_replaced():
    dead = subprocess.Popen(["true"])
    dead.wait()
    point = meeting()
    for change in ({"pid": dead.pid}, {"started": "1"}):
        stale(point, **change)
        with pytest.raises(RendezvousError, match="rank 0 did not call"):
            find(point)
        point.publish("127.0.0.1:81", SECRET)
        assert find(point)[0] == "127.0.0.1:81"
    left = stale(meeting(job="old"), pid=dead.pid)
    torn = point.folder / f"{'0' * 32}.{dead.pid}"  # it was killed while it wrote
    torn.touch()
    point.publish("127.0.0.1:82", SECRET)
    assert not left.exists()  # swept, as nobody will ask for it again
    assert not torn.exists()


def test_what_may_be_of_a_living_process_stays():
    point, parent = meeting(), os.getppid()
    point.publish("127.0.0.1:80", SECRET)
    other = stale(meeting(job="k"), pid=parent, started=start_time(parent))
    writing = point.folder / f"{other.name}.{parent}"
    strange = point.folder / "notes"
    for path in (writing, strange):
        path.touch()
    point.publish("127.0.0.1:81", SECRET)
    meeting(job="k").remove()
    assert {other, writing, strange} <= set(point.folder.iterdir())


def test_no_descriptor_stays_open():
    point = meeting()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        point.publish("127.0.0.1:80", SECRET)
        find(point)
        point.remove()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_part_that_a_process_of_the_same_number_left_is_replaced():
    point = meeting()
    point.publish("127.0.0.1:80", SECRET)
    (point.folder / f"{point.name}.{os.getpid()}").write_text("{")
    point.publish("127.0.0.1:81", SECRET)
    assert find(point)[0] == "127.0.0.1:81"


@deadline(20)
def test_a_process_that_nobody_has_waited_for_is_dead():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert start_time(child.pid) is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_time(child.pid) is None


def test_a_living_job_of_the_same_name_is_an_error():
    point = meeting()
    parent = os.getppid()
    stale(point, pid=parent, started=start_time(parent))
    with pytest.raises(RendezvousError, match=f"process {parent} already runs rank 0"):
        point.publish("127.0.0.1:80", SECRET)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "x" * 9000])
def test_a_damaged_file_is_ignored(text):
    point = meeting()
    point.publish("127.0.0.1:80", SECRET)
    (point.folder / point.name).write_text(text)
    with pytest.raises(RendezvousError, match="rank 0 did not call"):
        find(point)


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path):
    point = meeting()
    point.publish("127.0.0.1:80", SECRET)
    path = point.folder / point.name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RendezvousError, match="rank 0 did not call"):
        find(point)


def test_a_folder_open_to_others_or_a_link_is_refused(tmp_path):
    point = meeting()
    point.folder.mkdir(mode=0o755)
    point.folder.chmod(0o755)
    with pytest.raises(RendezvousError, match="0700"):
        point.publish("127.0.0.1:80", SECRET)
    point.folder.rmdir()
    (tmp_path / "real").mkdir(mode=0o700)
    point.folder.symlink_to(tmp_path / "real")
    with pytest.raises(RendezvousError, match="cannot be used"):
        find(point)


def test_the_folder_without_a_runtime_folder_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setattr(secret_module.tempfile, "gettempdir", lambda: str(tmp_path))
    point = MeetingPoint("j", 1, {})
    assert point.folder == tmp_path / f"tfdist-{os.geteuid()}"
    # One that is not there may come from another login, by su or ssh.
    gone = MeetingPoint("j", 1, {"XDG_RUNTIME_DIR": str(tmp_path / "gone")})
    assert gone.folder == point.folder


@deadline(20)
def test_the_parent_job_skips_shells_between_launcher_and_rank():
    code = "import os; from tfdist.core.rendezvous.secret import parent_job;"
    code += "print(parent_job(os.environ))"
    environ = {**os.environ, "PMI_RANK": "0", "PMI_FD": "9"}
    commands = (
        [sys.executable, "-c", code],
        ["sh", "-c", f"{sys.executable} -c '{code}'; true"],
    )
    told = [
        subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=15
        ).stdout.strip()
        for command in commands
    ]
    mine = f"parent {os.getpid()} {start_time(os.getpid())}"
    assert told == [mine, mine]
    assert parent_job({}) != mine


# ---- connect: real processes ----


@deadline(40)
def test_ranks_of_mpich_meet_by_their_parent_process(tmp_path):
    processes = [
        spawn(
            {
                "PMI_RANK": str(rank),
                "PMI_SIZE": "3",
                "MPI_LOCALRANKID": str(rank),
                "MPI_LOCALNRANKS": "3",
            }
        )
        for rank in range(3)
    ]
    out = finish(processes)
    assert [json.loads(text or "0") for text, _ in out] == [
        [0, [1, 2]],
        [1, [0, 2]],
        [2, [0, 1]],
    ], out
    assert list((tmp_path / "tfdist").iterdir()) == []  # removed after use


def as_tfdist(rank):
    return {"TFDIST_RANK": str(rank), "TFDIST_SIZE": "2"}


def as_one_rank_a_host_of_openmpi(rank):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "PMIX_NAMESPACE": "prterun-host-1@1",
    }


@deadline(40)
@pytest.mark.parametrize("place", [as_tfdist, as_one_rank_a_host_of_openmpi])
def test_ranks_meet_at_a_given_address_with_a_given_secret(tmp_path, place):
    [port] = free_ports(1)
    common = {
        "TFDIST_RENDEZVOUS": f"127.0.0.1:{port}",
        "TFDIST_SECRET_FILE": write(tmp_path / "secret", SECRET),
    }
    # Rank 1 comes first and waits.
    second = spawn({**common, **place(1)})
    time.sleep(0.3)
    out = finish([spawn({**common, **place(0)}), second])
    assert [json.loads(text or "0") for text, _ in out] == [[0, [1]], [1, [0]]], out


@deadline(30)
def test_no_rank_zero_is_an_error_at_the_deadline():
    before = time.monotonic()
    ((_, error),) = finish(
        [
            spawn(
                {"TFDIST_RANK": "1", "TFDIST_SIZE": "2", "TFDIST_JOB_ID": "x"},
                timeout_s=0.5,
            )
        ]
    )
    assert "rank 0 did not call tfdist.init()" in error
    assert time.monotonic() - before < 8.0


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"},
            "only 2 of 4 ranks are on this host",
        ),
        (
            {"TFDIST_RANK": "0", "TFDIST_SIZE": "2", "TFDIST_RENDEZVOUS": "10.0.0.1:5"},
            "only a loopback address such as 127.0.0.1 is allowed",
        ),
        (
            {
                "PMI_RANK": "0",
                "PMI_SIZE": "4",
                "MPI_LOCALNRANKS": "2",
                "TFDIST_RENDEZVOUS": "10.0.0.1:5",
            },
            "only a loopback address such as 127.0.0.1 is allowed",
        ),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": "5",
            },
            "only a loopback address such as 127.0.0.1 is allowed",
        ),
        (
            {"TFDIST_RANK": "0", "TFDIST_SIZE": "2", "TFDIST_ADDRESS": "10.0.0.1"},
            "is not a loopback address",
        ),
        (
            {"TFDIST_RANK": "0", "TFDIST_SIZE": "2", "TFDIST_SECRET_FILE": "/x"},
            "but no address",
        ),
    ],
    ids=["hosts", "rendezvous", "mpich", "torchrun", "address", "secret"],
)
def test_beyond_this_host_a_secret_and_an_address_are_demanded(environ, expected):
    with pytest.raises(RendezvousError) as caught:
        connect(environ, detect(environ), OPTIONS)
    assert expected in caught.value.message
    assert "TFDIST_RENDEZVOUS=host:port" in caught.value.message
    assert "TFDIST_SECRET_FILE" in caught.value.message


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "host", "10.0.0.300"])  # noqa: S104
def test_an_address_must_be_one_of_an_interface(address):
    environ = {"TFDIST_ADDRESS": address}
    with pytest.raises(RendezvousError, match="TFDIST_ADDRESS="):
        connect(environ, Placement(rank=0, size=2), OPTIONS)


@deadline(30)
def test_connect_works_inside_a_running_loop():
    async def go():
        with pytest.raises(RendezvousError, match="rank 1 of 2 did not call"):
            connect(
                {},
                Placement(rank=0, size=2, job="lonely"),
                Options(
                    generation=1,
                    timeout_s=1.0,
                    transport="auto",
                    shm_bytes=4096,
                    window_bytes=4096,
                    rows={},
                ),
            )

    asyncio.run(go())
