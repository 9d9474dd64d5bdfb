# Everything a fresh Debian machine with Python 3.11+ needs is set up here: `make demo`, `make test`, `make lint`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest
UI_STAMP := $(VENV)/.installed-ui
PANEL := krex_jupyter/labextension/package.json
# jlpm and jupyter-builder, which package.json calls, come with the virtual environment.
JLPM := cd labextension && PATH="$(abspath $(BIN)):$$PATH" jlpm

.PHONY: demo test test-fast test-lowest lint format check ui test-ui pictures clean

demo: $(STAMP)
	$(BIN)/krex demo

test: $(STAMP)
	$(BIN)/python -m pytest --ignore=tests/ui

test-fast: $(STAMP)
	$(BIN)/python -m pytest --ignore=tests/ui -m "not slow"

# The stated floors of the base dependencies, proved: the oldest versions that pyproject.toml allows.
test-lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python -m pip install --quiet -e ".[test]" $$($(PYTHON) benchmarks/floors.py)
	$(LOWEST)/bin/python -m pytest --ignore=tests/ui -m "not slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: format lint test-fast

# The panel of JupyterLab and Notebook 7 (needs Node.js 20), built and copied into .venv; again after a change.
# (A link to it would be followed by pip, which then deletes the build when it uninstalls.)
ui: $(PANEL)
	$(BIN)/python -m pip install --quiet --no-deps -e .

# Types, lint and jest of the panel, then a real browser (Debian: chromium) against a real JupyterLab and Notebook 7.
test-ui: ui
	$(JLPM) lint:check
	$(JLPM) test
	@command -v chromium >/dev/null || { \
	  echo "chromium is missing; installing it"; \
	  { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq chromium; } || \
	  { echo "Install it first: sudo apt-get install chromium"; exit 1; }; }
	KREX_UI_REQUIRED=1 $(BIN)/python -m pytest tests/ui

# Makes docs/images anew.
pictures: ui
	$(BIN)/python -m tests.ui.pictures

$(PANEL): $(UI_STAMP) labextension/package.json labextension/yarn.lock $(wildcard labextension/src/*.ts labextension/src/views/* labextension/style/* labextension/schema/*)
	$(JLPM) install --immutable
	$(JLPM) build:prod

$(UI_STAMP): $(STAMP)
	@command -v node >/dev/null || { echo "The panel needs Node.js 20 or newer (node, in PATH)."; exit 1; }
	PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD=1 $(BIN)/python -m pip install --quiet -e ".[dev,ui]"
	@touch $(UI_STAMP)

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
	rm -rf $(VENV) $(LOWEST) krex_jupyter/labextension labextension/lib labextension/node_modules build dist .mypy_cache .ruff_cache .hypothesis
