"""Prepares ImageNet for training: tensorflow-datasets reads tars and writes records.

    python recipes/prepare_imagenet.py --manual_dir=tars --data_dir=data

`tars` contains ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, from image-net.org
or from `recipes/make_tiny_imagenet.py`. The records are written to
data/imagenet2012/5.1.0, where `tfds.load("imagenet2012", data_dir="data")` also finds
them. This is done once, by one process, without network access. With the real tars,
this takes hours and needs 150 GB.

The tars are checked first, which takes seconds. Without this check, a truncated tar
would produce fewer pictures, and a tar with unexpected members would produce wrong
labels for the validation pictures, both without an error.
"""

import os
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags

TARS = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar")
BLOCK = 512  # size of a tar block, in bytes


def import_tfds() -> Any:
    """Returns the module tensorflow_datasets.

    Raises:
        ImportError: the module, or a package that it needs, is not installed.
    """
    try:
        import importlib_resources  # noqa: F401 - needed by the builder, not declared
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            f"Expected tensorflow-datasets and importlib_resources, got: {error}. "
            "Run: pip install tensorflow-datasets importlib_resources"
        ) from error
    return tensorflow_datasets


def ends_well(file: Any, end: int) -> bool:
    """Returns whether two empty blocks, the end of a tar, precede the offset `end`."""
    file.seek(max(0, end - 2 * BLOCK))
    return file.read(2 * BLOCK) == bytes(2 * BLOCK)


def check_tar(path: Path, check_members: Callable[[tarfile.TarFile, Any], None]) -> int:
    """Checks the headers of a tar, and its end.

    Returns:
        The number of regular files in the tar.

    Raises:
        ValueError: the file is not a tar, is truncated, or has an unexpected member.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                files = sum(member.isfile() for member in tar)
                check_members(tar, file)
        except tarfile.TarError as error:
            raise ValueError(f"{path}, {size:,} bytes: {error}.") from error
        if not ends_well(file, size):
            raise ValueError(
                f"{path}, {size:,} bytes, is truncated: expected two empty blocks at "
                "its end. Copy or download it again."
            )
    return files


def check_train(tar: tarfile.TarFile, file: Any) -> None:
    """Raises unless every member is a complete nXXXXXXXX.tar."""
    for member in tar.getmembers():
        stem, suffix = os.path.splitext(member.name)
        number = stem.removeprefix("n")
        if not (member.isfile() and suffix == ".tar" and number.isdecimal()):
            raise ValueError(
                f"{tar.name}: expected only tars of classes such as n01440764.tar, "
                f"got {member.name!r}."
            )
        if not ends_well(file, member.offset_data + member.size):
            raise ValueError(
                f"{tar.name}: its member {member.name}, {member.size:,} bytes, is "
                "truncated: expected two empty blocks at its end."
            )


def check_validation(tar: tarfile.TarFile, file: Any) -> None:
    """Raises unless the k-th sorted name is picture k, as the builder assumes."""
    del file
    for number, name in enumerate(sorted(tar.getnames()), start=1):
        expected = f"ILSVRC2012_val_{number:08d}"
        if os.path.splitext(name)[0] != expected:
            raise ValueError(
                f"{tar.name}: expected {expected}.JPEG as name {number} of the sorted "
                f"members, got {name!r}. All labels from this picture on would be "
                "wrong, since tensorflow-datasets assigns the k-th label to the k-th "
                "name. Pack only the pictures, without a folder, numbered from 1 "
                "without gaps."
            )


def check_tars(manual_dir: Path) -> None:
    """Checks the tars for errors that tensorflow-datasets would not notice.

    Raises:
        FileNotFoundError: a tar is missing.
        ValueError: a tar has unexpected contents.
    """
    missing = [name for name in TARS if not (manual_dir / name).is_file()]
    if missing:
        found = sorted(os.listdir(manual_dir)) if manual_dir.is_dir() else None
        raise FileNotFoundError(
            f"Expected {' and '.join(missing)} in {manual_dir}, found "
            f"{'no such folder' if found is None else found[:10] or 'an empty folder'}."
            " Download them from https://image-net.org/download-images, or create "
            f"small ones: python recipes/make_tiny_imagenet.py --out={manual_dir}"
        )
    for name, check in zip(TARS, (check_train, check_validation), strict=True):
        if check_tar(manual_dir / name, check) == 0:
            raise ValueError(f"{manual_dir / name}: expected pictures, found none.")


def prepare(
    manual_dir: str | os.PathLike[str],
    data_dir: str | os.PathLike[str],
    files: int | None = None,
) -> Any:
    """Prepares the data, unless they are prepared already.

    Args:
        manual_dir: folder with the two tars; not needed if the data are prepared.
        data_dir: folder for the data.
        files: number of files per split; default: tensorflow-datasets decides.

    Returns:
        The builder; `builder.info.splits` describes the data.

    Raises:
        FileNotFoundError: a tar is missing.
        ValueError: a tar has unexpected contents.
        ImportError: a package is missing.
    """
    tfds = import_tfds()
    # Otherwise, versions in which this is not the default would query a bucket.
    tfds.core.utils.gcs_utils._is_gcs_disabled = True
    builder = tfds.builder("imagenet2012", data_dir=os.fspath(data_dir))
    if not os.path.isdir(builder.data_dir):
        check_tars(Path(manual_dir))
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(
                manual_dir=os.fspath(manual_dir),
                num_shards=files,
                try_download_gcs=False,
            )
        )
    return builder


def define_flags() -> None:
    """Defines the flags."""
    flags.DEFINE_string(
        "manual_dir", None, f"folder with {', '.join(TARS)}", required=True
    )
    flags.DEFINE_string(
        "data_dir", None, "folder in which to write the data", required=True
    )
    flags.DEFINE_integer(
        "files", None, "number of files per split (default: chosen by size)"
    )


def main(argv: list[str]) -> None:
    """Prepares the data, and prints a summary."""
    if len(argv) > 1:
        raise app.UsageError(f"Expected only flags, got {argv[1:]}.")
    if int(os.environ.get("TFDIST_SIZE", "1")) > 1:
        raise SystemExit("prepare_imagenet: expected one process; omit tfdistrun.")
    asked = flags.FLAGS
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    start = time.monotonic()
    try:
        builder = prepare(asked.manual_dir, asked.data_dir, asked.files)
    except (ValueError, OSError, ImportError, tarfile.TarError) as error:
        raise SystemExit(f"prepare_imagenet: {error}") from error
    for name, split in builder.info.splits.items():
        print(f"{name}: {split.num_examples} pictures in {split.num_shards} files")
    print(f"prepared in {time.monotonic() - start:.0f} s: {builder.data_dir}")
    sys.stdout.flush()


if __name__ == "__main__":
    define_flags()
    app.run(main)
