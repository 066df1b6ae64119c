# Everything from a bare Python 3.11: `make demo` and `make test` need no other step.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check

# One thread per task: another number of threads gives other bits.
export OMP_NUM_THREADS := 1

.PHONY: help demo test lint format venv integration-hdfs clean

help:
	@echo "make demo      train eight models over a Spark DataFrame and replay every one of them"
	@echo "make test      all tests"
	@echo "make lint      ruff check, ruff format --check, mypy"
	@echo "make format    let ruff rewrite what it can"
	@echo "make integration-hdfs   a real HDFS on this machine, see integration/hdfs"
	@echo "make venv      only the environment, in $(VENV)"
	@echo "make clean     remove the environment and everything generated"

demo: $(STAMP)
	@$(BIN)/cerebro-hydra demo

test: $(STAMP)
	@$(BIN)/python -m pytest

lint: $(STAMP)
	@echo "ruff check" && $(BIN)/ruff check .
	@echo "ruff format --check" && $(BIN)/ruff format --check .
	@echo "mypy" && $(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

venv: $(STAMP)
	@echo "The environment in $(VENV) is ready."

# The package is installed by link, so that only a change of the pins needs a new installation.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null || { \
	  echo "$(PYTHON) is not a Python 3.11 or 3.12. Install Python 3.11, or name yours: make PYTHON=/path/to/python3.11 ..."; \
	  exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) can't make a virtual environment. On Debian and Ubuntu: apt install python3.11-venv"; \
	  rm -rf $(VENV); exit 1; }
	@echo "Installing the pinned packages into $(VENV); the first time this takes some minutes."
	@$(PIP) -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

integration-hdfs: $(STAMP)
	@$(BIN)/python -m integration.hdfs.jars
	@$(BIN)/python -m pytest integration/hdfs

clean:
	rm -rf $(VENV) build dist *.egg-info spark-warehouse metastore_db derby.log
	rm -rf integration/hdfs/.jars .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
