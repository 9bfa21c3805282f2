"""Runs a rank of `horovod.run`: `python -m tfdist.horovod.runner FOLDER`."""

import sys

from tfdist.horovod.runner import _call

if __name__ == "__main__":
    _call.main(sys.argv[1])
