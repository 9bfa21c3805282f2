"""The CUDA pack kernels against NumPy; needs nvcc and a GPU, else it is skipped."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_importable() -> Iterator[None]:
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path.remove(BENCHMARKS)


@pytest.fixture(scope="module")
def library():
    """The built library, on a machine that can run it."""
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU (`make gpu` compiles the kernels all the same)")
    import gpu_library

    found, reason = gpu_library.load()
    if found is None:
        pytest.skip(reason)
    return found


def test_every_pair_scale_and_alignment_equals_numpy_bitwise(library):
    import gpu_pack

    count, failed = gpu_pack.check_all(library)
    assert count > 200
    assert failed == []


def test_bad_batches_are_refused_with_words(library):
    import gpu_pack

    assert gpu_pack.check_refusals(library) == []


def test_equals_pytorch_where_it_sees_the_gpu(library):
    import gpu_torch

    says = gpu_torch.check(library)
    if says.startswith("skipped"):
        pytest.skip(says)
    assert says == "equal, bit by bit"
