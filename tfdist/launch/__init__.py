"""tfdistrun: starts the ranks of a job on this host and looks after them.

`cli` reads the command line, `limits` checks what the ranks will need, `process`
starts one rank, `output` merges what they print, `supervisor` watches them, `tree`
ends processes, `report` explains the first failure. Nothing here imports TensorFlow.
"""
