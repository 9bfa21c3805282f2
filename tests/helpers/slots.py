"""A discovery script for elastic jobs, whose answer the test decides."""

from __future__ import annotations

from pathlib import Path


class Slots:
    """A discovery script that prints the number of slots that the test sets."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.file, self.script = folder / "slots", folder / "find.sh"
        self.script.write_text(f"#!/bin/sh\ncat {self.file}\n")
        self.script.chmod(0o755)
        self.set(slots)

    def set(self, slots: int) -> None:
        """Sets the number of slots."""
        new = self.file.with_suffix(".new")
        new.write_text(f"localhost:{slots}\n")
        new.rename(self.file)

    def options(self, *, np: int, least: int = 1, most: int = 4) -> tuple[str, ...]:
        """The options of tfdistrun."""
        return (
            *("-np", str(np), "--min-np", str(least), "--max-np", str(most)),
            *("--host-discovery-script", str(self.script), "--max-restarts", "0"),
        )
