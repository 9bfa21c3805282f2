"""The gradients of ResNet-50 as a list of shapes, without a framework.

K. He et al., "Deep Residual Learning for Image Recognition" (2015), table 1, with
the biases that keras.applications gives to its convolutions: 214 tensors with
25,583,592 numbers.
"""

from __future__ import annotations

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks, filters inside a block
EXPANSION = 4
CLASSES = 1000


def _convolution(kernel: int, inputs: int, filters: int) -> list[tuple[int, ...]]:
    """Kernel and bias, then scale and offset of the batch normalization."""
    return [(kernel, kernel, inputs, filters), *[(filters,)] * 3]


def gradient_shapes() -> list[tuple[int, ...]]:
    """Shapes in the order of the layers.

    Example:
        >>> import math
        >>> shapes = gradient_shapes()
        >>> len(shapes), sum(math.prod(shape) for shape in shapes)
        (214, 25583592)
    """
    shapes = _convolution(7, 3, 64)
    channels = 64
    for blocks, filters in STAGES:
        for block in range(blocks):
            if block == 0:
                shapes += _convolution(1, channels, filters * EXPANSION)
            shapes += _convolution(1, channels, filters)
            shapes += _convolution(3, filters, filters)
            shapes += _convolution(1, filters, filters * EXPANSION)
            channels = filters * EXPANSION
    return [*shapes, (channels, CLASSES), (CLASSES,)]
