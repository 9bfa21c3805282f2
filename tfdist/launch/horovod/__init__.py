"""Runs programs written for Horovod: `tfdistrun --horovod` and `horovodrun`.

`variables` is the table of Horovod's environment variables. `mode` applies `tfdistrun
--horovod` to a command and its environment. `flags` is Horovod's command line,
`config_file` its YAML file, `translation` translates both, and `command` is the
program. The code for the ranks is in `tfdist.horovod`. Nothing in this package imports
TensorFlow.
"""
