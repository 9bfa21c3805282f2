"""What tests of one process share.

Examples are the same ones in every run, however slow the machine is.
"""

import gc
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="module")
def no_world_of_an_earlier_file() -> None:
    """Shuts down the world that tests of another file have left.

    The garbage collector looks no more at what TensorFlow has kept of them: Keras's
    `clear_session` collects.
    """
    world = sys.modules.get("tfdist.core.world")  # not every test imports it
    if world is not None:
        world.shutdown()
    gc.collect()
    gc.freeze()


@pytest.fixture
def init_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Begins a world anew with variables of the environment, for one test."""
    import tfdist  # not every test needs TensorFlow

    def begin(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        tfdist.shutdown()
        tfdist.init()

    yield begin
    monkeypatch.undo()
    begin()
