"""Mixup: trains on weighted means of two images and of their labels.

References:
    Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018, section 2
    (arXiv:1710.09412).
"""

import tensorflow as tf


def mixed(
    batches: tf.data.Dataset, *, alpha: float, seed: int, rank: int, first_batch: int
) -> tf.data.Dataset:
    """Mixes each image of a batch with the image at the mirrored index.

    The share s of a batch is drawn from a Beta distribution: an image becomes s times
    itself plus (1 - s) times the other image. The share depends only on the arguments
    and the number of the batch, so a resumed run continues with the same shares.

    An image whose counterpart has the weight 0, because it is corrupt, is not mixed.

    Args:
        batches: images uint8 `[b, height, width, 3]`, labels float32 `[b, classes]`,
            and possibly weights float32 `[b]`, which stay as they are.
        alpha: both parameters of the Beta distribution, above 0; 0.2 for ImageNet.
        seed: seed of the shares.
        rank: rank of this process; ranks draw different shares.
        first_batch: number of the first batch of `batches`, from the start of training.

    Returns:
        Batches like `batches`.

    Example:
        >>> import numpy as np
        >>> images = np.stack([np.zeros((2, 2, 3)), np.full((2, 2, 3), 200)])
        >>> batch = images.astype("uint8"), np.eye(2, dtype="float32")
        >>> one = tf.data.Dataset.from_tensors(batch)
        >>> [(x, y)] = mixed(one, alpha=0.2, seed=1, rank=0, first_batch=0)
        >>> x.dtype.name, y.numpy().sum(axis=1).tolist()
        ('uint8', [1.0, 1.0])
    """

    def mean(x: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
        shares = tf.reshape(shares, [-1] + [1] * (x.shape.rank - 1))
        return shares * x + (1 - shares) * tf.reverse(x, [0])

    def mix(number: tf.Tensor, batch: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
        images, labels, *weights = batch
        seeds = tf.stack([number, tf.constant(rank, tf.int64)])
        both = tf.random.stateless_gamma(
            [2], tf.random.fold_in(tf.cast(seeds, tf.int32), seed), alpha
        )
        share = both[0] / tf.maximum(tf.reduce_sum(both), 1e-30)
        shares = tf.fill(tf.shape(labels)[:1], share)
        if weights:
            shares = tf.where(tf.reverse(weights[0], [0]) == 0, 1.0, shares)
        return (
            tf.cast(tf.round(mean(tf.cast(images, tf.float32), shares)), images.dtype),
            mean(labels, shares),
            *weights,
        )

    return batches.enumerate(first_batch).map(mix)
