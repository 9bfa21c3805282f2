"""Kills jobs while they save, fills the disk, and flips bits in checkpoints.

    python tests/campaign/checkpoints.py                # what is not in the record yet
    python tests/campaign/checkpoints.py --share 0.02   # a small part, without a record
    python tests/campaign/checkpoints.py --table        # the table of the record
    python tests/campaign/checkpoints.py --time         # how long a save delays a step

- kills: a job that saves without a pause is killed at a random time, and started again
  in the same folder. It is right if the newest checkpoint can be restored, has the
  values of a single step, and is not older than the last file that was complete.
- limits: a ".keras" or ".weights.h5" file may only grow to 0 KiB, 1 KiB, ... up to its
  size, as on a disk that is full there. It is right if the training goes on, the
  earlier checkpoint is restored, and the next save succeeds.
- disks: the same on file systems of 4 KiB, 8 KiB, ... (tmpfs has pages of 4 KiB) until
  there is room for everything.
- flips: a random bit of a checkpoint or of its checksum is flipped. It is right if
  another file is restored, or the same one with the right values; and if a damaged file
  is refused when it is asked for by its name.

A later run continues the record, checkpoints.json. Exit status 0: all are right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The server from which jobs are forked has imported TensorFlow, but not used it yet.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

from campaign import checkpoint_program as program  # noqa: E402
from helpers.record import Record  # noqa: E402

from tfdist.callbacks import Checkpoint  # noqa: E402

RECORD = HERE / "checkpoints.json"
CODE = (
    "tfdist/callbacks/checkpoint.py", "tfdist/callbacks/_atomic_file.py",
    "tfdist/callbacks/_background_writer.py", "tfdist/callbacks/_model_snapshot.py",
    "tfdist/callbacks/_weights_file.py", "tfdist/layers/saved_generators.py",
    "tfdist/training/checkpoint_files.py", "tfdist/training/restore.py",
    "tests/campaign/checkpoints.py", "tests/campaign/checkpoint_program.py",
)  # fmt: skip
KILLS, FLIPS = 500, 1000
KILLS_OF_CHAIN, FLIPS_OF_ROW = 10, 100
PAGE = 4096
NAMES = (program.PATTERNS[0], "step-{step:08d}.weights.h5")
READY_S = 60.0


# ---- kills


def chain(seed: int, kills: int = KILLS_OF_CHAIN) -> dict[str, Any]:
    """Kills a job in the same folder several times."""
    draw = random.Random(seed)
    model = program.build()
    faults: list[str] = []
    partial, last = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(kills):
            said = _life(Path(folder), seed, draw)
            faults += [word for word in said if not word.isdecimal()]
            complete = max([last, *(int(word) for word in said if word.isdecimal())])
            partial += any(Path(folder).glob(".partial-*"))
            for path in Path(folder).glob(".partial-*"):
                path.unlink()  # counts once
            if not list(Path(folder).glob("*.keras")):
                if complete:
                    faults.append(f"kill {number}: no file, {complete} was complete")
                continue
            try:
                last, fault = program.restored(model, Path(folder))
            except Exception as error:  # noqa: BLE001 - counted
                faults.append(f"kill {number}: unloadable: {error}")
                break
            if fault:
                faults.append(f"kill {number}: silently wrong: {fault}")
            if last < complete:
                faults.append(f"kill {number}: {last} was restored, not {complete}")
    return {"kills": kills, "partial": partial, "faults": faults}


def _life(folder: Path, seed: int, draw: random.Random) -> list[str]:
    """Starts a job and kills it; returns what it has said after "ready"."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["campaign.checkpoint_program"])
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(str(folder), seed, writing))
    process.start()
    writing.close()
    lines = b""
    deadline_s = time.monotonic() + READY_S
    while b"\n" not in lines:
        if not reading.poll(max(0.0, deadline_s - time.monotonic())):
            raise AssertionError("a job did not start")
        lines += os.read(reading.fileno(), 4096)
    time.sleep(draw.uniform(0.0, 0.3))
    if process.pid is None:
        raise AssertionError("a job has no process")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    while more := os.read(reading.fileno(), 4096):
        lines += more
    reading.close()
    words = lines.decode().splitlines()
    return words[1:] if words[0] == "ready" else words


def _run(folder: str, seed: int, pipe: Any) -> None:
    logging.getLogger("tfdist").setLevel(logging.ERROR)
    program.run(folder, seed, pipe.fileno())


# ---- full disks


@contextlib.contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limited(
    model: Any, folder: Path, size_bytes: int, name: str = program.PATTERNS[0]
) -> dict[str, Any]:
    """Saves, saves on a full disk, and saves again; restores after each."""
    faults = []
    background = size_bytes // 1024 % 4 > 0
    save = _saver(model, folder, background, name)
    path = folder / name.replace("{step:08d}", "*")
    save(1)
    with file_limit(size_bytes):
        failed = save(2)
    faults += _check(model, path, 1 if failed else 2)
    if save(3):
        faults.append("the next save failed")
    faults += _check(model, path, 3)
    return {"size": size_bytes, "failed": failed, "faults": faults}


def on_disk(model: Any, folder: Path, name: str) -> dict[str, Any]:
    """Saves several times on a small disk; each complete file is restored."""
    save, last, failures, faults = _saver(model, folder, True, name), 0, 0, []
    for step in (1, 2, 3, 4):
        if save(step):
            failures += 1
        else:
            last = step
        if last:
            path = folder / name.replace("{step:08d}", "*")
            faults += _check(model, path, last)
    return {"failures": failures, "saved": last, "faults": faults}


def _saver(
    model: Any, folder: Path, background: bool, name: str = program.PATTERNS[0]
) -> Callable[[int], bool]:
    """Returns a function that saves a step, and returns whether that failed."""
    checkpoint = Checkpoint(
        folder / name,
        save_weights_only=name.endswith(".h5"),
        background=background,
        keep=2,
        timeout_s=60.0,
    )
    checkpoint.set_model(model)

    def save(step: int) -> bool:
        program.set_step(model, step)
        try:
            checkpoint.save_now({}, None)
            program.set_step(model, step + 1)  # the file may not have these values
            checkpoint.wait_until_finished()
        except OSError:
            return True
        return checkpoint._writer.has_failed

    return save


def _check(model: Any, path: Path, step: int) -> list[str]:
    try:
        found, fault = program.restored(model, path)
    except Exception as error:  # noqa: BLE001 - counted
        return [f"unloadable: {error}"]
    if found != step:
        return [f"step {found} was restored, not {step}"]
    return [f"silently wrong: {fault}"] if fault else []


def size_of_file(model: Any) -> int:
    """Size of a checkpoint in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        _saver(model, Path(folder), False)(1)
        return next(Path(folder).glob("*.keras")).stat().st_size


def limits(share: float) -> list[dict[str, Any]]:
    """Results for each KiB of both kinds of files, or for a share of them."""
    model = program.build()
    sizes = list(range(0, size_of_file(model) + 2048, 1024))
    rows = []
    for size_bytes in _part(sizes, share):
        for name in NAMES:
            with tempfile.TemporaryDirectory() as folder:
                row = limited(model, Path(folder), size_bytes, name)
                rows.append({"name": name, **row})
    return rows


def disks(share: float) -> list[dict[str, Any]]:
    """One result for each size of a small disk; run in a mount namespace of its own."""
    model = program.build()
    mount = shutil.which("mount") or "mount"
    sizes = list(range(PAGE, 4 * size_of_file(model) + 16 * PAGE, PAGE))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size_bytes in _part(sizes, share):
            options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "none", folder]
            subprocess.run([mount, *options], check=True)
            name = NAMES[size_bytes // PAGE % 2]
            row = on_disk(model, Path(folder), name)
            rows.append({"size": size_bytes, "name": name, **row})
            subprocess.run([f"u{mount.rpartition('/')[2]}", folder], check=True)
    return rows


def disks_apart(share: float) -> list[dict[str, Any]] | None:
    """Returns the result of `disks`; None where no file systems can be mounted."""
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    with contextlib.suppress(OSError):
        if subprocess.run([*apart, "true"], capture_output=True).returncode == 0:
            command = [*apart, sys.executable, __file__, "--disks", str(share)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return list(json.loads(done.stdout.splitlines()[-1]))
    return None


# ---- flipped bits


def flips(seed: int, count: int = FLIPS_OF_ROW) -> dict[str, Any]:
    """Flips single bits in three checkpoints and their checksums."""
    draw = random.Random(seed)
    model = program.build()
    faults: list[str] = []
    skipped = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = Checkpoint(folder / program.PATTERNS[0], keep=3)
        checkpoint.set_model(model)
        for step in (1, 2, 3):
            program.set_step(model, step)
            checkpoint.save_now({}, None)
        files = sorted(folder.iterdir())
        for _ in range(count):
            file = draw.choice(files)
            whole = file.read_bytes()
            place = draw.randrange(8 * len(whole))
            flipped = bytearray(whole)
            flipped[place // 8] ^= 1 << place % 8
            file.write_bytes(flipped)
            is_newest = file.name.startswith(files[-1].name.partition(".")[0])
            skipped += is_newest
            expected = 2 if is_newest and file.suffix != ".sha256" else None
            found = _check_flip(model, folder, file, expected)
            faults += [f"bit {place} of {file.name}: {fault}" for fault in found]
            file.write_bytes(whole)
    return {"flips": count, "newest": skipped, "faults": faults}


def _check_flip(model: Any, folder: Path, file: Path, step: int | None) -> list[str]:
    try:
        found, fault = program.restored(model, folder)
    except Exception as error:  # noqa: BLE001 - counted
        return [f"unloadable: {error}"]
    faults = [f"silently wrong: {fault}"] if fault else []
    if step is not None and found != step:
        faults.append(f"step {found} was restored, not {step}")
    if file.suffix == ".keras":
        with contextlib.suppress(ValueError):
            program.restored(model, file)
            faults.append("the damaged file was restored by its name")
    return faults


# ---- the time of a save


def print_time() -> None:
    """Prints how long saves in the background and foreground delay a step."""
    import keras
    import numpy as np

    import tfdist

    tfdist.init()
    model = keras.applications.ResNet50(weights=None)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(tfdist.DistributedOptimizer(sgd), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    values = [np.array(v) for v in variables]
    with tempfile.TemporaryDirectory() as folder:
        behind = Checkpoint(Path(folder, "b.keras"), background=True)
        before = Checkpoint(Path(folder, "f.keras"))
        times: dict[str, list[float]] = {}
        for checkpoint in (behind, before):
            checkpoint.set_model(model)

        def copy() -> None:
            _ = [value.copy() for value in values]

        def read() -> None:
            _ = [variable.numpy() for variable in variables]

        for _ in range(11):
            for name, work in (
                ("a copy of the arrays", copy),
                ("reading the variables", read),
                ("a save in the background", lambda: behind.save_now({}, None)),
                ("a save in the foreground", lambda: before.save_now({}, None)),
            ):
                begin_s = time.perf_counter()
                work()
                seconds = time.perf_counter() - begin_s
                times.setdefault(name, []).append(1e3 * seconds)
                behind.wait_until_finished()
    print(f"{sum(value.nbytes for value in values) / 1e6:.0f} MB")
    for name, own in times.items():
        middle = statistics.median(own)
        print(f"{name:26} {middle:4.0f} ms ({min(own):.0f} to {max(own):.0f})")


# ---- all of it


def _part(values: list[int], share: float) -> list[int]:
    """Returns evenly spaced values."""
    count = max(1, round(share * len(values)))
    return [values[i * len(values) // count] for i in range(count)]


def table(rows: dict[str, Any]) -> bool:
    """Prints the record; returns whether everything is there and right."""
    kills = sum(row["kills"] for row in rows.get("kills", []))
    partial = sum(row["partial"] for row in rows.get("kills", []))
    flipped = sum(row["flips"] for row in rows.get("flips", []))
    limited_rows, disk_rows = rows.get("limits", []), rows.get("disks") or []
    failed = sum(row["failed"] for row in limited_rows)
    failures = sum(row["failures"] for row in disk_rows)
    print(f"kills   {kills}, {partial} of them with a file that was half written")
    print(f"limits  {len(limited_rows)}, {failed} of them with a failed save")
    print(f"disks   {len(disk_rows)}, with {failures} failed saves")
    print(f"flips   {flipped}")
    kinds = [r for kind in ("kills", "limits", "disks", "flips") for r in rows[kind]]
    faults = [fault for row in kinds for fault in row["faults"]]
    for word in ("unloadable", "silently wrong"):
        print(f"{word}: {sum(word in fault for fault in faults)}")
    print(f"all faults: {len(faults)}")
    for fault in faults:
        print(f"    {fault}")
    return not faults and kills >= KILLS and flipped >= FLIPS and bool(limited_rows)


def main() -> int:
    """Runs what is missing; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the work")
    parser.add_argument("--table", action="store_true", help="print the record")
    parser.add_argument("--time", action="store_true", help="measure a save")
    parser.add_argument("--disks", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("tfdist").setLevel(logging.ERROR)
    if options.disks is not None:
        print(json.dumps(disks(options.disks)))
        return 0
    if options.time:
        print_time()
        return 0
    if options.table:
        return 0 if table(json.loads(RECORD.read_text())["rows"]) else 1
    record = Record(RECORD, CODE)
    is_whole = options.share == 1.0
    rows = record.rows if is_whole else {}
    works: dict[str, tuple[int, Callable[[int], Any]]] = {
        "kills": (KILLS // KILLS_OF_CHAIN, chain),
        "flips": (FLIPS // FLIPS_OF_ROW, flips),
    }
    for name, (count, work) in works.items():
        own = rows.setdefault(name, [])
        for seed in range(len(own), max(1, round(count * options.share))):
            own.append(work(seed))
            print(name, seed, own[-1], flush=True)
            if is_whole:
                record.save()
    for name, sweep in (("limits", limits), ("disks", disks_apart)):
        if name not in rows:
            rows[name] = sweep(options.share) or []
            if is_whole:
                record.save()
    is_right = table(rows)
    return 0 if is_right or not is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
