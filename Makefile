# Everything runs in .venv, which the first command makes.  Variables (see tools/bootstrap.py):
#   TORCH_PATCHES_PYTHON   an interpreter or virtual environment to use instead of .venv
#   TORCH_INDEX_URL        where torch comes from, e.g. https://download.pytorch.org/whl/cpu
#   PYTEST_ARGS            further arguments for pytest
#   MATRIX_ARGS            arguments of tools/test_matrix.py, for make test-matrix

.DEFAULT_GOAL := help
.PHONY: help demo test test-browser test-matrix lint unit environment clean

# The interpreter that starts the bootstrap; any Python 3.8 or newer reads its messages.
BOOTSTRAP_PYTHON ?= python3
CHOSEN := $(or $(TORCH_PATCHES_PYTHON),.venv)
PYTHON := $(if $(wildcard $(CHOSEN)/.),$(CHOSEN)/bin/python,$(if $(filter .venv,$(CHOSEN)),.venv/bin/python,$(CHOSEN)))

help:
	@echo "make demo    train a small model on two CPU processes, with and without bucketing"
	@echo "make test    lint, types and all tests"
	@echo "make lint    lint and types only"
	@echo "make test-browser  the report page in Chromium (needs chromium, chromedriver and selenium)"
	@echo "make test-matrix   all tests on each supported torch (gigabytes; see tools/test_matrix.py)"
	@echo "make clean   remove .venv, caches and reports"

demo: environment
	$(PYTHON) tools/demo.py

test: lint unit

lint: environment
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# A file's tests stay in one worker, so that what a module sets up once is set up once; the longest
# files come first (test/conftest.py).
unit: environment
	$(PYTHON) -m pytest -x -n 2 --dist loadfile --no-loadscope-reorder --durations=30 $(PYTEST_ARGS)

# Needs a browser, so it is apart from the others.
test-browser: environment
	$(PYTHON) -m pytest $(PYTEST_ARGS) test/browser

test-matrix:
	$(BOOTSTRAP_PYTHON) tools/test_matrix.py $(MATRIX_ARGS)

environment:
	@$(BOOTSTRAP_PYTHON) tools/bootstrap.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_report.json demo_timeline.svg
