"""The checkpoints in a folder, each with its checksum."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def checkpoints_in(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the files in a folder, without those that hold their checksums.

    Raises:
        AssertionError: a file has no checksum, or a different one.
    """
    names = sorted(os.listdir(folder))
    found = [name for name in names if not name.endswith(".sha256")]
    assert names == sorted([*found, *(f"{name}.sha256" for name in found)])
    for name in found:
        digest = hashlib.sha256(Path(folder, name).read_bytes()).hexdigest()
        listed = Path(folder, f"{name}.sha256").read_text()
        assert listed == f"{digest}  {name}\n"
    return found
