"""`python -m tfdist.tools` is the command tfdist."""

import sys

from tfdist.tools.cli import main

sys.exit(main())
