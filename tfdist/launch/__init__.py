"""tfdistrun: starts the ranks of a job on one or more hosts, and supervises them.

`cli` and `options` read the command line, `hosts` assigns ranks to hosts, and
`preflight` checks the limits of this machine. `job` starts everything, and `supervisor`
watches it to the end. `remote` is the connection to the `agent` on another host, using
`agent_protocol`. `processes` starts and finds processes, `signals` decides which
processes receive a signal, and `_standalone` contains helper programs that run in
processes of their own. `output` merges the output of the ranks, and `failure_summary`
explains the first failure. Nothing in this package imports TensorFlow.
"""
