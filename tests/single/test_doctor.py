"""tfdist doctor: each fault of a machine is named, with what to do."""

import importlib.metadata
import json
import os
import pwd
import resource
import socket
import sys

import pytest

from tfdist.core import native, op_compiler
from tfdist.tools.doctor import checks, command, trial
from tfdist.tools.doctor.finding import ERROR, OK, WARNING, Finding, worst
from tfdist.tools.doctor.trial import Rank, Sums

SECRET = "TFDIST_SECRET_FILE"
MEETING = "TFDIST_RENDEZVOUS"


def only(findings, level):
    """The one finding of this level, as one text."""
    [found] = [one for one in findings if one.level == level]
    return f"{found.check}: {found.text} {found.remedy}"


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(bytes(32))
    file.chmod(0o600)
    return file


def test_a_machine_that_can_train_has_no_errors():
    found = checks.machine(os.environ, 1)  # a warning may be right, as in a container
    assert [one for one in found if one.level == ERROR] == []
    assert {"launcher", "TensorFlow", "Keras", "core", "operations", "limits"} <= {
        one.check for one in found
    }


def test_two_launchers_are_named():
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", "TFDIST_RANK": "1", "TFDIST_SIZE": "2"}
    assert "PMI_RANK=0" in only(checks.launcher(environ), ERROR)


def test_the_rule_of_the_launcher_is_told():
    text = only(checks.launcher({"PMI_RANK": "0", "PMI_SIZE": "2"}), OK)
    assert "rank 0 of 2 by mpich (PMI_RANK=0 and PMI_SIZE=2)" in text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TFDIST_SEGMENT_BYTE", "1", "did you mean TFDIST_SEGMENT_BYTES"),
        ("TFDIST_TRANSPORT", "udp", "TFDIST_TRANSPORT"),
    ],
)
def test_a_wrong_setting_is_named(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    assert words in only(checks.settings(os.environ), ERROR)


@pytest.mark.parametrize(
    ("environ", "level", "words"),
    [
        ({MEETING: "10.0.0.1"}, ERROR, "is not host:port"),
        ({MEETING: "no-such-host.invalid:1"}, ERROR, "is not known here"),
        ({MEETING: "192.0.2.1:1"}, WARNING, "TFDIST_SECRET_FILE is not set"),
        ({MEETING: "a..b:1"}, ERROR, "is not known here"),
        ({SECRET: "/nowhere"}, ERROR, "cannot be opened"),
    ],
)
def test_what_a_job_on_several_hosts_lacks_is_named(environ, level, words):
    assert words in only(checks.meeting(environ), level)


def test_the_address_may_be_that_of_the_platform(secret):
    hosts = {"SM_HOSTS": '["127.0.0.1"]', "SM_CURRENT_HOST": "127.0.0.1"}
    found = checks.meeting({SECRET: str(secret), **hosts})
    assert [one.level for one in found] == [OK, OK]
    assert "127.0.0.1:29600 is 127.0.0.1" in found[1].text


def test_a_secret_that_others_can_read_is_named(secret):
    assert checks.meeting({SECRET: str(secret), MEETING: "127.0.0.1:1"})[0].level == OK
    assert "TFDIST_RENDEZVOUS is not set" in only(
        checks.meeting({SECRET: str(secret)}), WARNING
    )
    secret.chmod(0o644)
    assert "is open to other users" in only(
        checks.meeting({SECRET: str(secret)}), ERROR
    )
    secret.chmod(0o600)
    secret.write_text("password")
    assert "32 random bytes" in only(checks.meeting({SECRET: str(secret)}), ERROR)


def test_another_python_is_named(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1, "final", 0))
    assert "Use Python 3.11, 3.12 or 3.13" in only(checks.python(), ERROR)


@pytest.mark.parametrize(
    ("there", "level", "words"),
    [
        ({}, ERROR, "pip install tensorflow-cpu"),
        ({"tensorflow": "2.15.1", "keras": "3.12.0"}, WARNING, "2.16 to 2.21"),
        ({"tensorflow": "2.30.0", "keras": "3.12.0"}, WARNING, "2.16 to 2.21"),
        ({"tensorflow": "2.21.0", "keras": "2.15.0"}, ERROR, "'keras>=3.11'"),
        ({"tensorflow": "2.21.0"}, ERROR, "Keras: is not installed"),
        (
            {"tensorflow": "2.21.0", "tensorflow-cpu": "2.20.0", "keras": "3.12.0"},
            WARNING,
            "pip uninstall tensorflow tensorflow-cpu",
        ),
    ],
)
def test_packages_that_do_not_fit_are_named(monkeypatch, there, level, words):
    def version(name):
        if name in there:
            return there[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    assert words in only(checks.packages(), level)


def test_modules_that_are_compiled_at_every_start_are_named(tmp_path, monkeypatch):
    cached = tmp_path / "__pycache__" / "keras.pyc"
    monkeypatch.setattr(importlib.util, "cache_from_source", lambda path: str(cached))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    only(checks.bytecode(), OK)  # the next import writes it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = only(checks.bytecode(), WARNING)
    assert "PYTHONDONTWRITEBYTECODE (or" in found and "compileall" in found
    cached.parent.mkdir()
    cached.touch()
    only(checks.bytecode(), OK)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # another user's
    found = only(checks.bytecode(), WARNING)
    assert f"{cached.parent} cannot be written" in found


def test_a_core_that_is_not_built_is_named(monkeypatch):
    def missing():
        raise ImportError("the core library of tfdist is not built")

    monkeypatch.setattr(native, "build_info", missing)
    assert "core: the core library of tfdist" in only(checks.libraries(), ERROR)


def test_missing_operations_are_compiled_or_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(op_compiler, "find_compiler", lambda: ["g++"])
    assert "compiled on first use by g++" in only(checks.libraries(), WARNING)
    name = op_compiler.library_name(checks.tensorflow_version())
    (tmp_path / name).write_text("tfdist ops built for TensorFlow 2.1.0;")
    assert "compiled on first use by g++" in only(checks.libraries(), WARNING)

    def missing():
        raise op_compiler.CompileError("no C++17 compiler was found")

    monkeypatch.setattr(op_compiler, "find_compiler", missing)
    assert "no C++17 compiler was found" in only(checks.libraries(), ERROR)


def test_limits_that_are_too_low_are_named(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    [files, stack] = checks.limits(4)[:2]
    assert files.level == stack.level == ERROR
    assert "ulimit -Hn" in files.text and "ulimit -s" in stack.text


def test_more_ranks_than_processors_are_a_warning():
    ranks = len(os.sched_getaffinity(0)) + 1
    assert f"{ranks} ranks share" in only(checks.limits(ranks), WARNING)


def test_a_quota_of_processors_is_named(tmp_path):
    (tmp_path / "job" / "step").mkdir(parents=True)
    groups = "4:memory:/other\n0::/job/step\n"
    assert checks.cpu_quota(tmp_path, groups) is None
    for text, quota in (("150000 100000", 1.5), ("max 100000", None), ("", None)):
        (tmp_path / "cpu.max").write_text(text)
        for found in (groups, "0::/elsewhere\n", ""):
            assert checks.cpu_quota(tmp_path, found) == quota
    (tmp_path / "cpu.max").write_text("400000 100000")
    (tmp_path / "job" / "cpu.max").write_text("200000 100000")
    assert checks.cpu_quota(tmp_path, groups) == 2
    assert checks.cpu_quota(tmp_path, "0::/\n") == 4


def test_a_quota_of_control_groups_of_version_1_is_named(tmp_path):
    (tmp_path / "cpu,cpuacct" / "job").mkdir(parents=True)
    (tmp_path / "unified" / "job").mkdir(parents=True)
    groups = "3:memory:/elsewhere\n2:cpu,cpuacct:/job\n0::/job\n"
    for quota_us, quota in (("-1\n", None), ("50000\n", 0.5)):
        (tmp_path / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us").write_text(quota_us)
        (tmp_path / "cpu,cpuacct" / "job" / "cpu.cfs_period_us").write_text("100000\n")
        assert checks.cpu_quota(tmp_path, groups) == quota
    (tmp_path / "unified" / "job" / "cpu.max").write_text("25000 100000")
    assert checks.cpu_quota(tmp_path, groups) == 0.25


def test_a_quota_below_the_number_of_processors_is_a_warning(monkeypatch):
    monkeypatch.setattr(checks, "cpu_quota", lambda root, groups: 0.5)
    assert "limits this machine to 0.5" in only(checks.processors(), WARNING)


def test_an_unknown_host_name_is_named(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert "no-such-host.invalid is not known" in only(checks.names(), WARNING)


def test_folders_that_cannot_be_written_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = {"HOME": str(tmp_path)}
    assert checks.folders(home) == [
        Finding("folders", OK, checks.folders(home)[0].text)
    ]
    assert "HOME is not set" in only(checks.folders({}), WARNING)
    assert "Set TMPDIR" in only(checks.folders({**home, "TMPDIR": "/nowhere"}), ERROR)
    monkeypatch.setattr(checks, "LEAST_TEMPORARY_BYTES", 1 << 62)
    assert "of free space" in only(checks.folders(home), ERROR)


def test_a_working_folder_that_was_deleted_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    found = only(checks.folders({"HOME": str(tmp_path)}), ERROR)
    monkeypatch.chdir(tmp_path)
    assert "was deleted" in found


def test_a_user_without_a_name_is_a_warning(tmp_path, monkeypatch):
    def nobody(number):
        raise KeyError(number)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert "has no name" in only(checks.folders({"HOME": str(tmp_path)}), WARNING)


def ranks(**of_last):
    usual = {"findings": [], "clock_s": 100.0, "memory_rate": 8e9}
    return [Rank(host=f"host{n}", **usual) for n in range(3)] + [
        Rank(**{"host": "host3", **usual, **of_last})
    ]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"clock_s": 160.2}, "clock: is 60 s ahead of that of host0"),
        ({"clock_s": 40.0}, "clock: is 60 s behind that of host0"),
        (
            {"memory_rate": 3e9},
            "adds 3.0 GB/s in memory, the median of the hosts is 8.0",
        ),
    ],
)
def test_a_host_that_differs_from_the_others_is_named(changed, words):
    [(host, finding)] = trial.about_ranks(ranks(**changed))
    assert host == "host3"
    assert words in only([finding], WARNING)
    assert trial.about_ranks(ranks()) == []


def test_a_slow_network_is_named():
    rates = {(0, 1): 1e9, (1, 2): 1.1e9, (2, 3): 0.3e9, (3, 0): 1e9}
    text = only(trial.about_lines(rates, ranks()), WARNING)
    assert "host2 to host3: 2.40 Gbit/s, the median of the hosts is 8.00" in text
    assert "8.00 Gbit/s" in only(trial.about_lines({(0, 1): 1e9}, ranks()), OK)
    assert trial.about_lines({}, ranks()) == []


def test_wrong_sums_are_an_error():
    assert "all exact" in only([trial.about_sums(Sums(30, 0, 1.0), ranks())], OK)
    found = trial.about_sums(Sums(30, 4, 1.0), ranks())
    assert "on 4 ranks, 4 hosts in 1.0 s: 4 elements were wrong" in only([found], ERROR)


def test_the_worst_level_counts():
    assert worst([]) == OK
    assert worst([Finding("a", OK, ""), Finding("b", WARNING, "")]) == WARNING
    assert worst([Finding("a", ERROR, ""), Finding("b", WARNING, "")]) == ERROR


def test_the_files_have_all_findings_and_the_failing_hosts(tmp_path, capsys):
    files = ["--json", f"{tmp_path}/a.json", "--failing-hosts", f"{tmp_path}/hosts"]
    report = command.Report(command.parser().parse_args(files))
    report.add("host1", Finding("stack", ERROR, "64 KiB", "raise it"), named=True)
    report.add("host0", Finding("stack", OK, "8 MiB"), named=True, shown=False)
    report.add("host2", Finding("clock", WARNING, "ahead"), named=True)
    report.add("host3", Finding("folders", WARNING, "read-only"), named=True)
    report.add("", Finding("collectives", OK, "exact"), named=False)
    assert report.end() == 1
    assert capsys.readouterr().out.splitlines() == [
        "ERROR    stack (host1): 64 KiB",
        "         raise it",
        "WARNING  clock (host2): ahead",
        "WARNING  folders (host3): read-only",
        "ok       collectives: exact",
        "1 error, 2 warnings",
    ]
    assert (tmp_path / "hosts").read_text() == "host1\nhost2\n"
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["level"] == ERROR
    hosts = [one["host"] for one in content["findings"]]
    assert hosts == ["host1", "host0", "host2", "host3", ""]


def test_a_wrong_machine_starts_no_ranks(monkeypatch, capsys):
    monkeypatch.setattr(
        checks, "machine", lambda environ, ranks: [Finding("core", ERROR, "missing")]
    )
    assert command.main(["-np", "2"]) == 1
    assert "ERROR    core: missing\n1 error, 0 warnings" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "0"],
        ["--seconds", "-1"],
        ["--json", "/nowhere/a.json"],
        ["--json", "/tmp"],
        ["--failing-hosts", "/tmp"],
    ],
)
def test_bad_options_are_refused(words, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(words)
    assert caught.value.code == 2
    assert words[1] in capsys.readouterr().err
