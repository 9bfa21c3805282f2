"""One tfdistrun on each host, which meet at an address: `--nnodes`, without ssh.

`place` determines the number of this host. On the first host, `accept` waits for the
others. On the others, `join` connects to the first one, and runs an agent.
"""
