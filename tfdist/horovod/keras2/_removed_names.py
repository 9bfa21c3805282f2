"""Public names of Keras 2.15 that Keras 3 lacks: their new names, or advice.

Paths are relative to `keras`: "losses.Reduction". Contains only tables and pure
functions; `_names` applies them. A name that exists in only one of `keras` and
`tf.keras` is added to the other module without an entry in these tables.
"""

from __future__ import annotations

# Old module → the module that has its names now. The modules after the first three are
# from versions before 2.15.
MODULES = {
    "callbacks.experimental": "callbacks",
    "layers.experimental": "layers",
    "layers.experimental.preprocessing": "layers",
    "layers.advanced_activations": "layers",
    "layers.convolutional": "layers",
    "layers.core": "layers",
    "layers.embeddings": "layers",
    "layers.merge": "layers",
    "layers.noise": "layers",
    "layers.normalization": "layers",
    "layers.pooling": "layers",
    "layers.recurrent": "layers",
    "layers.wrappers": "layers",
    "mixed_precision.experimental": "mixed_precision",
    "utils.data_utils": "utils",
    "utils.generic_utils": "utils",
    "utils.np_utils": "utils",
    "utils.vis_utils": "utils",
}

# Old name → new name.
NAMES = {
    "experimental.CosineDecay": "optimizers.schedules.CosineDecay",
    "experimental.CosineDecayRestarts": "optimizers.schedules.CosineDecayRestarts",
    "layers.AbstractRNNCell": "layers.Layer",
    "mixed_precision.experimental.set_policy": "mixed_precision.set_global_policy",
    "models.model_from_config": "layers.deserialize",
}

_HUB = "Take the model from the package keras-hub."
_INTERNAL = "It was internal to Keras 2, without a successor."
_TENSORS = "Tensors have their values at once: call a tf.function of your own."
_TRAINING = "Use the argument `training` of a layer's call."
_QUEUE = "Write a keras.utils.PyDataset(workers=...)."
_DATASET = "Write a tf.data.Dataset; tfdist.data.shard gives each rank its part."
_ONE_RANK = "Call model.evaluate, on all ranks, between two epochs or after them."
_WRITE_LAYER = "Write a keras.layers.Layer of your own."
_EXACT = "Keras 3 has only one kind of random number generator. Leave it out."

# Module → removed names, separated by spaces → advice.
GONE = {
    "": {
        "__internal__": _INTERNAL,
        "dtensor": "tfdist trains the same model on all ranks, without DTensor.",
        "estimator": "Train with model.fit: TensorFlow has no estimators any more.",
    },
    "applications": {
        "RegNetX002 RegNetX004 RegNetX006 RegNetX008 RegNetX016 RegNetX032 RegNetX040 "
        "RegNetX064 RegNetX080 RegNetX120 RegNetX160 RegNetX320 RegNetY002 RegNetY004 "
        "RegNetY006 RegNetY008 RegNetY016 RegNetY032 RegNetY040 RegNetY064 RegNetY080 "
        "RegNetY120 RegNetY160 RegNetY320 ResNetRS101 ResNetRS152 ResNetRS200 "
        "ResNetRS270 ResNetRS350 ResNetRS420 ResNetRS50 regnet resnet_rs": _HUB,
    },
    "backend": {
        "experimental": _EXACT,
        "function placeholder": _TENSORS,
        "in_test_phase in_train_phase learning_phase learning_phase_scope "
        "set_learning_phase": _TRAINING,
        "local_conv1d local_conv2d": _WRITE_LAYER,
        "manual_variable_initialization": "Variables are initialized when they are "
        "created. Leave it out.",
        "normalize_batch_in_training": "Write keras.ops.moments and "
        "keras.ops.batch_normalization.",
        "print_tensor": "Write tf.print(message, x).",
        "random_binomial": "Write keras.random.binomial.",
        "reset_uids": "Write keras.utils.clear_session().",
    },
    "callbacks": {
        "BaseLogger": "fit averages metrics itself. Leave it out.",
        "SidecarEvaluatorModelExport": _ONE_RANK,
    },
    "constraints": {
        "RadialConstraint radial_constraint": "Write a keras.constraints.Constraint.",
    },
    "experimental": {
        "LinearModel WideDeepModel": "Write a keras.Model of keras.layers.Dense.",
        "SequenceFeatures": "Write keras.utils.FeatureSpace.",
        "SidecarEvaluator": _ONE_RANK,
    },
    "layers": {
        "DenseFeatures": "Write keras.utils.FeatureSpace.",
        "LocallyConnected1D LocallyConnected2D": _WRITE_LAYER,
    },
    "layers.experimental": {
        "RandomFourierFeatures": _WRITE_LAYER,
        "SyncBatchNormalization": "Write hvd.SyncBatchNormalization() or "
        "tfdist.layers.SyncBatchNormalization().",
    },
    "layers.experimental.preprocessing": {
        "PreprocessingLayer": "Write a keras.layers.Layer with an adapt of its own.",
    },
    "metrics": {
        "MeanRelativeError MeanTensor": "Write a subclass of keras.metrics.Metric.",
        "experimental": "Write a subclass of keras.metrics.Metric.",
    },
    "models": {
        "experimental": "Write a keras.Model with a train_step.",
        "model_from_yaml": "Write keras.models.model_from_json.",
    },
    "utils": {
        "GeneratorEnqueuer OrderedEnqueuer SequenceEnqueuer": _QUEUE,
        "SidecarEvaluator": _ONE_RANK,
        "StepsPerExecutionTuner": "Write compile(steps_per_execution=n).",
        "TimedThread": "Write a threading.Thread.",
        "experimental": _DATASET,
        "to_ordinal": "With NumPy, write np.arange(classes - 1) < y[..., None].",
        "warmstart_embedding_matrix": "Set the rows of the matrix with NumPy.",
    },
    "wrappers": {
        "scikit_learn": "Write keras.wrappers.SKLearnClassifier or SKLearnRegressor.",
    },
}


def advice_for(path: str) -> str:
    """Returns the advice for a removed name; "" for other names.

    Args:
        path: path in `keras`; a name inside a removed module counts as removed.

    Example:
        >>> advice_for("callbacks.BaseLogger")
        'fit averages metrics itself. Leave it out.'
        >>> advice_for("estimator.model_to_estimator") == advice_for("estimator")
        True
        >>> advice_for("layers.Dense")
        ''
    """
    module, _, name = path.rpartition(".")
    for names, advice in GONE.get(module, {}).items():
        if name in names.split():
            return advice
    return advice_for(module) if module else ""


def refusal(path: str) -> str:
    """Returns the error message for a removed name."""
    return f"keras.{path} does not exist in Keras 3. {advice_for(path)}"
