"""horovodrun: every flag of Horovod's launcher becomes something, or a note."""

import re

import pytest
import yaml

from tfdist.launch import options as tfdistrun
from tfdist.launch.horovod import command, config_file, flags, mode, variables
from tfdist.launch.horovod.config_file import ConfigFileError
from tfdist.launch.horovod.translation import FlagError, translate
from tfdist.launch.hosts import Place

TRAIN = ["python", "train.py", "--lr", "0.1", "-np", "7"]
# Flag and value → what tfdistrun gets for it.
HONOURED = [
    (["-H", "a:2,b:2"], ["-H", "a:2,b:2"]),
    (["--hosts", "a:4"], ["-H", "a:4"]),
    (["-hostfile", "hosts"], ["--hostfile", "hosts"]),
    (["--hostfile", "hosts"], ["--hostfile", "hosts"]),
    (["--output-filename", "out"], ["--log-dir", "out"]),
    (["-prefix-timestamp"], ["--timestamps"]),
    (["--prefix-output-with-timestamp"], ["--timestamps"]),
    (["--log-with-timestamp"], ["--timestamps"]),
    (["--no-log-hide-timestamp"], ["--timestamps"]),
    (["--log-without-timestamp"], []),
    (["--log-hide-timestamp"], []),
    (
        ["--start-timeout", "60"],
        ["--host-timeout-s", "60", "-x", "HOROVOD_START_TIMEOUT=60"],
    ),
    (["--network-interface", "eth1"], ["-x", "HOROVOD_GLOO_IFACE=eth1"]),
    (["--fusion-threshold-mb", "32"], ["-x", f"HOROVOD_FUSION_THRESHOLD={32 << 20}"]),
    (["--hierarchical-allreduce"], ["-x", "HOROVOD_HIERARCHICAL_ALLREDUCE=1"]),
    (["--no-hierarchical-allreduce"], ["-x", "HOROVOD_HIERARCHICAL_ALLREDUCE=0"]),
    (["--torus-allreduce"], ["-x", "HOROVOD_TORUS_ALLREDUCE=1"]),
    (["--no-torus-allreduce"], ["-x", "HOROVOD_TORUS_ALLREDUCE=0"]),
    (["--timeline-filename", "t.json"], ["-x", "HOROVOD_TIMELINE=t.json"]),
    (["--no-stall-check"], ["-x", "HOROVOD_STALL_CHECK_DISABLE=1"]),
    (["--stall-check"], ["-x", "HOROVOD_STALL_CHECK_DISABLE=0"]),
    (
        ["--stall-check-warning-time-seconds", "9"],
        ["-x", "HOROVOD_STALL_CHECK_TIME_SECONDS=9"],
    ),
    (
        ["--stall-check-shutdown-time-seconds", "9"],
        ["-x", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=9"],
    ),
    (["--log-level", "DEBUG"], ["-x", "HOROVOD_LOG_LEVEL=DEBUG"]),
    (["--verbose"], ["-x", "HOROVOD_LOG_LEVEL=INFO"]),
    (["--fusion-threshold-mb", "0"], ["-x", "HOROVOD_FUSION_THRESHOLD=0"]),
    (["--mpi-args=-x A=b -x C=d"], ["-x", "A=b", "-x", "C=d"]),
    (["--binding-args=--bind-to core"], ["--bind-to", "core"]),
    (["--binding-args=-bind-to none -map-by slot"], ["--bind-to", "none"]),
    (["--mpi-args=--bind-to package:if-supported"], ["--bind-to", "socket"]),
    (["--binding-args=--bind-to=core --map-by=slot"], ["--bind-to", "core"]),
    (["--binding-args=--bind-to slice"], ["--bind-to", "slice"]),
    (["--no-autotune"], []),
    (["--no-hierarchical-allgather"], []),
    (["--no-timeline-mark-cycles"], []),
    (["--no-mpi-threads-disable"], []),
    (["--max-np", "4"], []),
    (["--min-np", "2", "--max-np", "4"], ["--min-np", "2"]),
    (
        ["--host-discovery-script", "find.sh", "--max-np", "8"],
        ["--host-discovery-script", "find.sh", "--min-np", "4", "--max-np", "8"],
    ),
    (
        ["--host-discovery-script", "f.sh", "--max-np", "8", "--reset-limit", "3"],
        ["--max-restarts", "3", "--host-discovery-script", "f.sh"]
        + ["--min-np", "4", "--max-np", "8"],
    ),
    (
        ["--min-num-proc", "2", "--reset-limit", "3"],
        ["--min-np", "2", "--max-restarts", "3"],
    ),
]  # fmt: skip
WITHOUT_MEANING = [
    ["--disable-cache"],
    ["--cycle-time-ms", "2.5"],
    ["--cache-capacity", "2048"],
    ["--hierarchical-allgather"],
    ["--autotune"],
    ["--autotune-log-file", "log.csv"],
    ["--autotune-warmup-samples", "5"],
    ["--autotune-steps-per-sample", "5"],
    ["--autotune-bayes-opt-max-samples", "5"],
    ["--autotune-gaussian-process-noise", "0.5"],
    ["--slots-per-host", "2"],
    ["--elastic-timeout", "60"],
    ["--blacklist-cooldown-range", "60", "300"],
    ["--timeline-mark-cycles"],
    ["--mpi-threads-disable"],
    ["--mpi-args=--oversubscribe"],
    ["--tcp"],
    ["--binding-args=--map-by ppr:2:socket"],
    ["--num-nccl-streams", "2"],
    ["--thread-affinity", "1"],
    ["--gloo-timeout-seconds", "60"],
    ["--gloo"],
    ["--mpi"],
]


def parsed(*arguments):
    return flags.parser().parse_args(["-np", "4", *arguments, *TRAIN])


@pytest.mark.parametrize(("given", "expected"), HONOURED, ids=str)
def test_a_flag_with_a_meaning_becomes_options_of_tfdistrun(given, expected):
    made = translate(parsed(*given))
    assert made.words == ["--horovod", "-np", "4", *expected, "--", *TRAIN]
    assert made.notes == []
    options = tfdistrun.parser().parse_args(made.words)  # which it takes
    assert options.size == 4 and options.horovod


@pytest.mark.parametrize("given", WITHOUT_MEANING, ids=str)
def test_a_flag_without_meaning_is_named_with_what_is_used_instead(given):
    made = translate(parsed(*given))
    assert made.words == ["--horovod", "-np", "4", "--", *TRAIN]
    (note,) = made.notes
    assert note.startswith(given[0].partition("=")[0])
    assert "has no effect: " in note


@pytest.mark.parametrize(
    "given",
    [
        "--bind-to core --map-by ppr:2:socket:pe=10",
        "--map-by slot:PE=4",
        "--map-by=socket:SPAN,PE=4",
        "-bind-to core:4",
        "--bind-to core:overload-allowed",
        "--bind-to l3cache",
        "--bind-to=hwthread",
        "--bind-to",
        "--bind-to core --cpus-per-proc 4",
        "--bind-to core --rankfile ranks",
        "-cpu-list 0,2",
    ],
)
def test_a_binding_that_tfdistrun_has_not_leaves_ranks_unbound_and_says_so(given):
    for flag in ("--mpi-args", "--binding-args"):
        made = translate(parsed(f"{flag}={given} -x A=b"))
        assert made.words == ["--horovod", "-np", "4", "-x", "A=b", "--", *TRAIN]
        (note,) = made.notes
        plain = re.sub(r"(-[a-z-]+)=", r" \1 ", f" {given}").replace("  ", " ")
        words = [f"{flag} -{word}" for word in plain.split(" -")[1:]]
        assert note.startswith(f"{', '.join(words)}: ranks are not bound, since")
        assert "tfdistrun --bind-to slice" in note


def test_the_words_of_both_flags_for_mpi_are_one_binding():
    flags = ["--mpi-args=--bind-to core", "--binding-args=--map-by slot:pe=4"]
    made = translate(parsed(*flags))
    assert "--bind-to" not in made.words
    (note,) = made.notes
    given = ", ".join(flags).replace("=-", " -")
    assert note.startswith(f"{given}: ranks are not bound")


@pytest.mark.parametrize("hosts", [["-H", "a:2"], ["--hostfile", "hosts"]])
def test_hosts_that_are_named_need_no_lsf(hosts):
    made = translate(parsed("--jsrun", *hosts))
    assert hosts[1] in made.words
    assert "the ranks on the hosts of -H start through ssh" in made.notes[0]


def test_the_keys_of_ssh():
    made = translate(parsed("-p", "2222", "-i", "my key"))
    ssh = tfdistrun.ssh_command(tfdistrun.parser().parse_args(made.words))
    assert ssh[0] == "ssh" and ssh[-4:] == ["-p", "2222", "-i", "my key"]


@pytest.mark.parametrize(
    "given",
    [
        ["--network-interfaces", "eth1,eth2"],
        ["--network-interface", "eth1", "--network-interface", "eth2"],
    ],
    ids=str,
)
def test_of_several_interfaces_the_first_is_used_and_that_is_said(given):
    made = translate(parsed(*given))
    assert "HOROVOD_GLOO_IFACE=eth1" in made.words
    assert "one interface, eth1" in made.notes[0]


def test_a_discovery_script_without_a_largest_size_is_limited_and_that_is_said():
    """With Horovod, the job takes all slots."""
    made = translate(parsed("--host-discovery-script", "find.sh", "--min-np", "2"))
    assert "--max-np" not in made.words and "--host-discovery-script" in made.words
    assert "never has more ranks than -np 4" in made.notes[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--max-num-proc", "8"], "never has more ranks than -np 4"),
        (["--max-np", "3", "--min-np", "2"], "never has more ranks than -np 4"),
        (["--reset-limit", "3"], "only a job with --min-np N or --host"),
        (["--jsrun"], "give them with -H"),
        (["--fusion-threshold-mb", "-1"], "--fusion-threshold-mb: expected"),
        (["--mpi-args=-x"], "-x needs NAME"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_an_error(given, says):
    with pytest.raises(FlagError, match=says):
        translate(parsed(*given))


def test_two_dashes_before_the_command_are_not_part_of_it():
    made = translate(flags.parser().parse_args(["-np", "2", "--", "train.py", "--"]))
    assert made.words == ["--horovod", "-np", "2", "--", "train.py", "--"]


def test_the_number_of_ranks_is_needed():
    with pytest.raises(FlagError, match="-np N is missing"):
        translate(flags.parser().parse_args(TRAIN[:2]))


@pytest.mark.parametrize(
    "both",
    [
        ["--autotune", "--no-autotune"],
        ["-H", "a", "--hostfile", "b"],
        ["--gloo", "--mpi"],
    ],
    ids=str,
)
def test_flags_that_exclude_each_other_under_horovod_do_so_here(both, capsys):
    with pytest.raises(SystemExit):
        parsed(*both)
    assert "not allowed with" in capsys.readouterr().err


FILE = """
verbose: true
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  hierarchical_allreduce: true
autotune: {enabled: true, log_file: log.csv}
timeline: {filename: t.json, mark_cycles: false}
stall_check: {enabled: false, shutdown_time_seconds: 240}
library_options: {num_nccl_streams: 2, gloo_timeout_seconds: 60}
logging: {level: INFO, hide_timestamp: false}
"""


def test_a_config_file_gives_what_flags_do_not(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    options = parsed("--fusion-threshold-mb", "8", "--no-autotune")
    config_file.merge(options, config_file.read(str(path)))
    made = translate(options)
    given = made.words[: made.words.index("--")]
    assert options.verbose is True
    assert f"HOROVOD_FUSION_THRESHOLD={8 << 20}" in given  # the flag wins
    for assigned in (
        "HOROVOD_HIERARCHICAL_ALLREDUCE=1",
        "HOROVOD_TIMELINE=t.json",
        "HOROVOD_STALL_CHECK_DISABLE=1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=240",
        "HOROVOD_LOG_LEVEL=INFO",
    ):
        assert assigned in given
    assert "--timestamps" in given
    named = [note.partition(" has no")[0] for note in made.notes]
    assert sorted(named) == sorted(
        [
            *("params: cycle_time_ms", "autotune: log_file"),
            *("library_options: num_nccl_streams", "controller"),
            "library_options: gloo_timeout_seconds",
        ]
    )


def test_a_key_without_a_value_changes_nothing():
    for text in ("stall_check: {enabled: }", "logging: {hide_timestamp: }"):
        options = parsed()
        config_file.merge(options, yaml.safe_load(text))
        assert options == parsed()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not YAML"),
        ("- a", "expected sections"),
        ("parms: {}", "unknown section 'parms'"),
        ("params: {fusion: 1}", "params: unknown 'fusion'"),
        ("params: 3", "expected parameters"),
        ("controller: nccl", "expected gloo or mpi"),
        ("a: !!python/object/apply:os.getpid []", "not YAML"),
    ],
)
def test_a_wrong_config_file_is_explained(tmp_path, text, says):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigFileError, match=says):
        config_file.merge(parsed(), config_file.read(str(path)))
    with pytest.raises(ConfigFileError, match="No such file"):
        config_file.read(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("params: {fusion_threshold_mb: .inf}", "a number of MiB, 0 or more; got inf"),
        ("params: {fusion_threshold_mb: .nan}", "a number of MiB, 0 or more; got nan"),
        ("params: {fusion_threshold_mb: yes}", "a number of MiB, 0 or more; got True"),
        ("params: {fusion_threshold_mb: many}", "0 or more; got 'many'"),
        ("library_options: {mpi_args: 5}", r"mpi_args: expected words .*; got 5"),
        ("library_options: {mpi_args: [a]}", r"mpi_args: expected .*; got \['a'\]"),
    ],
)
def test_a_wrong_value_of_a_config_file_is_explained(text, says):
    options = parsed()
    config_file.merge(options, yaml.safe_load(text))
    with pytest.raises(FlagError, match=says):
        translate(options)


def test_check_build_tells_what_is_there(capsys):
    assert command.main(["--check-build"]) == 0
    text = capsys.readouterr().out
    assert "[X] TensorFlow" in text and "[ ] PyTorch" in text and "[ ] NCCL" in text
    assert "[X] Gloo" in text
    assert "[X] Gloo" not in command.build_report(tensorflow=True, core=False)


def test_errors_of_the_command_line_end_with_2(capsys):
    assert command.main(["-np", "2", "--max-np", "3", "true"]) == 2
    assert command.main(["-np", "2", "--config-file", "none", "true"]) == 2
    assert "No such file" in capsys.readouterr().err


# ---- tfdistrun --horovod ----


def test_a_script_gets_the_interpreter_and_anything_else_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.py").write_text("#!/bin/sh\n")
    (tmp_path / "run.py").chmod(0o755)
    first, *rest = mode.as_python(["--", "train.py", "-x"])
    assert first.endswith("python") or "python3" in first
    assert rest == ["train.py", "-x"]
    for command_ in (["python", "train.py"], ["./run.py"], ["sh", "train.py"], []):
        assert mode.as_python(command_) == command_


def test_the_job_gets_the_folder_once_and_horovods_variables_everywhere():
    options = tfdistrun.parser().parse_args(
        ["--horovod", "-np", "2", "-x", "HOROVOD_CYCLE_TIME=1", "true"]
    )
    environ = {"PYTHONPATH": "/a", "HOROVOD_LOG_LEVEL": "info", "HOME": "/root"}
    notes = mode.prepare(options, environ)
    made = dict(options.env)
    assert made["PYTHONPATH"] == f"{mode.FOLDER}:/a"
    assert mode.with_folder(made["PYTHONPATH"]) == made["PYTHONPATH"]
    assert made["TFDIST_LOG_LEVEL"] == "info" and made["HOROVOD_LOG_LEVEL"] == "info"
    assert "HOME" not in made
    assert [note.partition(" ")[0] for note in notes] == ["HOROVOD_CYCLE_TIME"]
    assert variables.update({**environ, **made}).notes == []  # not told again
    assert (mode.FOLDER / "sitecustomize.py").is_file()


def test_legacy_keras_is_refused():
    options = tfdistrun.parser().parse_args(["--horovod", "-np", "2", "true"])
    with pytest.raises(variables.VariableError, match="TF_USE_LEGACY_KERAS"):
        mode.prepare(options, {"TF_USE_LEGACY_KERAS": "1"})


def test_each_rank_is_told_its_place_as_by_horovod():
    place = Place(
        rank=3, host=1, local_rank=1, local_size=2, cross_rank=1, cross_size=2
    )
    told = mode.variables_of(place, 4)
    assert told["HOROVOD_RANK"] == "3" and told["HOROVOD_SIZE"] == "4"
    assert told["HOROVOD_LOCAL_RANK"] == "1" and told["HOROVOD_CROSS_SIZE"] == "2"
    assert variables.translate(told).notes == []
