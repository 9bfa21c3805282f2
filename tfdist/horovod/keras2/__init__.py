"""Keras 2 spellings under Keras 3, for scripts written for Keras 2.

`activate()` patches Keras in this process so that the Keras 2 spellings that are common
in Horovod scripts keep their meaning. Most spellings cause one warning each, which
shows the new spelling. `tfdistrun --horovod` calls `activate()`; Keras is not changed
before. `deactivate()` undoes all changes.

====================================================  =================================
Keras 2                                               Keras 3
====================================================  =================================
`optimizer.lr`, read and assigned                     `optimizer.learning_rate`
`SGD(lr=0.1)`, `SGD(learning_rate=1)`                 `SGD(learning_rate=0.1)`, a float
`SGD(0.1, decay=d)`                                   `SGD(InverseTimeDecay(0.1, 1, d))`
`Adam(epsilon=None)`, `jit_compile=`                  omit them
`optimizer.variables()`, `.weights`, `.get_weights()` `optimizer.variables`
`optimizer.set_weights(values)`                       `v.assign(value)` for each
`apply_gradients(pairs, name=...)`                    `apply_gradients(pairs)`
`LossScaleOptimizer.get_scaled_loss(loss)`            `scale_loss(loss)`
`LossScaleOptimizer.get_unscaled_gradients(grads)`    `apply` unscales gradients
`LossScaleOptimizer.loss_scale`                       `dynamic_scale`
`keras.optimizers.legacy.SGD`, `.experimental.SGD`    `keras.optimizers.SGD`
`compile(experimental_run_tf_function=...)`           omit it
`compile(experimental_steps_per_execution=n)`         `compile(steps_per_execution=n)`
`fit_generator`, `evaluate_generator`, ...            `fit`, `evaluate`, `predict`
`fit(workers=, use_multiprocessing=, ...)`            `keras.utils.PyDataset(workers=)`
`save_weights("w.h5")`, `ModelCheckpoint("w.h5", ..)` `"w.weights.h5"`
`ModelCheckpoint("model.hdf5")`                       `"model.keras"`
`K.get_value(v)`, `K.set_value(v, x)`                 `v.numpy()`, `v.assign(x)`
`K.set_session(tf.Session(config=config))`            `tf.config.set_visible_devices`
`keras.losses.mse`, `tf.keras.losses.mean_squared_..` `keras.losses.mean_squared_error`
`layers.experimental.preprocessing.Rescaling`         `layers.Rescaling`
`BatchNormalization(fused=True)`                      `BatchNormalization()`
`Dense(1, batch_input_shape=(8, 2))`                  `keras.Input(batch_shape=(8, 2))`
`add_weight("name", shape=(1,))`                      `add_weight(name="name", ...)`
`layer.output_shape`, `layer.get_output_at(0)`        `layer.output.shape`, `.output`
`variable.ref()`, `variable.read_value()`             `id(variable)`, `variable.value`
`optimizer.minimize(loss, variables)`                 `optimizer.apply_gradients(pairs)`
====================================================  =================================

docs/horovod-names.md lists all spellings. A spelling that cannot be supported raises an
error that states both the old and the new spelling: a `NotImplementedError` for a call
(`get_session`, `optimizer.get_updates`, an optimizer with `_resource_apply_dense`, an
argument with an unsupported value), or an `AttributeError` or `ImportError` for a name.

Example:
    >>> import keras, warnings
    >>> from tfdist.horovod import keras2
    >>> keras2.activate()
    >>> optimizer = keras.optimizers.SGD(learning_rate=0.5)
    >>> with warnings.catch_warnings(record=True):
    ...     optimizer.lr = 0.25
    >>> float(optimizer.learning_rate)
    0.25
    >>> keras2.deactivate()
"""

from __future__ import annotations

from tfdist.horovod import _warnings
from tfdist.horovod.keras2._spelling import Keras2SpellingWarning, Patches

__all__ = ["Keras2SpellingWarning", "activate", "deactivate", "is_active"]

_active: list[Patches] = []


def activate() -> None:
    """Enables Keras 2 spellings in this process.

    Call this function before the model is created. A second call does nothing. The
    function does not initialize tfdist.
    """
    if _active:
        return
    from tfdist.horovod.keras2 import (
        _arguments,
        _attributes,
        _backend,
        _loss_scale,
        _models,
        _names,
        _optimizers,
    )

    patches = Patches()
    _active.append(patches)
    of_optimizers = (_optimizers, _loss_scale)
    of_models = (_models, _attributes)
    for part in (*of_optimizers, *of_models, _backend, _names, _arguments):
        part.install(patches)


def deactivate() -> None:
    """Restores Keras to its state before `activate`."""
    while _active:
        _active.pop().take_back()
    _warnings.reset()


def is_active() -> bool:
    """Returns whether Keras 2 spellings are enabled."""
    return bool(_active)
