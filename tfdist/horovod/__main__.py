"""`python -m tfdist.horovod script.py`: `tfdistrun --horovod` for other launchers.

Example: `mpirun -np 2 python -m tfdist.horovod train.py`. The process replaces itself
with the program (exec). All arguments after the module's name are passed to Python.
"""

import os
import sys

from tfdist.launch.horovod import mode


def main() -> int:
    """Replaces this process with the program; returns only if no program is given."""
    if len(sys.argv) < 2:
        print(
            "usage: python -m tfdist.horovod SCRIPT [ARGUMENT...], under mpirun, srun "
            "or torchrun; else `tfdistrun --horovod -np N SCRIPT`",
            file=sys.stderr,
        )
        return 2
    os.environ["PYTHONPATH"] = mode.with_folder(os.environ.get("PYTHONPATH", ""))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
