"""What a long run has shown so far, kept with the hash of the code it was shown on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from helpers.tree import CODE, tracked_files, tree_hash


class Record:
    """A JSON file of rows that belong to one state of the code.

    A run that is broken off goes on where it was; once a file under `code` has changed,
    the rows say nothing any more and the record starts anew.

    Args:
        path: The file, written at the first `save`.
        code: Files and folders, relative to the root of the tree, that the rows test.
    """

    def __init__(self, path: Path, code: Iterable[str] = CODE) -> None:
        self.tree = tree_hash(tracked_files(code))
        self.rows: dict[str, Any] = {}
        self._path = path
        if path.exists():
            known = json.loads(path.read_text())
            if known["tree"] == self.tree:
                self.rows = known["rows"]

    def save(self) -> None:
        """Writes all rows; a reader never sees half of them."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"tree": self.tree, "rows": self.rows}) + "\n")
        new.replace(self._path)
