# make train: train a small Llama from a fresh clone. make test: lint and all tests. make test-fast: under a minute.
# PYTHON selects the interpreter of .venv; ARGS are passed on: make train ARGS="train.steps=100".
PYTHON ?= python3
VENV := .venv
DOCS_VENV := .venv-docs

# What pip installs into .venv: the pinned releases, or the newest ones with INSTALL=".[dev]".
INSTALL ?= -r requirements.txt

# Processes of pytest. Each begins with consecutive tests, and takes tests of another one when it has run its own.
WORKERS ?= 3
# pytest, with the type checker next to it.
PYTEST = $(VENV)/bin/python -m mypy & types=$$!; trap "kill $$types 2> /dev/null" EXIT INT; \
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS) $(1); tests=$$?; \
	wait $$types && exit $$tests

.PHONY: train test test-fast test-full lint style soak gpu-check docs format clean

train: $(VENV)/installed
	$(VENV)/bin/python train.py $(ARGS)

test: style
	@$(call PYTEST)

# Tests that start neither ranks nor other processes.
test-fast: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m "not ranks and not slow and not full and not gpu" $(ARGS)

# All tests, with the full products of options that `make test` samples.
test-full: style
	@$(call PYTEST,-m "not gpu")

lint: style
	$(VENV)/bin/python -m mypy

# `make lint` without the type checker.
style: $(VENV)/installed
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m codespell_lib
	$(VENV)/bin/shellcheck -x scripts/*.sh scripts/*/*.sh containers/*.sh .ci/run
	$(VENV)/bin/hadolint containers/Dockerfile

# Faults in runs on ten plans, whose losses must not change. A fault takes about five seconds.
FAULTS ?= 100
soak: $(VENV)/installed
	$(VENV)/bin/python -m tests.soak faults=$(FAULTS) $(ARGS)

# Results, speed and failures on a machine with a GPU: tests/gpu, one at a time, in three parts of eight minutes.
DEVICE ?= cuda
gpu-check: $(VENV)/installed
	$(VENV)/bin/python -m pytest -vv --no-header -m gpu tests/gpu --device=$(DEVICE) $(ARGS)

# The pages and the API reference in build/site. A link that leads nowhere or a wrong docstring is an error.
docs: $(DOCS_VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet --strict
	@echo "build/site/index.html"

format: $(VENV)/installed
	$(VENV)/bin/python -m ruff check --fix .
	$(VENV)/bin/python -m ruff format .

$(VENV)/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: gpt4d needs Python 3.11 or newer, %s is %s; use make PYTHON=python3.11" % (sys.executable, sys.version.split()[0]))'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(INSTALL)
	touch $@

$(DOCS_VENV)/installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) .ruff_cache .mypy_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
