"""The result of a check of `tfdist doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: name of the check, such as "TensorFlow".
        level: "ok"; "warning" if training works, but not well; or "error".
        text: what was found.
        remedy: what to do; "" if nothing has to be done.
    """

    check: str
    level: str
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns the attributes, for `--json` and for the other ranks."""
        return asdict(self)

    def lines(self, where: str = "") -> list[str]:
        """Returns the lines that are printed.

        Args:
            where: host or rank that the finding is about; "" if there is only one.

        Example:
            >>> from tfdist.tools.doctor.finding import Finding
            >>> stack = Finding("stack", "error", "64 KiB", "run: ulimit -s 8192")
            >>> stack.lines("host2")[0]
            'ERROR    stack (host2): 64 KiB'
        """
        label = f"{self.check} ({where})" if where else self.check
        name = self.level if self.level == OK else self.level.upper()
        text = [f"{name:8} {label}: {self.text}"]
        return text + ([f"{'':8} {self.remedy}"] if self.remedy else [])


def worst(findings: list[Finding]) -> str:
    """Returns the highest level: "ok" for an empty list."""
    levels = [finding.level for finding in findings]
    return next((level for level in (ERROR, WARNING) if level in levels), OK)
