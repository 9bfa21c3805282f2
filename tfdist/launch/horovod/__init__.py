"""Running programs that were written for Horovod: `tfdistrun --horovod`, `horovodrun`.

`variables` is the table of Horovod's environment variables. `mode` is what
`tfdistrun --horovod` does to a command and its environment. `flags` is Horovod's
command line, `config_file` its YAML file, `translation` what becomes of both,
`command` the program. What the ranks do stands in `tfdist.horovod`. Nothing here
imports TensorFlow.
"""
