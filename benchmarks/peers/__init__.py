"""tfdist beside the real peers: interleaved in one run, verified before timing.

`python -m benchmarks.peers --help` has the commands, docs/benchmarks.md how to read
what they report.
"""
