"""Command-line tools of tfdist, which do not import TensorFlow."""
