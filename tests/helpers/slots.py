"""A discovery script for elastic jobs, whose answer the test decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Slots:
    """A discovery script that prints the slots that the test sets."""

    def __init__(self, folder: Path, slots: int | Mapping[str, int]) -> None:
        self.file, self.script = folder / "slots", folder / "find.sh"
        self.script.write_text(f"#!/bin/sh\ncat {self.file}\n")
        self.script.chmod(0o755)
        self.set(slots)

    def set(self, slots: int | Mapping[str, int]) -> None:
        """Sets the number of slots of this host, or those of several hosts."""
        listed = {"localhost": slots} if isinstance(slots, int) else slots
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{name}:{count}\n" for name, count in listed.items()))
        new.rename(self.file)

    def options(
        self, *, np: int, least: int = 1, most: int = 4, restarts: int = 0
    ) -> tuple[str, ...]:
        """The options of tfdistrun."""
        return (
            *("-np", str(np), "--min-np", str(least), "--max-np", str(most)),
            *("--host-discovery-script", str(self.script)),
            *("--max-restarts", str(restarts)),
        )
