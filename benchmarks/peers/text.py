"""Sizes, times and tables as text."""

from __future__ import annotations

from collections.abc import Sequence

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parsed_sizes(text: str) -> list[int]:
    """Bytes of a comma-separated list.

    Raises:
        ValueError: a size is not a positive multiple of 4 bytes.

    Example:
        >>> parsed_sizes("1K,16M")
        [1024, 16777216]
    """
    sizes = []
    for word in text.upper().split(","):
        digits, unit = (word[:-1], UNITS[word[-1]]) if word[-1:] in UNITS else (word, 1)
        if not digits.isdigit() or int(digits) == 0 or int(digits) * unit % 4:
            raise ValueError(
                f"Expected sizes in bytes, multiples of 4, as in 1K,16M; got {word!r}."
            )
        sizes.append(int(digits) * unit)
    return sizes


def size_text(size_bytes: int) -> str:
    """A size in its largest whole unit.

    Example:
        >>> size_text(16 << 20)
        '16M'
    """
    for name, unit in sorted(UNITS.items(), key=lambda pair: -pair[1]):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)


def milliseconds(seconds: float) -> str:
    """Milliseconds: three significant digits, or all whole ones from 100 on.

    Example:
        >>> milliseconds(0.0123456), milliseconds(1.5), milliseconds(7.1e-7)
        ('12.3', '1500', '0.00071')
    """
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
