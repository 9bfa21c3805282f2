"""Prepares ImageNet for training: tensorflow-datasets reads the tars, writes records.

    python recipes/prepare_imagenet.py --manual_dir=tars --data_dir=data

`tars` holds ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, from image-net.org or
from `recipes/make_tiny_imagenet.py`. The records come into data/imagenet2012/5.1.0,
where `tfds.load("imagenet2012", data_dir="data")` finds them too. It is done once, by
one process, without the network. The real tars take hours and 150 GB.

Before, the tars are looked at, which takes seconds: a tar that was cut short would give
fewer pictures, and one with other members than it should have would give the pictures
for validation wrong labels, both without a word.
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
BLOCK = 512  # bytes, of a tar


def import_tfds() -> Any:
    """The module tensorflow_datasets.

    Raises:
        ImportError: it, or a package that it needs, is not installed.
    """
    try:
        import importlib_resources  # noqa: F401 - needed by the builder, not declared
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            f"Expected tensorflow-datasets and importlib_resources, got: {error}. "
            "Write: pip install tensorflow-datasets importlib_resources"
        ) from error
    return tensorflow_datasets


def ends_well(file: Any, end: int) -> bool:
    """Whether the bytes before `end` are the two empty blocks that end a tar."""
    file.seek(max(0, end - 2 * BLOCK))
    return file.read(2 * BLOCK) == bytes(2 * BLOCK)


def check_tar(path: Path, check_members: Callable[[tarfile.TarFile, Any], None]) -> int:
    """Looks at the headers of a tar, and at its end.

    Returns:
        The number of regular files in it.

    Raises:
        ValueError: it is no tar, or was cut short, or a member is not as it should be.
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
                f"{path}, {size:,} bytes, was cut short: expected two empty blocks at "
                "its end. Copy or download it again."
            )
    return files


def check_train(tar: tarfile.TarFile, file: Any) -> None:
    """Every member is nXXXXXXXX.tar, and whole."""
    for member in tar.getmembers():
        stem, suffix = os.path.splitext(member.name)
        number = stem.removeprefix("n")
        if not (member.isfile() and suffix == ".tar" and number.isdecimal()):
            raise ValueError(
                f"{tar.name}: expected tars of classes such as n01440764.tar alone, "
                f"got {member.name!r}."
            )
        if not ends_well(file, member.offset_data + member.size):
            raise ValueError(
                f"{tar.name}: its member {member.name}, {member.size:,} bytes, was cut "
                "short: expected two empty blocks at its end."
            )


def check_validation(tar: tarfile.TarFile, file: Any) -> None:
    """The k-th name, in order, is that of picture k: so the builder counts labels."""
    del file
    for number, name in enumerate(sorted(tar.getnames()), start=1):
        expected = f"ILSVRC2012_val_{number:08d}"
        if os.path.splitext(name)[0] != expected:
            raise ValueError(
                f"{tar.name}: expected {expected}.JPEG as name {number} of the sorted "
                f"members, got {name!r}. All labels from here on would be wrong, since "
                "tensorflow-datasets counts names. Pack the pictures alone, with no "
                "folder, from number 1 on without a gap."
            )


def check_tars(manual_dir: Path) -> None:
    """Looks for what tensorflow-datasets would not see.

    Raises:
        FileNotFoundError: a tar is missing.
        ValueError: a tar is not what it should be.
    """
    missing = [name for name in TARS if not (manual_dir / name).is_file()]
    if missing:
        found = sorted(os.listdir(manual_dir)) if manual_dir.is_dir() else None
        raise FileNotFoundError(
            f"Expected {' and '.join(missing)} in {manual_dir}, found "
            f"{'no such folder' if found is None else found[:10] or 'an empty folder'}."
            " Download them from https://image-net.org/download-images, or make small "
            f"ones: python recipes/make_tiny_imagenet.py --out={manual_dir}"
        )
    for name, check in zip(TARS, (check_train, check_validation), strict=True):
        if check_tar(manual_dir / name, check) == 0:
            raise ValueError(f"{manual_dir / name}: expected pictures, found none.")


def prepare(
    manual_dir: str | os.PathLike[str],
    data_dir: str | os.PathLike[str],
    files: int | None = None,
) -> Any:
    """Prepares the data, or finds that they are prepared already.

    Args:
        manual_dir: folder with the two tars; not needed when all is prepared.
        data_dir: folder for the data.
        files: number of files of each split; default: tensorflow-datasets decides.

    Returns:
        The builder; `builder.info.splits` says what there is.

    Raises:
        FileNotFoundError: a tar is missing.
        ValueError: a tar is not what it should be.
        ImportError: a package is missing.
    """
    tfds = import_tfds()
    # Where it is not so by default: its bucket is not asked for what we have.
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
    """The flags."""
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
    """Prepares, and says what is there."""
    if len(argv) > 1:
        raise app.UsageError(f"Expected flags alone, got {argv[1:]}.")
    if int(os.environ.get("TFDIST_SIZE", "1")) > 1:
        raise SystemExit("prepare_imagenet: expected one process; leave out tfdistrun.")
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
