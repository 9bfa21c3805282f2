"""Runs a rank of `horovod.run`: `python -m tfdist.horovod.runner FOLDER`."""

import sys
from pathlib import Path

from tfdist.horovod.runner.common.util.env import get_env_rank_and_size
from tfdist.launch import function_files

if __name__ == "__main__":
    function_files.call(Path(sys.argv[1]), get_env_rank_and_size)
