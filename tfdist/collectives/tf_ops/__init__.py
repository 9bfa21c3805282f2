"""TensorFlow operations of the native library: loading, emission and gradients."""
