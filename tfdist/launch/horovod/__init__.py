"""Runs programs written for Horovod: `tfdistrun --horovod` and `horovodrun`.

`variables` is the table of Horovod's environment variables. `mode` applies `tfdistrun
--horovod` to a command and its environment. `flags` parses the command line of
`horovodrun`, and `config_file` reads its YAML file. `translation` translates both, and
`command` is the program `horovodrun`. The code for the ranks is in `tfdist.horovod`.
Nothing in this package imports TensorFlow.
"""
