"""Loads the native core, `libtfdist_core.so`, and declares its functions for ctypes.

Importing this module does not load the library and does not need TensorFlow; the
library is loaded on the first call.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.core.error_codes import CoreError
from tfdist.core.structs import Link, Record, Request, Status, World

API_VERSION = 9
LIBRARY_FOLDER = Path(__file__).resolve().parents[1] / "_native"
LIBRARY_PATH = LIBRARY_FOLDER / "libtfdist_core.so"

# The result type and the argument types of each function.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "tfdist_init": (ctypes.c_int32, [ctypes.POINTER(World)]),
    "tfdist_shutdown": (None, [ctypes.c_double]),
    "tfdist_take_wanted": (
        ctypes.c_int32,
        [ctypes.POINTER(ctypes.c_int32), ctypes.c_int32],
    ),
    "tfdist_add_link": (ctypes.c_int32, [ctypes.POINTER(Link)]),
    "tfdist_use_messages": (ctypes.c_int32, [ctypes.c_void_p]),
    "tfdist_is_initialized": (ctypes.c_int32, []),
    "tfdist_last_error": (Status, []),
    "tfdist_topology": (None, [ctypes.POINTER(ctypes.c_int32)]),
    "tfdist_abort": (None, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32]),
    "tfdist_failure": (Status, []),
    "tfdist_good_steps": (ctypes.c_int64, []),
    "tfdist_hide_failures": (None, [ctypes.c_int32]),
    "tfdist_take_hidden": (ctypes.c_int64, []),
    "tfdist_config_json": (ctypes.c_char_p, []),
    "tfdist_shm_bytes": (ctypes.c_int64, []),
    "tfdist_window_bytes": (ctypes.c_int64, []),
    "tfdist_build_info": (ctypes.c_char_p, []),
    "tfdist_check_reducible": (ctypes.c_int32, [ctypes.c_int32, ctypes.c_int32]),
    "tfdist_algorithm": (
        ctypes.c_char_p,
        [ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p],
    ),
    "tfdist_submit": (
        ctypes.c_int32,
        [ctypes.POINTER(Request), ctypes.POINTER(ctypes.c_uint64)],
    ),
    "tfdist_submit_and_help": (
        ctypes.c_int32,
        [
            ctypes.POINTER(Request),
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.c_int64,
        ],
    ),
    "tfdist_run": (ctypes.c_int32, [ctypes.POINTER(Request)]),
    "tfdist_cancel": (None, [ctypes.c_uint64]),
    "tfdist_process_set_add": (
        ctypes.c_int32,
        [
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            ctypes.c_double,
            ctypes.POINTER(ctypes.c_uint32),
        ],
    ),
    "tfdist_process_set_remove": (ctypes.c_int32, [ctypes.c_uint32, ctypes.c_double]),
    "tfdist_register_group": (
        ctypes.c_int32,
        [
            ctypes.c_uint32,
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_uint8),
            ctypes.c_int32,
            ctypes.c_double,
            ctypes.c_char_p,
        ],
    ),
    "tfdist_find_group": (
        ctypes.c_int32,
        [
            ctypes.c_uint32,
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_uint8),
            ctypes.c_int32,
            ctypes.c_char_p,
        ],
    ),
    "tfdist_join": (
        ctypes.c_int32,
        [ctypes.c_uint32, ctypes.c_double, *[ctypes.POINTER(ctypes.c_int32)] * 2],
    ),
    "tfdist_still_us": (ctypes.c_int64, [ctypes.POINTER(ctypes.c_uint64)]),
    "tfdist_report_blocked": (
        None,
        [ctypes.c_uint64, ctypes.c_int32, ctypes.c_char_p],
    ),
    "tfdist_take_records": (ctypes.c_int32, [ctypes.POINTER(Record), ctypes.c_int32]),
    "tfdist_timeline_start": (
        ctypes.c_int32,
        [ctypes.c_char_p, ctypes.c_char_p],
    ),
    "tfdist_timeline_forward": (None, []),
    "tfdist_timeline_span": (None, [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]),
    "tfdist_counters_json": (ctypes.c_char_p, []),
    "tfdist_api": (ctypes.c_void_p, [ctypes.c_int32]),
}


def _installed_elsewhere(folders: Sequence[str]) -> Path | None:
    """Returns the first folder that has a tfdist with built libraries."""
    built = Path(*LIBRARY_PATH.parts[-3:])
    found = (Path(folder) for folder in folders if (Path(folder) / built).is_file())
    return next(found, None)


@functools.cache
def library() -> ctypes.CDLL:
    """Loads `libtfdist_core.so` once and declares its functions.

    Raises:
        ImportError: the library is missing, cannot be loaded, or has a different
            version of the interface. The message explains how to build it.
    """
    remedy = (
        "build it with `pip install -e . --no-build-isolation` in the source folder, "
        "or install a tfdist wheel for this machine"
    )
    if not LIBRARY_PATH.is_file():
        source = LIBRARY_PATH.parents[2]
        if installed := _installed_elsewhere(sys.path):
            raise ImportError(
                f"Python found tfdist in its source folder {source}, which is not "
                f"built, before the one that is installed in {installed}. Start "
                "Python, or tfdistrun, in another folder; or install the source "
                "folder itself: `pip install --no-build-isolation -e .`"
            )
        raise ImportError(
            f"the core library of tfdist is not built: expected {LIBRARY_PATH}; "
            f"{remedy}"
        )
    try:
        lib = ctypes.CDLL(str(LIBRARY_PATH))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(lib, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"the core library of tfdist does not load: {error}; {remedy}"
        ) from error
    if not lib.tfdist_api(API_VERSION):
        raise ImportError(
            f"{LIBRARY_PATH} does not have version {API_VERSION} of the interface, "
            f"which this tfdist needs; {remedy}"
        )
    return lib


def to_core_error(status: Status) -> CoreError:
    """Converts an error status of the core to an exception."""
    message = (status.message or b"").decode("utf-8", "replace")
    text = (status.payload or b"").decode("utf-8", "replace")
    try:
        payload = json.loads(text) if text else {}
    except ValueError:
        payload = {"kind": "internal", "detail": text}
    return CoreError(status.code, message, payload)


def last_error() -> CoreError:
    """Returns the calling thread's last error."""
    return to_core_error(library().tfdist_last_error())


def check(code: int) -> None:
    """Raises the thread's last error as CoreError, unless `code` is 0."""
    if code != 0:
        raise last_error()
