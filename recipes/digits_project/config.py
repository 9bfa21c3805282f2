"""Settings: from conf/config.yaml, then from key=value on the command line."""

import dataclasses
import difflib
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "conf" / "config.yaml"


@dataclasses.dataclass(frozen=True)
class Config:
    """The known settings and their types; conf/config.yaml contains the values."""

    seed: int
    epochs: int
    batch_size: int
    lr_init: float
    width: int
    dropout: float
    test_part: float
    runs: str

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr_init", "width", "test_part"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Expected {name} > 0, got {getattr(self, name)}.")
        for name in ("dropout", "test_part"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"Expected {name} in 0..1, got {getattr(self, name)}.")


def converted(name: str, value: Any, source: str) -> Any:
    """Converts a value to its setting's type; "1e-3" is a number, unlike in YAML."""
    types = {field.name: field.type for field in dataclasses.fields(Config)}
    if name not in types:
        near = difflib.get_close_matches(name, types, n=1, cutoff=0)[0]
        raise ValueError(f"{source}: unknown setting {name!r}. Did you mean {near}?")
    if value is None or isinstance(value, (bool, list, dict)):
        raise ValueError(f"{source}: expected one value for {name}, got {value!r}.")
    try:
        return types[name](str(value))
    except ValueError:
        kind = {int: "a whole number", float: "a number"}[types[name]]
        raise ValueError(
            f"{source}: expected {kind} for {name}, got {value!r}."
        ) from None


def load(overrides: list[str], file: Path = FILE) -> Config:
    """Returns the settings of a run.

    Raises:
        ValueError: a setting is unknown, has no value, or has an invalid value.
    """
    found = yaml.safe_load(file.read_text()) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{file}: expected lines of the form `key: value`.")
    values = {name: converted(name, found[name], str(file)) for name in found}
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"Expected key=value, got {override!r}.")
        values[name] = converted(name, value, override)
    missing = [f.name for f in dataclasses.fields(Config) if f.name not in values]
    if missing:
        raise ValueError(f"{file}: expected values for {', '.join(missing)} too.")
    return Config(**values)


def save(config: Config, file: Path) -> None:
    """Writes all settings in a format that `load` reads."""
    file.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
