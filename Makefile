# make race: all optimizers on handwritten digits, with a table and a report.
# make test: what a change can break, in eight minutes on two cores. make test-fast: most of it, in two.
# make docs: the docs as a site, in build/site. make test-all: more examples, faults that tests find, and every environment.
# make release-checks: that, and all about the released package.
# Each target installs what it needs into .venv; a second call finds it there.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Most of what is installed is never imported: what is, Python compiles when it is.
UNCOMPILED := --no-compile

# The native core is built with the package, for the vectors of this machine; a wheel has those of all machines, and
# `make wheel` tests them. Without a compiler the package installs without the core; with one, what does not compile is
# an error.
NATIVE := CMakeLists.txt tools/editable/CMakeLists.txt \
	$(wildcard src/thalweg/kernels/cpu/native/* src/thalweg/kernels/cpu/*.py src/thalweg/programs/*.py src/thalweg/rules/*.py)
EDITABLE := $(PIP) $(if $(shell command -v $(CXX)),--config-settings wheel.cmake=true) --editable

.PHONY: race test test-fast test-all test-environments test-integrations wheel sanitize release-checks docs format clean

# What is installed for tests serves the race too. Else a core of few options is built, for this machine alone.
race: $(if $(wildcard .venv/ready-to-test),.venv/ready-to-test,.venv/ready-to-race)
	$(BIN)/thalweg race

test: .venv/ready-to-test
	$(BIN)/python tools/check.py

test-fast: .venv/ready-to-test
	$(BIN)/python tools/check.py --fast

# For the night, and before a release. Forty faults are made, one at a time, and some test has to find each.
test-all: .venv/ready-to-test
	$(BIN)/python tools/check.py --all
	rm -rf build/faults
	$(BIN)/python tools/faults.py --sample 40 --baseline build/faults/green.jsonl --record build/faults/bank.jsonl
	$(BIN)/python tools/environments.py

# The package with nothing but numpy, with torch, jax or the command line alone: "optional" stays true.
# make test-environments ENVIRONMENTS=numpy tries that one.
test-environments: .venv/ready-to-test
	$(BIN)/python tools/environments.py $(ENVIRONMENTS)

# Adapters and recipes beside the real packages of trainers: transformers, accelerate, lightning, timm, ...
test-integrations: .venv/ready-to-test
	$(BIN)/python tools/environments.py integrations

# The sdist and the wheel of this tree: what is in them, and that every optimizer steps, with a compiler and without.
wheel: .venv/ready-to-test
	$(BIN)/python tools/environments.py wheel sdist

# The tests of the native core under GCC's address and undefined-behaviour sanitizers. They must be in the process before
# Python is, and the address sanitizer looks for exceptions of libstdc++ when it starts. Python itself does not free
# everything at exit, and its allocator would hand out parts of blocks whose ends no sanitizer sees.
SANITIZED := build/sanitize/core/_core.so
SANITIZE := --config-setting=wheel.cmake=true --config-setting=install.strip=false \
	--config-setting=build-dir=build/sanitize/core --config-setting=cmake.build-type=Debug \
	"--config-setting=cmake.define.CMAKE_CXX_FLAGS_DEBUG=-fsanitize=address,undefined -fno-sanitize-recover=all -O1 -g"
UNDER = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 THALWEG_CPU_LIBRARY=$(SANITIZED) $(BIN)/python
sanitize: .venv/ready-to-test
	CXX=$(CXX) $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/sanitize $(SANITIZE) .
	nm --dynamic --undefined-only $(SANITIZED) | grep --quiet __asan_report
	$(UNDER) -c "from thalweg.kernels.cpu import library; library.load()"
	$(UNDER) -m pytest --quiet --capture=sys -p no:cacheprovider tests/kernels

# The docs as a site, in build/site. A broken link is an error.
docs: .envs/docs/ready
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src:tools .envs/docs/bin/python -m mkdocs build --strict

release-checks: test-all test-integrations wheel sanitize race docs

format: .venv/ready-to-test
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .envs report build dist
	rm -f src/thalweg/kernels/cpu/_core.*
	find tools/editable -mindepth 1 ! -name CMakeLists.txt -delete

.envs/docs/ready: tools/pages.txt
	$(PYTHON) -m venv .envs/docs
	.envs/docs/bin/python -m pip --disable-pip-version-check install --quiet --requirement tools/pages.txt
	touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/ready-to-race: .venv/bin/python pyproject.toml constraints.txt $(NATIVE)
	THALWEG_QUICK=1 $(EDITABLE) ".[cli]" $(UNCOMPILED)
	touch $@

# The core is compiled while what is large is installed.
.venv/ready-to-test: .venv/bin/python pyproject.toml constraints.txt tests/peers.txt tests/peers-need.txt $(NATIVE)
	THALWEG_OWN_LEVEL=1 $(EDITABLE) . --no-deps & core=$$!; \
	$(PIP) $(UNCOMPILED) torch && \
	$(PIP) $(UNCOMPILED) jax mypy plotly --requirement tests/peers-need.txt && \
	$(PIP) $(UNCOMPILED) --no-deps --requirement tests/peers.txt; others=$$?; \
	wait $$core && exit $$others
	$(PIP) $(UNCOMPILED) "thalweg[dev]"
	touch $@
