"""What recipes/imagenet_pictures.py cuts out of a picture, against NumPy."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import imagenet_pictures  # noqa: E402

RNG = np.random.default_rng(7)


def photograph(height, width):
    """Smooth, so that JPEG changes little; different at every place."""
    y, x = np.mgrid[0:height, 0:width]
    levels = [255 * x / width, 255 * y / height, 127 + 100 * np.sin(x / 9 + y / 7)]
    return np.stack(levels, axis=-1).astype(np.uint8)


def jpeg(array, **options):
    return tf.io.encode_jpeg(array, quality=100, chroma_downsampling=False, **options)


def random_window(h, w, uniforms):
    """The definition, one attempt after the other."""
    for a, r, y, x in uniforms.T:
        area, aspect = h * w * (0.08 + 0.92 * a), (3 / 4) * (16 / 9) ** r
        ch, cw = (
            max(1, round(s)) for s in ((area / aspect) ** 0.5, (area * aspect) ** 0.5)
        )
        if ch <= h and cw <= w:
            return [int(y * (h - ch + 1)), int(x * (w - cw + 1)), ch, cw]
    ch, cw = max(1, min(h, int(w * 4 / 3))), max(1, min(w, int(h * 4 / 3)))
    return [(h - ch + 1) // 2, (w - cw + 1) // 2, ch, cw]


def bilinear(crop, size):
    """Half-pixel centres, no filter, in float64."""

    def weights(length):
        at = (np.arange(size) + 0.5) * length / size - 0.5
        low = np.floor(at).astype(int)
        return low.clip(0, length - 1), (low + 1).clip(0, length - 1), at - low

    top, bottom, dy = weights(crop.shape[0])
    left, right, dx = weights(crop.shape[1])
    dy, dx, crop = dy[:, None, None], dx[None, :, None], crop.astype(np.float64)
    upper = crop[top][:, left] * (1 - dx) + crop[top][:, right] * dx
    lower = crop[bottom][:, left] * (1 - dx) + crop[bottom][:, right] * dx
    return upper * (1 - dy) + lower * dy


@pytest.mark.parametrize(
    "shape", [(375, 500), (500, 333), (224, 224), (40, 900), (1, 1)]
)
def test_the_random_window_is_the_one_of_the_papers(shape):
    inputs = [tf.TensorSpec([], tf.int32)] * 2 + [tf.TensorSpec([4, 10], tf.float64)]
    window = tf.function(imagenet_pictures.random_window, input_signature=inputs)
    for _ in range(60):
        uniforms = RNG.random((4, 10))
        found = window(*shape, uniforms).numpy().tolist()
        assert found == random_window(*shape, uniforms)
        assert found[0] + found[2] <= shape[0] and found[1] + found[3] <= shape[1]


def test_random_windows_cover_8_to_100_percent_evenly():
    draws = RNG.random((1000, 4, 10))
    windows = np.array([random_window(300, 300, u) for u in draws])
    areas = windows[:, 2] * windows[:, 3] / 300**2
    aspects = windows[:, 3] / windows[:, 2]
    assert 0.075 < areas.min() < 0.1 and areas.max() > 0.95
    assert 0.74 < aspects.min() and aspects.max() < 1.35
    found = [imagenet_pictures.random_window(300, 300, u).numpy() for u in draws[:20]]
    np.testing.assert_array_equal(found, windows[:20])


@pytest.mark.parametrize(
    ("shape", "size", "window"),
    [
        ((256, 256), 224, [16, 16, 224, 224]),
        ((375, 500), 224, [24, 86, 328, 328]),
        ((500, 375), 224, [86, 24, 328, 328]),
        ((96, 64), 64, [27, 11, 42, 42]),
        ((1, 3), 224, [0, 1, 1, 1]),
    ],
)
def test_the_central_window_is_the_middle_square(shape, size, window):
    assert imagenet_pictures.central_window(*shape, size).numpy().tolist() == window


def test_a_validation_picture_is_the_scaled_crop():
    encoded = jpeg(photograph(150, 200))
    found = imagenet_pictures.validation_picture(encoded, 64).numpy()
    whole = tf.io.decode_jpeg(encoded).numpy()
    top, left, height, width = 25, 50, 100, 100  # 64 / (64 + 32) of 150
    crop = whole[top : top + height, left : left + width]
    assert found.dtype == np.uint8 and found.shape == (64, 64, 3)
    assert np.abs(found - bilinear(crop, 64)).max() <= 0.501


def test_a_training_picture_is_the_scaled_crop_mirrored_or_not():
    encoded = jpeg(photograph(150, 200))
    whole = tf.io.decode_jpeg(encoded).numpy()
    mirrored = 0
    for position in range(20):
        seed = tf.constant([5, position], tf.int64)
        found = imagenet_pictures.training_picture(encoded, seed, 48).numpy()
        u = tf.random.stateless_uniform([41], seed, dtype=tf.float64, alg="philox")
        top, left, h, w = random_window(150, 200, u[:40].numpy().reshape(4, 10))
        expected = bilinear(whole[top : top + h, left : left + w], 48)
        if u[40] < 0.5:
            expected = expected[:, ::-1]
            mirrored += 1
        assert np.abs(found - expected).max() <= 0.501
    assert 4 <= mirrored <= 16


def test_one_seed_gives_the_same_bits_everywhere():
    encoded = jpeg(photograph(90, 120))

    def make(position):
        return imagenet_pictures.training_picture(encoded, [3, position], 32)

    seeds = tf.data.Dataset.range(12)
    eager = np.stack([make(tf.constant(p, tf.int64)) for p in range(12)])
    for threads in (1, 4):
        mapped = seeds.map(make, num_parallel_calls=threads, deterministic=True)
        np.testing.assert_array_equal(np.stack(list(mapped)), eager)
    assert len({picture.tobytes() for picture in eager}) == 12


def encoded_by_pillow(array, form, mode):
    file = io.BytesIO()
    Image.fromarray(array).convert(mode).save(file, form, quality=95)
    return file.getvalue()


@pytest.mark.parametrize(
    ("form", "mode", "within"),
    [
        ("PNG", "RGB", 0),
        ("PNG", "RGBA", 0),
        ("PNG", "L", 0),
        ("GIF", "P", 12),  # 256 colours
        ("BMP", "RGB", 0),
        ("JPEG", "L", 1.5),
        ("JPEG", "CMYK", 1.5),
    ],
)
def test_what_else_is_called_jpeg_in_imagenet_is_read_too(form, mode, within):
    array = photograph(90, 120)
    if mode == "L":
        array[:] = array.mean(axis=-1, keepdims=True)
    encoded = encoded_by_pillow(array, form, mode)
    reference = tf.io.encode_png(array)
    size = 48
    validation = imagenet_pictures.validation_picture
    found, expected = (validation(one, size).numpy() for one in (encoded, reference))
    assert np.abs(found.astype(int) - expected).mean() <= within
    make = imagenet_pictures.training_picture
    found, expected = (make(one, [1, 2], size).numpy() for one in (encoded, reference))
    assert np.abs(found.astype(int) - expected).mean() <= within


@pytest.mark.parametrize("content", [b"", b"text", b"\xff\xd8\xff and no more"])
def test_what_is_no_picture_is_an_error(content):
    with pytest.raises(tf.errors.InvalidArgumentError):
        imagenet_pictures.validation_picture(content, 32)
