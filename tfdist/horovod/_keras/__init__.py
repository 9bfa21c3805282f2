"""Code shared by `tfdist.horovod.keras` and `tfdist.horovod.tensorflow.keras`.

Both of Horovod's Keras packages are one here, because under Keras 3 there is one Keras.
Their modules are thin: names, signatures and defaults of Horovod; the work is done
here, over tfdist's own API. Nothing is started and nothing of Keras is changed when
these modules are imported.
"""
