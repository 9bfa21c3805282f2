"""tfdistrun: starts the ranks of a job on one host or several, and looks after them.

`cli` and `options` read the command line, `hosts` assigns ranks to hosts, `preflight`
checks the limits of this machine. `job` starts everything, `supervisor` watches it to
the end; `remote` is the connection to the `agent` on another host, over
`agent_protocol`. `processes` starts and finds processes, `signals` decides which of
them get a signal, `_standalone` has the programs that run beside them. `output` merges
what the ranks print, `failure_summary` explains the first failure. Nothing here imports
TensorFlow.
"""
