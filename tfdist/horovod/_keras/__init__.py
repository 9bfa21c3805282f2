"""Code shared by `tfdist.horovod.keras` and `tfdist.horovod.tensorflow.keras`.

Horovod's two Keras packages share this code, because Keras 3 replaces both versions of
Keras. Their modules only define Horovod's names, signatures and defaults; the work is
done here, with tfdist's own API. Importing these modules starts nothing and does not
change Keras.
"""
