# make train: from a fresh clone to a trained GPT.   make test: lint and all tests.   make soak: a hundred faults.
# PYTHON chooses the interpreter of the virtual environment; ARGS are overrides: make train ARGS="train.steps=100".
PYTHON ?= python3
VENV := .venv

.PHONY: train test soak lint format clean

train: $(VENV)/installed
	$(VENV)/bin/python train.py $(ARGS)

test: lint
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/shellcheck -x scripts/slurm/*.sh

soak: $(VENV)/installed
	$(VENV)/bin/python -m tests.soak $(ARGS)

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

clean:
	rm -rf $(VENV) .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
