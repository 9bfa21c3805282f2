"""Runs horovodrun: `python -m tfdist.launch.horovod`."""

import sys

from tfdist.launch.horovod.command import main

if __name__ == "__main__":
    sys.exit(main())
