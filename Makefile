# make run   answer a question with the default model
# make test  everything that has to hold before a change lands; `make slow` adds what takes long
# make soak  starts and ends child processes a thousand times; in no CI
#
# Both make .venv at the first call. PIP_FLAGS goes to pip, PROMPT to the model.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_FLAGS ?=
PROMPT ?= What is the capital of Japan?
# Test files run side by side, each as a whole, since its tests share models and servers; of the slow ones,
# a worker that has no more takes half of what another one has left.
SIDE_BY_SIDE := -n auto --maxprocesses 4
CHECKED := piecework tests tools benchmarks
# Tests start many processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test slow soak lint format clean

help:
	@sed -n 's/^# \?//p;/^$$/q' Makefile

run: $(VENV)/.installed
	@$(BIN)/piecework pull
	@$(BIN)/piecework generate --chat --temperature 0 --prompt "$(PROMPT)"

test: lint
	$(BIN)/pytest $(SIDE_BY_SIDE) --dist loadfile

slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m "slow and not gpu and not npu" --timeout 1500 $(SIDE_BY_SIDE) --dist worksteal

soak: $(VENV)/.installed-dev
	$(BIN)/pytest -m "soak and not gpu and not npu" --timeout 3600

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/interrogate piecework

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps make a second call start at once; a change of the dependencies installs again.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV); the first time takes a few minutes"
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV), with the tools of developers; the first time takes a few minutes"
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable ".[dev]"
	@touch $(VENV)/.installed $@
