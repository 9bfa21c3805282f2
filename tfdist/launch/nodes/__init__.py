"""`--nnodes`: tfdistrun is started on every host, and ssh is not used.

`place` determines the number of this host. On the first host, `accept` waits for the
other hosts. On each other host, `join` connects to the first host, and runs an agent.
"""
