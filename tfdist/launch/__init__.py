"""tfdistrun: starts the ranks of a job on one host or several, and looks after them.

`cli` and `options` read the command line, `hosts` assigns ranks to hosts, `preflight`
checks the limits of this machine. `job` starts everything: `process` one rank of this
host, `remote` the `agent` on another one, over `agent_protocol`. `output` merges what
the ranks print, `supervisor` watches them, `process_tree` ends processes,
`failure_summary` explains the first failure. Nothing here imports TensorFlow.
"""
