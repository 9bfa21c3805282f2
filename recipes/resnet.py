"""ResNets for pictures, version 1.5: the 3x3 convolution of a block has the stride.

The scale of the last batch normalization in each block is initialized to zero, so a
block starts as the identity.

References:
    He et al., Deep Residual Learning for Image Recognition, CVPR 2016, sections 3.3 and
    4.1 (arXiv:1512.03385).
    He et al., Delving Deep into Rectifiers, ICCV 2015, section 2.2: initial kernels
    (arXiv:1502.01852).
    Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
    section 5.1: initialization to zero (arXiv:1706.02677).
"""

import keras
from keras import layers

# Blocks in each of the four stages, and whether a block is a bottleneck.
NETWORKS = {
    "resnet8": ((1, 1, 1), False),  # with a quarter of the filters, to try things out
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}
# Mean and standard deviation of ImageNet's pictures, by channel, in 0..255.
MEAN = (123.675, 116.28, 103.53)
STANDARD_DEVIATION = (58.395, 57.12, 57.375)


def build(name: str, *, image_size: int | None, classes: int) -> keras.Model:
    """Builds a network from raw pictures to logits.

    Args:
        name: a key of NETWORKS.
        image_size: pixels of height and width, at least 32; None: any size.
        classes: number of logits.

    Returns:
        A model from uint8 [batch, image_size, image_size, 3] to float32 [batch,
        classes]. The model normalizes the pictures, so a saved model accepts raw
        pictures.
    """
    blocks, bottleneck = NETWORKS[name]
    filters = 16 if name == "resnet8" else 64
    inputs = keras.Input((image_size, image_size, 3), dtype="uint8")
    x = layers.Normalization(
        mean=MEAN, variance=[value**2 for value in STANDARD_DEVIATION]
    )(inputs)
    x = _convolution(x, filters, 7, stride=2, name="stem")
    x = layers.ReLU()(x)
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, count in enumerate(blocks):
        for block in range(count):
            x = _block(
                x,
                filters << stage,
                stride=2 if stage and not block else 1,
                bottleneck=bottleneck,
                name=f"stage{stage + 1}_block{block + 1}",
            )
    x = layers.GlobalAveragePooling2D()(x)
    # Logits are float32 even under mixed precision: the loss needs the precision.
    x = layers.Dense(
        classes,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
        dtype="float32",
        name="logits",
    )(x)
    return keras.Model(inputs, x, name=name)


def _block(
    x: keras.KerasTensor, filters: int, *, stride: int, bottleneck: bool, name: str
) -> keras.KerasTensor:
    """Builds convolutions with a shortcut."""
    outputs = filters * 4 if bottleneck else filters
    shortcut = x
    if stride != 1 or x.shape[-1] != outputs:
        shortcut = _convolution(x, outputs, 1, stride=stride, name=f"{name}_shortcut")
    if bottleneck:
        x = layers.ReLU()(_convolution(x, filters, 1, name=f"{name}_1"))
        x = layers.ReLU()(_convolution(x, filters, 3, stride=stride, name=f"{name}_2"))
        x = _convolution(x, outputs, 1, gamma="zeros", name=f"{name}_3")
    else:
        x = layers.ReLU()(_convolution(x, filters, 3, stride=stride, name=f"{name}_1"))
        x = _convolution(x, outputs, 3, gamma="zeros", name=f"{name}_2")
    return layers.ReLU()(layers.Add()([x, shortcut]))


def _convolution(
    x: keras.KerasTensor,
    filters: int,
    size: int,
    *,
    stride: int = 1,
    gamma: str = "ones",
    name: str,
) -> keras.KerasTensor:
    """Builds a convolution without bias, followed by batch normalization."""
    if stride > 1:  # the same padding on both sides, whatever the picture's size
        x = layers.ZeroPadding2D((size - 1) // 2)(x)
    x = layers.Conv2D(
        filters,
        size,
        stride,
        padding="valid" if stride > 1 else "same",
        use_bias=False,
        kernel_initializer=keras.initializers.VarianceScaling(
            2.0, mode="fan_out", distribution="untruncated_normal"
        ),
        name=name,
    )(x)
    return layers.BatchNormalization(
        momentum=0.9, epsilon=1e-5, gamma_initializer=gamma, name=f"{name}_bn"
    )(x)
