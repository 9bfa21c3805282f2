"""The YAML file of `horovodrun --config-file`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Section of the file → key → attribute of the parsed flags.
KEYS: dict[str, dict[str, str]] = {
    "params": {
        name: name
        for name in (
            *("fusion_threshold_mb", "cycle_time_ms", "cache_capacity"),
            *("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
        )
    },
    "autotune": {
        "enabled": "autotune",
        "log_file": "autotune_log_file",
        "warmup_samples": "autotune_warmup_samples",
        "steps_per_sample": "autotune_steps_per_sample",
        "bayes_opt_max_samples": "autotune_bayes_opt_max_samples",
        "gaussian_process_noise": "autotune_gaussian_process_noise",
    },
    "timeline": {
        "filename": "timeline_filename",
        "mark_cycles": "timeline_mark_cycles",
    },
    "stall_check": {
        "enabled": "no_stall_check",
        "warning_time_seconds": "stall_check_warning_time_seconds",
        "shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    },
    "library_options": {
        name: name
        for name in (
            *("mpi_threads_disable", "mpi_args", "num_nccl_streams"),
            *("thread_affinity", "gloo_timeout_seconds", "ccl_bgt_affinity"),
        )
    },
    "logging": {
        "level": "log_level",
        "with_timestamp": "log_with_timestamp",
        "hide_timestamp": "log_with_timestamp",
    },
}
_INVERTED = {("stall_check", "enabled"), ("logging", "hide_timestamp")}


class ConfigFileError(ValueError):
    """The file cannot be read, or has a section, key or value unknown to Horovod."""


def read(path: str) -> dict[str, Any]:
    """Returns the contents of the file, read by `yaml.safe_load`.

    Raises:
        ConfigFileError: the file does not exist, is not YAML or is not a mapping; or
            PyYAML is missing.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigFileError(
            "--config-file needs PyYAML, which is not installed: pip install pyyaml"
        ) from None
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"--config-file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"--config-file {path}: not YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigFileError(
            f"--config-file {path}: expected sections with parameters"
        )
    return found


def merge(options: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """Sets the options that the file gives and the command line does not.

    Raises:
        ConfigFileError: Horovod does not know a section, key or value.
    """
    for section, entries in config.items():
        if section == "controller":
            _controller(options, entries)
            continue
        if section == "verbose":
            _set(options, "verbose", bool(entries), "verbose")
            continue
        known = KEYS.get(section)
        if known is None:
            names = ", ".join([*KEYS, "controller", "verbose"])
            raise ConfigFileError(f"unknown section {section!r}; expected {names}")
        if not isinstance(entries, dict):
            raise ConfigFileError(f"section {section!r}: expected parameters")
        for key, value in entries.items():
            if key not in known:
                names = ", ".join(known)
                raise ConfigFileError(f"{section}: unknown {key!r}; expected {names}")
            if (section, key) in _INVERTED and value is not None:
                value = not value
            _set(options, known[key], value, f"{section}: {key}")


def _controller(options: argparse.Namespace, name: Any) -> None:
    if str(name).lower() not in ("gloo", "mpi"):
        raise ConfigFileError(f"controller: expected gloo or mpi, got {name!r}")
    _set(options, f"use_{str(name).lower()}", True, "controller")


def _set(options: argparse.Namespace, dest: str, value: Any, where: str) -> None:
    if value is None or dest in options.given:
        return
    setattr(options, dest, value)
    options.given = {**options.given, dest: where}
