"""Code shared by `tfdist.horovod.keras` and `tfdist.horovod.tensorflow.keras`.

Horovod has one package for `keras` and one for `tf.keras`. In Keras 3 these are the
same, so both packages share this code. Their modules only define Horovod's names,
signatures and defaults; the modules here implement them with tfdist's own API.
Importing them starts nothing and does not change Keras.
"""
