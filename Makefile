# make demo and make test each set up their own environment on a fresh clone: they need only
# Python 3.11 or newer, a C++ compiler and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD_INPUTS := pyproject.toml constraints.txt $(wildcard qrnn_serve/kernels/csrc/*)

.PHONY: demo test check format unit clean help

help: ## Say what each target does
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: $(VENV)/.ready-demo ## Train on real speech data, export, serve and score; about a minute
	$(BIN)/python examples/japanese_vowels/demo.py

test: check unit ## Format, lint, types, import rules and every test that needs no GPU

check: $(VENV)/.ready-dev ## Format, lint, types, import rules, fresh stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	PYTHONPATH=export:clients:protos $(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check

# The tests of a file share what they export, so they stay in one process.
unit: $(VENV)/.ready-dev ## The tests alone, in a process for each core
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile

format: $(VENV)/.ready-dev ## Rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build demo_output .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# A stamp for each set of extras; it is renewed when the C++ sources or the dependencies change.
$(VENV)/.ready-%: $(BUILD_INPUTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "qrnn-serve needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
