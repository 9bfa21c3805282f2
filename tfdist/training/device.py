"""pin_gpu: one GPU for each rank of a host."""

from __future__ import annotations

import tensorflow as tf

from tfdist.core import runtime


def pin_gpu() -> tf.config.PhysicalDevice | None:
    """Makes only this rank's GPU visible to TensorFlow: number `local_rank()`.

    Call it after `tfdist.init()` and before anything runs on a GPU.

    Returns:
        The GPU, or None on a machine without one.

    Raises:
        tfdist.NotInitializedError: before `tfdist.init()`.
        ValueError: this host has fewer visible GPUs than ranks.
        RuntimeError: TensorFlow has started to use its GPUs already.

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
            f"Expected a GPU for each of the {local_size} ranks of this host, got "
            f"{len(gpus)} visible GPUs. Start at most {len(gpus)} ranks here, or check "
            "CUDA_VISIBLE_DEVICES. If your launcher gives each rank a GPU of its own, "
            "leave pin_gpu() out."
        )
    gpu = gpus[local_rank]
    try:
        tf.config.set_visible_devices(gpu, "GPU")
    except RuntimeError as error:
        raise RuntimeError(
            "tfdist.pin_gpu() came too late: TensorFlow uses its GPUs already "
            f"({error}). Call it right after tfdist.init(), before any tensor, model "
            "or dataset is made."
        ) from None
    return gpu
