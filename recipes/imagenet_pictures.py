"""Pictures of ImageNet as a network sees them: decoded, cropped, scaled, mirrored.

Functions of tensors alone, for `tf.data`'s `map`. A training picture depends on its
bytes and on the seed that is given for it, on nothing else: whichever rank makes it,
and whenever, it has the same bits.

What is approximated, as everywhere in training on ImageNet: JPEG is decoded with
TensorFlow's default, the fast integer transform (off by one or two levels of 255 from
the exact one); scaling is bilinear without a filter against aliasing; the result is
rounded to uint8, a quarter of the memory of float32. Normalise in the model.
"""

from __future__ import annotations

import math

import tensorflow as tf

AREA = (0.08, 1.0)  # of a training crop, as a part of the picture
ASPECT = (3 / 4, 4 / 3)  # width / height of a training crop
ATTEMPTS = 10
MARGIN = 32  # pixels by which a validation picture is larger than its crop


def training_picture(encoded: tf.Tensor, seed: tf.Tensor, size: int) -> tf.Tensor:
    """A random piece of a picture, mirrored or not.

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
    """The middle of a picture.

    Args:
        encoded: string scalar, as of `training_picture`.
        size: height and width of the result, in pixels.

    Returns:
        uint8 tensor `[size, size, 3]`.

    Raises:
        tensorflow.errors.InvalidArgumentError: the picture cannot be decoded.
    """
    return _cut(encoded, lambda h, w: central_window(h, w, size), size)


def random_window(height: tf.Tensor, width: tf.Tensor, uniforms: tf.Tensor):
    """A training crop: 8 to 100 % of the area, 3/4 to 4/3 as wide as high.

    Of ten attempts the first that fits into the picture is taken. Its area is
    `height * width * a` with a uniform in 0.08..1, its width / height `exp(r)` with r
    uniform between the logarithms of 3/4 and 4/3 (so that no direction is preferred;
    the papers leave this open), its place uniform. When none fits: the largest crop in
    the middle that is neither too wide nor too high.

    Args:
        height: int32 scalar, of the picture.
        width: int32 scalar.
        uniforms: float64 `[4, attempts]` in 0..1: area, aspect, vertical and
            horizontal place of each attempt.

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
    first = tf.argmax(fits)  # 0 when none does
    any_fits = fits[first]
    crop_h = tf.where(any_fits, heights[first], _at_most(h, w / ASPECT[0]))
    crop_w = tf.where(any_fits, widths[first], _at_most(w, h * ASPECT[1]))
    top = tf.where(any_fits, uniforms[2, first], 0.5) * (h - crop_h + 1.0)
    left = tf.where(any_fits, uniforms[3, first], 0.5) * (w - crop_w + 1.0)
    return tf.cast(tf.stack([top, left, crop_h, crop_w]), tf.int32)  # rounds down


def _at_most(side: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    return tf.maximum(tf.minimum(side, tf.floor(limit)), 1.0)


def central_window(height: tf.Tensor, width: tf.Tensor, size: int):
    """A validation crop: the middle square, `size / (size + 32)` of the shorter side.

    So 224 pixels are cut from the middle of a picture whose shorter side is scaled to
    256, in one step; the reference ResNet of TensorFlow computes it in this way.

    Args:
        height: int32 scalar, of the picture.
        width: int32 scalar.
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
        # Decodes the window alone: what is left and right of it is not computed, what
        # is below not even read.
        shape = tf.io.extract_jpeg_shape(encoded)
        window = window_of(shape[0], shape[1])
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3)

    def other() -> tf.Tensor:
        whole = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        shape = tf.shape(whole)
        top, left, height, width = tf.unstack(window_of(shape[0], shape[1]))
        return whole[top : top + height, left : left + width]

    # ImageNet has a PNG under a JPEG's name.
    picture = tf.cond(tf.io.is_jpeg(encoded), jpeg, other)
    picture = tf.ensure_shape(picture, [None, None, 3])
    scaled = tf.image.resize(picture, [size, size])  # between 0 and 255
    return tf.cast(scaled + 0.5, tf.uint8)
