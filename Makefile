# One command for each task. Everything is installed in .venv; nothing outside this folder changes.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup setup-light hooks quickstart test components properties lint types format check docs locks packages benchmarks slurm slurm-stop clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

setup: .venv/.ready  ## Create .venv with everything: profiler, tests, linters

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[profiler,dev]'
	@touch $@

setup-light: .venv-light/.ready  ## Create .venv-light for changes of formulas: default tests and linters, without torch, Ray or browser

.venv-light/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-light
	.venv-light/bin/pip install --quiet --editable '.[light]'
	@touch $@

hooks:  ## Check each commit with ruff, mypy and the form of its subject
	scripts/venv.sh pre-commit install --hook-type pre-commit --hook-type commit-msg

quickstart: setup  ## Run a real search on this machine
	$(BIN)/hp-tool tune examples/quickstart.yaml

test: setup  ## Run the default tests: units, properties, contracts, each interface once
	$(BIN)/python -m pytest -n auto

components: setup  ## Run the tests with real components; tests whose component is missing are skipped
	$(BIN)/python -m pytest -n 3 -m components

properties: setup  ## Run the property tests with four times as many examples, before a release
	$(BIN)/python -m pytest -n auto -m hypothesis --hypothesis-profile=thorough

lint: setup  ## Check style and common mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## Check types strictly
	$(BIN)/mypy

format: setup  ## Fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test components  ## Run all checks of a change

docs: setup  ## Build the documentation site in site/; warnings are errors
	$(BIN)/mkdocs build --strict

locks:  ## Update the lock files in requirements/ (needs uv)
	scripts/lock.sh

packages: setup  ## Check the version and build wheel and source distribution in dist/
	$(BIN)/python scripts/release_check.py
	$(BIN)/hatchling build

benchmarks: setup  ## Measure speed on this machine, and accuracy on the rows of evidence/
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.accuracy

SLURM_DIR ?= /tmp/hp-slurm

slurm:  ## Install and start a Slurm with two virtual nodes on this host (Debian, root); slurm-stop ends it
	scripts/slurm-cluster.sh install
	scripts/slurm-cluster.sh start $(SLURM_DIR)
	@echo "export SLURM_CONF=$(SLURM_DIR)/slurm.conf HP_SLURM_CONFIG=examples/slurm-cluster.yaml"

slurm-stop:
	scripts/slurm-cluster.sh stop $(SLURM_DIR)

clean:  ## Remove .venv and caches
	rm -rf .venv .venv-light .mypy_cache .ruff_cache .pytest_cache .hypothesis
