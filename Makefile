# Everything a fresh Debian machine with Python 3.11+ needs is set up here: `make demo`, `make test`, `make lint`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest

.PHONY: demo test test-fast test-lowest lint format check clean

demo: $(STAMP)
	$(BIN)/krex demo

test: $(STAMP)
	$(BIN)/python -m pytest

test-fast: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

# The stated floors of the base dependencies, proved: the oldest versions that pyproject.toml allows.
test-lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python -m pip install --quiet -e ".[test]" $$($(PYTHON) benchmarks/floors.py)
	$(LOWEST)/bin/python -m pytest -m "not slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: format lint test-fast

# Debian splits venv from Python; install it where it is missing and may be installed.
$(STAMP): pyproject.toml
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || { \
	  echo "python3-venv is missing; installing it"; \
	  { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq python3-venv python3-pip; } || \
	  { echo "Install it first: sudo apt-get install python3-venv python3-pip"; exit 1; }; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) $(LOWEST) build dist .mypy_cache .ruff_cache .hypothesis
