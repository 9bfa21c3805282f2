"""What a script leaves for the test: weights, their hash, and what was reduced."""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

if "tfdist" in sys.modules:
    from tfdist.core import native

    native.take_records()  # from now on they are kept


def write(hvd, weights, **facts):
    """Writes `rank-<rank>.npz` and `.json` into the working directory.

    Args:
        hvd: the module of Horovod that the script uses.
        weights: arrays, the final state that all ranks shall share.
        **facts: what else the test looks at.
    """
    weights = [np.asarray(w) for w in weights]
    digest = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
    facts |= {"hash": digest, **_operations()}
    name = f"rank-{hvd.rank()}"
    np.savez(f"{name}.npz", *weights)
    Path(f"{name}.json").write_text(json.dumps(facts, default=float))
    print(f"weights of rank {hvd.rank()}: {digest[:12]}")


def _operations():
    """How many operations the core has run, by kind, and those of gradients.

    Nothing under Horovod itself, for which the scripts are written.
    """
    if "tfdist" not in sys.modules:
        return {}
    rows = native.take_records()
    names = [row["name"].rpartition("/")[2] for row in rows]
    kinds = {native.ALLREDUCE: "allreduce", native.ALLGATHER: "allgather"}
    kinds |= {native.BROADCAST: "broadcast"}
    return {
        "reductions": sum(name.startswith("gradients.") for name in names),
        "operations": Counter(kinds.get(row["kind"], "other") for row in rows),
        "names": names,
    }
