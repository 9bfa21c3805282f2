"""The TensorFlow operations of the native library: loading, emitting, gradients."""
