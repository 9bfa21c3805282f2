"""tfdistrun: starts the ranks of a job on one host or several, and looks after them.

`cli` and `options` read the command line, `hosts` deals the ranks out, `limits` checks
what they will need. `job` starts everything: `process` one rank of this host, `remote`
the `agent` on another one, with which it speaks in `frames`. `output` merges what the
ranks print, `supervisor` watches them, `tree` ends processes, `report` explains the
first failure. Nothing here imports TensorFlow.
"""
