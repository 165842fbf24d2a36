# make race: the six optimizers on handwritten digits, with a table and a picture.
# make test: everything that must hold. make test-fast: most of it, in under a minute.
# Each target installs what it needs into .venv; a second call finds it there.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: race test test-fast test-environments format clean

race: .venv/ready-to-race
	$(BIN)/python -m thalweg.race

test: .venv/ready-to-test
	$(BIN)/python tools/check.py

test-fast: .venv/ready-to-test
	$(BIN)/python tools/check.py --fast

# The package with nothing but numpy, with torch alone, and with jax alone: "optional" stays true.
test-environments: .venv/ready-to-test
	$(BIN)/python tools/environments.py

format: .venv/ready-to-test
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .envs report

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/ready-to-race: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable ".[cli]"
	touch $@

.venv/ready-to-test: .venv/bin/python pyproject.toml constraints.txt tests/peers.txt tests/peers-need.txt
	$(PIP) torch
	$(PIP) --editable ".[dev]" --requirement tests/peers-need.txt
	$(PIP) --no-deps --requirement tests/peers.txt
	touch $@
