# Everything runs inside .venv, which is made on first use with the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
WORKERS ?= 2
SELECT ?= not gpu and not slow and not hub
# The tests run in parallel processes, so each stays on one thread.
ONE_THREAD := OMP_NUM_THREADS=1

.PHONY: demo test lint format readme evidence clean

demo: $(VENV)/.installed
	$(BIN)/replayeval kl --model builtin:gdn --precision nvfp4 --docs 4 --lengths 512,2K

test: lint
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) -m "$(SELECT)"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Runs the commands in README.md and puts their present output there.
readme: $(VENV)/.installed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python docs/make_readme.py

# Measures the built-in models at length, for hours on two CPU cores; what was measured before is kept in build/evidence.
evidence: $(VENV)/.installed
	$(BIN)/python docs/make_evidence.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[dev,train]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find kernels replayeval tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
