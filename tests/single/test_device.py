"""pin_gpu, with GPUs that are only listed."""

import pytest
import tensorflow as tf

import tfdist
from tfdist.core import runtime


@pytest.fixture
def host(monkeypatch):
    """A host with listed GPUs and ranks; returns what was made visible."""
    visible = []

    def make(gpus, local_rank, local_size):
        devices = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU")
            for i in range(gpus)
        ]
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind=None: devices
        )
        monkeypatch.setattr(
            tf.config, "set_visible_devices", lambda d, kind: visible.append((d, kind))
        )
        monkeypatch.setattr(runtime, "local_rank", lambda: local_rank)
        monkeypatch.setattr(runtime, "local_size", lambda: local_size)
        return visible

    return make


def test_a_host_without_gpus_is_left_alone(host):
    visible = host(0, 1, 2)
    assert tfdist.pin_gpu() is None
    assert visible == []


@pytest.mark.parametrize("local_rank", [0, 2])
def test_each_local_rank_sees_its_own_gpu(host, local_rank):
    visible = host(4, local_rank, 3)
    gpu = tfdist.pin_gpu()
    assert gpu.name.endswith(f":{local_rank}")
    assert visible == [(gpu, "GPU")]


@pytest.mark.parametrize("local_rank", [0, 1])
def test_fewer_gpus_than_ranks_is_an_error_on_every_rank(host, local_rank):
    host(1, local_rank, 2)
    with pytest.raises(ValueError, match="2 ranks on this host, got 1 visible"):
        tfdist.pin_gpu()


def test_gpus_in_use_already_are_an_error_that_says_when_to_call(host, monkeypatch):
    host(1, 0, 1)

    def refuse(device, kind):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    with pytest.raises(RuntimeError, match=r"directly after tfdist.init\(\)"):
        tfdist.pin_gpu()
