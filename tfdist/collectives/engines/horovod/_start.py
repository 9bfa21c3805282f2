"""Pure functions for starting Horovod: its environment variables, and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.core.native import Topology

LAST_VERSION = "0.28.1"
WHERE = (
    f"Horovod's last release, {LAST_VERSION}, builds with TensorFlow up to 2.15 and "
    "Python up to 3.11, as docs/horovod-engine.md shows: pip install "
    "'tensorflow-cpu==2.15.1' 'numpy<2' 'setuptools<70' wheel 'cmake<4' cffi "
    "cloudpickle psutil pyyaml packaging; HOROVOD_WITH_TENSORFLOW=1 "
    "HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 pip install "
    f"--no-build-isolation --no-deps --no-binary horovod horovod=={LAST_VERSION}. Or "
    "unset TFDIST_ENGINE on all ranks: the native engine needs no Horovod."
)
# Variables of the native data path, which Horovod does not support. Any value except
# the default raises an error.
_OF_THE_NATIVE_ENGINE = (
    *("TFDIST_ATOMIC_STEPS", "TFDIST_TIMELINE", "TFDIST_TUNING_FILE"),
    *("TFDIST_RING_ORDER", "TFDIST_SEGMENT_BYTES", "TFDIST_SHM_SLOTS"),
    *("TFDIST_MAX_ACTIVE", "TFDIST_TCP_MAC", "TFDIST_TCP_SOCKETS"),
)
_MESSAGE_BYTES = 64


def refused_setting(rows: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns the error for a variable that Horovod does not support, or None.

    Args:
        rows: the configuration: name → {"value", "default", ...}.
    """
    for name, row in rows.items():
        ours = name in _OF_THE_NATIVE_ENGINE or name.endswith("_ALGORITHM")
        if ours and row["value"] not in (row["default"], None, ""):
            return (
                f"{name}={row['value']} has no effect with TFDIST_ENGINE=horovod: only "
                "the native engine supports it. Unset one of the two on all ranks."
            )
    return None


def missing(version: str | None, tensorflow: str) -> str:
    """Returns the reason why Horovod cannot be imported.

    Args:
        version: version of the installed Horovod; None if it is not installed.
        tensorflow: version of the running TensorFlow.
    """
    found = (
        "there is no Horovod in this environment"
        if version is None
        else f"Horovod {version} cannot be loaded"
    )
    return (
        f"TFDIST_ENGINE=horovod needs an installed Horovod that was built for "
        f"TensorFlow {tensorflow}, and {found}. {WHERE}"
    )


def variables(
    topology: Topology,
    *,
    store: tuple[str, int],
    interface: str,
    timeout_s: float,
) -> dict[str, str]:
    """Returns the variables that `horovodrun` would set for this rank.

    Args:
        topology: topology of this rank.
        store: address and port of rank 0's store.
        interface: name of the network interface on which this rank listens.
        timeout_s: time limit for connecting, in seconds.
    """
    address, port = store
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_RANK": str(topology.rank),
        "HOROVOD_SIZE": str(topology.size),
        "HOROVOD_LOCAL_RANK": str(topology.local_rank),
        "HOROVOD_LOCAL_SIZE": str(topology.local_size),
        "HOROVOD_CROSS_RANK": str(topology.cross_rank),
        "HOROVOD_CROSS_SIZE": str(topology.cross_size),
        "HOROVOD_HOSTNAME": f"host{topology.host_of[topology.rank]}",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(timeout_s))),
    }


def interface_of(address: str, interfaces: Mapping[str, Sequence[Any]]) -> str | None:
    """Returns the network interface that has the address, or None.

    Args:
        address: IP address of this machine.
        interfaces: result of `psutil.net_if_addrs`: name → entries with "address".
    """
    for name, entries in interfaces.items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def bits_of(text: str) -> list[bool]:
    """Encodes a short text as flags, which can be sent with a gradient list.

    Example:
        >>> text_of(bits_of("10.0.0.1 5000"))
        '10.0.0.1 5000'
    """
    data = text.encode().ljust(_MESSAGE_BYTES, b"\0")
    return [bool(byte >> place & 1) for byte in data for place in range(8)]


def text_of(bits: Sequence[bool]) -> str:
    """Decodes the flags of `bits_of`; "" if no flag is set."""
    octets = [bits[start : start + 8] for start in range(0, len(bits), 8)]
    data = bytes(
        sum(bit << place for place, bit in enumerate(octet)) for octet in octets
    )
    return data.rstrip(b"\0").decode()
