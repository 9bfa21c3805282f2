"""Index of TFRecord files: the length and offset of each record.

References:
    tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details".
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfdist.collectives.tf_ops.op_library import native_ops

# The header of a record contains a length and a checksum; the footer is a checksum of
# the data.
HEADER_BYTES, FOOTER_BYTES = 12, 4
# Files are read in parallel, because a file system serves many requests at a time.
# Reading a header that is cached takes 1 us.
THREADS = 16
_SHARD = re.compile(r"(?P<stem>.*-)(?P<index>\d{5,})-of-(?P<total>\d{5,})(?P<end>.*)")
# Text that TensorFlow adds before and after a message.
_FRAME = re.compile(r"^\{\{.*?\}\}\s*|\s*\[Op:\w+\].*$", re.DOTALL)


@dataclass(frozen=True)
class Index:
    """The number of records in each file, and the length of each record.

    Attributes:
        counts: int64 `[files]`, number of records in each file.
        lengths: int64 `[records]`, size of each record's data in bytes, in the order of
            the files.
    """

    counts: np.ndarray
    lengths: np.ndarray

    @property
    def first(self) -> np.ndarray:
        """int64 `[files + 1]`: index of each file's first record, then the total."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @property
    def offsets(self) -> np.ndarray:
        """int64 `[records]`: offset of each record's data in its file, in bytes."""
        ends = np.cumsum(self.lengths + (HEADER_BYTES + FOOTER_BYTES))
        starts = np.concatenate([[0], ends])
        of_file = np.repeat(starts[self.first[:-1]], self.counts)
        return (starts[:-1] - of_file + HEADER_BYTES).astype(np.int64)

    def fits(self, sizes: np.ndarray) -> bool:
        """Returns whether the index is valid for files of these sizes (in bytes)."""
        if self.counts.shape != sizes.shape or self.counts.sum() != len(self.lengths):
            return False
        ends = np.cumsum(self.lengths + (HEADER_BYTES + FOOTER_BYTES))
        starts = np.concatenate([[0], ends])[self.first]
        return bool(np.array_equal(np.diff(starts), sizes))


def join(parts: Sequence[np.ndarray]) -> Index:
    """Builds an index from the record lengths of each file."""
    counts = np.array([len(part) for part in parts], np.int64)
    return Index(counts, np.concatenate([np.zeros(0, np.int64), *parts]))


def paths_of(files: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Returns the file names as strings, in the given order.

    Raises:
        TypeError: `files` is a single name instead of a list.
        ValueError: the list is empty or contains a file twice, or a name is not UTF-8.
    """
    if isinstance(files, str | bytes | os.PathLike):
        raise TypeError(
            f"Expected a list of files, got a single name, {os.fspath(files)!r}. For a "
            "pattern use sorted(tf.io.gfile.glob(pattern)); for one file use [name]."
        )
    paths = tuple(os.fsdecode(file) for file in files)
    for path in paths:
        if any("\ud800" <= character <= "\udfff" for character in path):
            raise ValueError(
                f"Expected file names in UTF-8, got {path!r}. Rename the file."
            )
    if not paths:
        raise ValueError("Expected at least one file, got an empty list.")
    if len(set(paths)) < len(paths):
        seen: set[str] = set()
        twice = next(p for p in paths if p in seen or seen.add(p))  # type: ignore[func-returns-value]
        raise ValueError(
            f"Expected every file once, got {twice} twice: its records would be read "
            "twice per epoch. Remove one of the two entries."
        )
    return paths


def digest(paths: Sequence[str]) -> str:
    """Returns a digest of a list of file names, without their common folder."""
    common = os.path.commonprefix(list(paths))
    start = common.rfind("/") + 1
    names = "\0".join(path[start:] for path in paths)
    return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()[:16]


def check_families(paths: Sequence[str]) -> None:
    """Raises if files of a split `...-00003-of-00008` are missing or misnumbered.

    If the list of files is built from a pattern, a file that was not copied would
    otherwise go unnoticed.

    Raises:
        ValueError: files are missing or misnumbered. The message names the missing
            files or the invalid number.
    """
    families: dict[tuple[str, str], dict[str, set[int]]] = {}
    for path in paths:
        found = _SHARD.fullmatch(path)
        if found:
            family = families.setdefault((found["stem"], found["end"]), {})
            family.setdefault(found["total"], set()).add(int(found["index"]))
    for (stem, end), by_total in families.items():
        if len(by_total) > 1:
            totals = " and ".join(f"-of-{total}" for total in sorted(by_total))
            raise ValueError(
                f"Expected the files of one split, got {stem}*{end} with different "
                f"totals: {totals}. Keep only the files that belong together."
            )
        ((total, indices),) = by_total.items()
        missing = sorted(set(range(int(total))) - indices)
        if missing:
            width = len(total)
            names = [f"{stem}{i:0{width}}-of-{total}{end}" for i in missing[:3]]
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ValueError(
                f"Expected all {int(total)} files of {stem}*-of-{total}{end}, got "
                f"{len(indices)}. Missing: {', '.join(names)}{more}. Copy the missing "
                "files. To use only a part of the data, pass all_shards=False."
            )
        beyond = max(indices)
        if beyond >= int(total):
            raise ValueError(
                f"Expected files of {stem}*-of-{total}{end} numbered from 0 to "
                f"{int(total) - 1}, got number {beyond}. Remove files that do not "
                "belong to this data. To use only a part of it, pass all_shards=False."
            )


def index_files(paths: Sequence[str]) -> list[np.ndarray]:
    """Reads files in parallel, and returns the record lengths of each file.

    Raises:
        FileNotFoundError: a file is missing.
        OSError: a file cannot be read.
        ValueError: a file is truncated, damaged, or not a TFRecord file. The message
            names the first such file in the list.
    """
    executor = concurrent.futures.ThreadPoolExecutor(min(THREADS, max(1, len(paths))))
    try:
        return list(executor.map(index_file, paths))
    finally:
        executor.shutdown(cancel_futures=True)


def index_file(path: str) -> np.ndarray:
    """Returns the record lengths of one file in bytes; int64 `[records]`."""
    try:
        with tf.device("/CPU:0"):
            return native_ops().tfdist_index_records(path).numpy()
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(_FRAME.sub("", error.message)) from None
    except tf.errors.DataLossError as error:
        raise ValueError(_FRAME.sub("", error.message)) from None
    except tf.errors.OpError as error:
        raise OSError(_FRAME.sub("", error.message)) from None


def check_counts(
    paths: Sequence[str], found: Sequence[int], expected: Sequence[int] | None
) -> None:
    """Raises if a file does not have the expected number of records.

    Args:
        paths: the files.
        found: number of records in each file.
        expected: expected number of records in each file; None: at least one record.

    Raises:
        ValueError: a number differs from `expected`, or a file is empty and `expected`
            is None. The message names the file.
    """
    for i, (path, count) in enumerate(zip(paths, found, strict=True)):
        if expected is None and count == 0:
            raise ValueError(
                f"{path}: expected records, found an empty file. Check that the file "
                "was copied completely. If it is empty on purpose, remove it from the "
                "list or pass counts=."
            )
        if expected is not None and count != expected[i]:
            raise ValueError(
                f"{path}: expected {expected[i]} records (counts), found {count}. The "
                "file is incomplete, or the argument `counts` belongs to a different "
                "version of the data."
            )
