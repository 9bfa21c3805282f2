"""pin_gpu: assigns one GPU to each rank on a host."""

from __future__ import annotations

import tensorflow as tf

from tfdist.core import runtime


def pin_gpu() -> tf.config.PhysicalDevice | None:
    """Makes only this rank's GPU, number `local_rank()`, visible to TensorFlow.

    Call it after `tfdist.init()` and before anything runs on a GPU.

    Returns:
        The GPU, or None on a machine without one.

    Raises:
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
        ValueError: this host has fewer visible GPUs than ranks.
        RuntimeError: TensorFlow has already started to use its GPUs.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> gpu = tfdist.pin_gpu()
    """
    local_rank, local_size = runtime.local_rank(), runtime.local_size()
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    if len(gpus) < local_size:
        raise ValueError(
            f"Expected a GPU for each of the {local_size} ranks on this host, got "
            f"{len(gpus)} visible GPUs. Start at most {len(gpus)} ranks on this host, "
            "or check CUDA_VISIBLE_DEVICES. If your launcher assigns a GPU to each "
            "rank, do not call pin_gpu()."
        )
    gpu = gpus[local_rank]
    try:
        tf.config.set_visible_devices(gpu, "GPU")
    except RuntimeError as error:
        raise RuntimeError(
            "tfdist.pin_gpu() was called too late: TensorFlow already uses its GPUs "
            f"({error}). Call it directly after tfdist.init(), before creating any "
            "tensor, model or dataset."
        ) from None
    return gpu
