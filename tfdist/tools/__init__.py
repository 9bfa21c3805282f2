"""Programs around the library that import no TensorFlow."""
