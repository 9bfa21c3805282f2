"""Runs the command `tfdist` as `python -m tfdist.tools`."""

import sys

from tfdist.tools.cli import main

sys.exit(main())
