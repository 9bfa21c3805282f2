"""Prepares ImageNet pictures for a network: decodes, crops, scales and mirrors them.

The functions use only tensors, so they can be called in `tf.data.Dataset.map`. A
training picture depends only on its bytes and its seed, so it is bitwise identical on
every rank and in every run.

As is usual for training on ImageNet, some steps are approximate. JPEG is decoded with
TensorFlow's default, the fast integer transform (it differs from the exact form by one
or two of 255 levels). Scaling is bilinear without an anti-aliasing filter. The result
is rounded to uint8, which needs a quarter of the memory of float32. Normalize the
pictures in the model.
"""

from __future__ import annotations

import math

import tensorflow as tf

AREA = (0.08, 1.0)  # area of a training crop, as a fraction of the picture
ASPECT = (3 / 4, 4 / 3)  # width / height of a training crop
ATTEMPTS = 10
MARGIN = 32  # pixels by which a validation picture exceeds its crop


def training_picture(encoded: tf.Tensor, seed: tf.Tensor, size: int) -> tf.Tensor:
    """Returns a random crop of a picture, mirrored in half of the cases.

    Args:
        encoded: string scalar, a JPEG, PNG, GIF (its first frame) or BMP file.
        seed: int64 of shape `[2]`.
        size: height and width of the result, in pixels.

    Returns:
        uint8 tensor `[size, size, 3]`.

    Raises:
        tensorflow.errors.InvalidArgumentError: the picture cannot be decoded.

    Example:
        >>> import tensorflow as tf, imagenet_pictures
        >>> encoded = tf.io.encode_jpeg(tf.zeros([30, 40, 3], tf.uint8))
        >>> imagenet_pictures.training_picture(encoded, [1, 2], 32).shape
        TensorShape([32, 32, 3])

    References:
        Szegedy et al., Going deeper with convolutions, CVPR 2015, section 6.
        Goyal et al., Accurate, large minibatch SGD, 2017, section 5.1.
    """
    uniforms = tf.random.stateless_uniform(
        [4 * ATTEMPTS + 1], seed, dtype=tf.float64, alg="philox"
    )
    crops, mirror = tf.reshape(uniforms[:-1], [4, ATTEMPTS]), uniforms[-1] < 0.5
    picture = _cut(encoded, lambda h, w: random_window(h, w, crops), size)
    return tf.cond(mirror, lambda: tf.reverse(picture, [1]), lambda: picture)


def validation_picture(encoded: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the central crop of a picture.

    Args:
        encoded: string scalar, as in `training_picture`.
        size: height and width of the result, in pixels.

    Returns:
        uint8 tensor `[size, size, 3]`.

    Raises:
        tensorflow.errors.InvalidArgumentError: the picture cannot be decoded.
    """
    return _cut(encoded, lambda h, w: central_window(h, w, size), size)


def random_window(height: tf.Tensor, width: tf.Tensor, uniforms: tf.Tensor):
    """Returns a training crop: 8 to 100 % of the area, aspect ratio of 3/4 to 4/3.

    The first of ten attempts that fits into the picture is used. Its area is `height *
    width * a`, where a is uniform in 0.08..1. Its width / height is `exp(r)`, where r
    is uniform between the logarithms of 3/4 and 4/3. (The papers do not define this
    distribution; this one prefers neither wide nor high crops.) Its position is
    uniform. If no attempt fits, the largest central crop that is neither too wide nor
    too high is used.

    Args:
        height: int32 scalar, height of the picture.
        width: int32 scalar, width of the picture.
        uniforms: float64 `[4, attempts]` in 0..1: area, aspect, vertical and
            horizontal position of each attempt.

    Returns:
        int32 `[4]`: top, left, height and width of the crop.
    """
    h, w = tf.cast(height, tf.float64), tf.cast(width, tf.float64)
    low, high = (math.log(ratio) for ratio in ASPECT)
    area = h * w * (AREA[0] + (AREA[1] - AREA[0]) * uniforms[0])
    aspect = tf.exp(low + (high - low) * uniforms[1])
    heights = tf.maximum(tf.round(tf.sqrt(area / aspect)), 1.0)
    widths = tf.maximum(tf.round(tf.sqrt(area * aspect)), 1.0)
    fits = (heights <= h) & (widths <= w)
    first = tf.argmax(fits)  # 0 if none fits
    any_fits = fits[first]
    crop_h = tf.where(any_fits, heights[first], _at_most(h, w / ASPECT[0]))
    crop_w = tf.where(any_fits, widths[first], _at_most(w, h * ASPECT[1]))
    top = tf.where(any_fits, uniforms[2, first], 0.5) * (h - crop_h + 1.0)
    left = tf.where(any_fits, uniforms[3, first], 0.5) * (w - crop_w + 1.0)
    return tf.cast(tf.stack([top, left, crop_h, crop_w]), tf.int32)  # rounds down


def _at_most(side: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    return tf.maximum(tf.minimum(side, tf.floor(limit)), 1.0)


def central_window(height: tf.Tensor, width: tf.Tensor, size: int):
    """Returns a validation crop: a central square.

    Its side is `size / (size + 32)` of the shorter side of the picture. For 224 pixels,
    this is equivalent to scaling the shorter side to 256 pixels and cropping 224 pixels
    from the middle, but in one step, as in TensorFlow's reference ResNet.

    Args:
        height: int32 scalar, height of the picture.
        width: int32 scalar, width of the picture.
        size: pixels of the result.

    Returns:
        int32 `[4]`: top, left, height and width of the crop.
    """
    shorter = tf.minimum(height, width)
    side = tf.maximum(shorter * size // (size + MARGIN), 1)
    return tf.stack([(height - side + 1) // 2, (width - side + 1) // 2, side, side])


def _cut(encoded: tf.Tensor, window_of, size: int) -> tf.Tensor:
    """Decodes a window of a picture, and scales it; uint8 `[size, size, 3]`."""

    def jpeg() -> tf.Tensor:
        # Decodes only the window: the areas left and right of it are not computed, and
        # the area below it is not even read.
        shape = tf.io.extract_jpeg_shape(encoded)
        window = window_of(shape[0], shape[1])
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3)

    def other() -> tf.Tensor:
        whole = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        shape = tf.shape(whole)
        top, left, height, width = tf.unstack(window_of(shape[0], shape[1]))
        return whole[top : top + height, left : left + width]

    # ImageNet contains a PNG file with a JPEG name.
    picture = tf.cond(tf.io.is_jpeg(encoded), jpeg, other)
    picture = tf.ensure_shape(picture, [None, None, 3])
    scaled = tf.image.resize(picture, [size, size])  # between 0 and 255
    return tf.cast(scaled + 0.5, tf.uint8)
