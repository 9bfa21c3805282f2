#!/bin/sh
# One run on this machine: ./main.sh [key=value...]; on 4 ranks: NP=4 ./main.sh
set -eu
cd "$(dirname "$0")"
command -v tfdistrun >/dev/null || {
  echo "main.sh: no tfdistrun in PATH; activate the environment that has tfdist" >&2
  exit 1
}
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
exec tfdistrun -np "${NP:-2}" python main.py "$@"
