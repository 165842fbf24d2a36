# make race: six optimizers on handwritten digits, with a table, pictures and a report.
# make test: everything that must hold. make test-fast: most of it, in about two minutes.
# make wheels, make sanitize: the released package and the native core, tried apart from the source tree's own tests.
# Each target installs what it needs into .venv; a second call finds it there.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# The native core is built with the package. Without a compiler the package installs without it; with one, what does
# not compile is an error.
NATIVE := CMakeLists.txt tools/editable/CMakeLists.txt $(wildcard src/thalweg/kernels/cpu/native/*)
EDITABLE := $(PIP) $(if $(shell command -v $(CXX)),--config-settings wheel.cmake=true) --editable

.PHONY: race test test-fast test-environments wheels sanitize format clean

race: .venv/ready-to-race
	$(BIN)/thalweg race

test: .venv/ready-to-test
	$(BIN)/python tools/check.py

test-fast: .venv/ready-to-test
	$(BIN)/python tools/check.py --fast

# The package with nothing but numpy, with torch, jax or the command line alone: "optional" stays true.
test-environments: .venv/ready-to-test
	$(BIN)/python tools/environments.py

# The sdist and the wheels: what is in them, and that they work, with a compiler and without.
wheels: .venv/ready-to-test
	$(BIN)/python tools/wheels.py

# The tests of the native core under the address and undefined-behaviour sanitizers.
sanitize: .venv/ready-to-test
	$(BIN)/python tools/sanitize.py

format: .venv/ready-to-test
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .envs report build dist
	rm -f src/thalweg/kernels/cpu/_core.*
	find tools/editable -mindepth 1 ! -name CMakeLists.txt -delete

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/ready-to-race: .venv/bin/python pyproject.toml constraints.txt $(NATIVE)
	$(EDITABLE) ".[cli]"
	touch $@

.venv/ready-to-test: .venv/bin/python pyproject.toml constraints.txt tests/peers.txt tests/peers-need.txt $(NATIVE)
	$(PIP) torch
	$(EDITABLE) ".[dev]" --requirement tests/peers-need.txt
	$(PIP) --no-deps --requirement tests/peers.txt
	touch $@
