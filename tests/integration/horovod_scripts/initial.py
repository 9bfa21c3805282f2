"""Initial weights from NumPy: the same under every version of Keras."""

import numpy as np


def kernel(seed):
    """An initializer, uniform as Glorot's; what it draws depends on seed and shape."""

    def draw(shape, dtype=None):  # of NumPy, Keras or TensorFlow: float32 fits all
        shape = tuple(map(int, shape))
        limit = np.sqrt(6 / (np.prod(shape[:-2]) * sum(shape[-2:])))
        numbers = np.random.default_rng([seed, *shape]).uniform(-limit, limit, shape)
        return numbers.astype(np.float32)

    return draw


def set_weights(model, seed):
    """Gives all kernels of a built model numbers of `kernel`."""
    draw = kernel(seed)
    weights = [draw(w.shape) if w.ndim > 1 else w for w in model.get_weights()]
    model.set_weights(weights)
