"""What the line of a training's progress is made of; nothing here needs TensorFlow.

`exposure` is the communication that a step waits for, `pace` speed and time left,
`text` the line itself, `screen` where it goes. `tfdist.callbacks.Progress` puts them
together.
"""
