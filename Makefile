# One command for each task; `make help` lists them.
# Needs GNU make, Python 3.11-3.13 and a C++17 compiler: no root, no GPU, nothing else installed.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-slow test-horovod-engine test-versions sim campaign scale peers bench mutants reproduce sanitize fuzz hostile lint format docs wheel gpu xla mpi setup clean distclean
unexport PYTHONPATH PYTHONHOME
# If Python may not cache bytecode, each rank compiles TensorFlow's modules when it imports them,
# which takes 9 s instead of 3 s.
unexport PYTHONDONTWRITEBYTECODE

NP ?= 2
SECONDS ?= 600
MPICC ?= mpicc
MPI_LIBRARY ?= tfdist/_native/libtfdist_mpi.so
CONNECTIONS ?= 100000
BIN := .venv/bin
INSTALLED := .venv/.installed
# The core is compiled by the set-up alone, with warnings as errors where WERROR=1.
STRICT := .venv/.built-strict
BUILT := $(if $(filter 1,$(WERROR)),$(STRICT),.venv/.built)
NATIVE := $(shell find tfdist_ops \( -path tfdist_ops/cuda -o -path tfdist_ops/xla \) -prune -o \
  \( -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt \) -print)
CPP := $(shell find tfdist_ops tests/cpp tests/sim tests/fuzz benchmarks -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.c')
PYTHON_CODE := .ci tfdist recipes benchmarks tests docs/conf.py setup.py

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

$(INSTALLED): pyproject.toml .ci/setup
	@.ci/setup packages
	@touch $@

$(BUILT): $(INSTALLED) setup.py $(NATIVE)
	@.ci/setup build
	@touch $@ .venv/.built

setup: $(BUILT)  ## .venv with everything, native libraries built

train: export TF_CPP_MIN_LOG_LEVEL ?= 1
train: $(BUILT)  ## the README's example: a CNN on real digits, NP=2 ranks
	@$(BIN)/tfdistrun -np $(NP) $(BIN)/python recipes/mnist_fit.py

test: $(BUILT)  ## the whole suite, in stages
	@$(BIN)/python .ci/stages.py

test-slow: $(BUILT)  ## the tests that take minutes
	@$(BIN)/python .ci/stages.py --slow

test-horovod-engine: $(BUILT)  ## the optional engine that carries tensors by an installed Horovod
	@$(BIN)/python -m pytest -q tests/horovod_engine

test-versions: $(BUILT)  ## sets up and tries the oldest and the newest TensorFlow
	@$(BIN)/python .ci/tensorflow_versions.py

SEEDS ?= 1000
FIRST ?= 1
SIM := build/sim
sim: $(INSTALLED)  ## SEEDS=1000 worlds from FIRST=1 on, simulated with faults in one thread
	@$(BIN)/cmake -S tfdist_ops -B $(SIM) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DTFDIST_TESTS=ON --log-level=WARNING
	@$(BIN)/cmake --build $(SIM) --target sim engine_sim
	@$(SIM)/sim --seeds $(SEEDS) --first $(FIRST)
	@$(SIM)/engine_sim --seeds $(SEEDS) --first $(FIRST)

mutants: $(BUILT)  ## breaks the code line by line: each break must be caught
	@$(BIN)/python tests/mutants/run.py

campaign: $(BUILT)  ## kills, stops, cuts and starves jobs by the hundred (hours, resumable)
	@$(BIN)/python tests/campaign/run.py
	@$(BIN)/python tests/campaign/signals.py
	@$(BIN)/python tests/campaign/elastic.py
	@$(BIN)/python tests/campaign/elastic_hosts.py
	@$(BIN)/python tests/campaign/elastic_resizes.py
	@$(BIN)/python tests/campaign/long_run.py
	@$(BIN)/python tests/campaign/elastic_fit.py
	@$(BIN)/python tests/campaign/checkpoints.py

reproduce: $(BUILT)  ## published claims, tested: build/reproductions/report.html
	@$(BIN)/python recipes/reproductions/run.py

sanitize: $(INSTALLED)  ## the C++ tests under AddressSanitizer, UBSan and ThreadSanitizer
	@$(BIN)/python .ci/sanitize.py

fuzz: $(BUILT)  ## every parser for SECONDS (600) of processor time, under sanitizers
	@$(BIN)/python tests/fuzz/run.py $(SECONDS)

hostile: $(BUILT)  ## 100,000 hostile connections at starting and running jobs
	@$(BIN)/python tests/helpers/hostile.py --connections $(CONNECTIONS)

scale: $(BUILT)  ## start, messages, descriptors and memory for 8 to 256 ranks
	@$(BIN)/python benchmarks/scale.py

peers: $(BUILT)  ## environments of Horovod, MPI, gloo, TensorFlow's ring (half an hour, once)
	@nice $(BIN)/python -m benchmarks.peers.environments

bench: $(BUILT)  ## tfdist beside the peers that are built: the quick set, 5 minutes
	@$(BIN)/python -m benchmarks.peers quick

lint: $(INSTALLED)  ## style, format and types, Python and C++
	$(BIN)/ruff check $(PYTHON_CODE)
	$(BIN)/ruff format --check $(PYTHON_CODE)
	@echo "clang-format --dry-run -Werror, $(words $(CPP)) files"
	@$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy tfdist

format: $(INSTALLED)  ## rewrites the code in the house format
	$(BIN)/ruff check --fix $(PYTHON_CODE)
	$(BIN)/ruff format $(PYTHON_CODE)
	$(BIN)/clang-format -i $(CPP)

docs: $(BUILT)  ## remakes the generated pages, builds the site in build/site; checks all links
	@$(BIN)/python -m tfdist.tools.config_docs
	@cd tests && ../$(BIN)/python -m helpers.horovod_page
	@TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python .ci/argument_docs.py
	@TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python .ci/api_docs.py
	@$(BIN)/python benchmarks/chart.py
	@rm -rf build/site
	@TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/sphinx-build -q -W --keep-going -E -c docs -d build/doctrees . build/site
	@echo "the site: build/site/index.html"

wheel: $(BUILT)  ## dist/: a wheel for TensorFlow 2.16 to 2.21, tried with each (a quarter of an hour, 10 GB)
	@$(BIN)/python .ci/build_wheel.py

gpu:  ## builds the CUDA kernels, checks and measures them (needs nvcc; TensorFlow not)
	@$(firstword $(wildcard $(BIN)/python) python3) benchmarks/gpu_pack.py

xla: $(BUILT)  ## libtfdist_xla.so: jit_compile=True compiles whole steps (a minute, 2 GB; optional)
	@TF_CPP_MIN_LOG_LEVEL=3 nice $(BIN)/python .ci/xla.py

mpi:  ## TFDIST_ENGINE=mpi, for the MPI of MPICC=mpicc (docs/engines.md)
	@command -v $(MPICC) > /dev/null || { echo "$(MPICC) not found: install an MPI, load its module, or set MPICC=/path/to/mpicc" >&2; exit 1; }
	@mkdir -p $(dir $(MPI_LIBRARY))
	$(MPICC) -std=c11 -O2 -Wall -Wextra -fPIC -fvisibility=hidden -shared -I tfdist_ops \
	  -o $(MPI_LIBRARY) tfdist_ops/mpi/mpi_messages.c

clean:  ## removes what was built; .venv stays
	rm -rf build dist *.egg-info tfdist/_native/*.so .venv/.built $(STRICT)
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## removes .venv too
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
