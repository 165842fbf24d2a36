# make race: all optimizers on handwritten digits, with a table and a report.
# make test: what a change can break, in ten minutes on two cores. make test-fast: most of it, in two.
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
.PHONY: built inside in-numpy in-torch in-jax in-cli in-integrations in-wheel in-sdist
.PHONY: tests-by-day tests-fast tests-all checks checks-with-docs style sizes types imports pages

# What is installed for tests serves the race too. Else a core of few options is built, for this machine alone.
race: $(if $(wildcard .venv/ready-to-test),.venv/ready-to-test,.venv/ready-to-race)
	$(BIN)/thalweg race

# One thread each: tests run side by side, and small matrices gain nothing from more. Compiled Python is kept, whatever
# the machine is used to: dozens of processes import the package.
ALONE := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# jax compiles what is run once without optimization, by a code generator that takes a seventh of the time, and not in
# parallel; and Triton's interpreter does not look for overflows of integers. In test-all both are as users have them.
SOON := $(ALONE) THALWEG_TESTS_SOON=1 XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
	--xla_cpu_parallel_codegen_split_count=1"
# What compilers make for rules and programs, under names that say what of, serves all processes and the next calls.
KEPT := $(CURDIR)/build/tests
# A limit of jax's for its size would cost more than it saves: each new program would be compared with all others.
SOON += THALWEG_CACHE=$(KEPT)/native JAX_COMPILATION_CACHE_DIR=$(KEPT)/jax \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
FORGET := find $(KEPT) -type f -mtime +14 -delete 2>/dev/null; true
PYTEST := $(BIN)/python -m pytest --quiet --dist worksteal --numprocesses $(shell getconf _NPROCESSORS_ONLN)
# What examples are drawn by: the commit's hash, or 0 in an sdist, which has no commit.
SEED = $(or $(shell git -c safe.directory='*' rev-parse HEAD 2>/dev/null),0)
# The checks beside the tests: all are run, and make names those that fail.
TOGETHER := --no-print-directory --keep-going --jobs=2

test: .venv/ready-to-test
	$(MAKE) $(TOGETHER) tests-by-day checks-with-docs

test-fast: .venv/ready-to-test
	$(MAKE) $(TOGETHER) tests-fast checks

# For the night, and before a release. Forty faults are made, one at a time, and some test has to find each.
test-all: .venv/ready-to-test
	$(MAKE) $(TOGETHER) SOON='$(ALONE)' tests-all checks-with-docs
	rm -rf build/faults
	$(SOON) $(BIN)/python tools/faults.py build/faults/green.jsonl build/faults/bank.jsonl 40
	$(MAKE) test-environments

tests-by-day:
	$(FORGET)
	$(SOON) $(PYTEST) --hypothesis-profile=day --hypothesis-seed=$(SEED) -m "not gpu" tests
tests-fast:
	$(SOON) $(PYTEST) --hypothesis-profile=few --hypothesis-seed=$(SEED) -m "not slow and not gpu" tests
tests-all:
	$(ALONE) $(PYTEST) --hypothesis-profile=all -m "not gpu" tests
	$(SOON) THALWEG_TORCH_PRIVATE=0 $(PYTEST) --hypothesis-profile=few -m "not gpu" -k "not strided and not FSDP2-False" \
		tests/torch tests/sharded

checks: style sizes types imports
checks-with-docs: checks pages
style:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
sizes:
	$(BIN)/python tools/size.py
types:
	$(BIN)/mypy --strict
imports:
	$(BIN)/lint-imports
# Those of a page follow from one another: in one process.
pages:
	$(SOON) $(BIN)/python -m pytest --quiet README.md CONTRIBUTING.md docs src

# The package as users install it: its sdist and wheel, in environments of their own under .envs. With nothing but
# numpy, with torch, jax or the command line alone, "optional" stays true. Each step of every optimizer: of the wheel
# beside numpy alone, of the sdist without a compiler, which pip tells.
# make test-environments ENVIRONMENTS=numpy tries that one.
ENVIRONMENTS := numpy torch jax cli
DIST := .envs/dist
ALONE_IN = .envs/$*/bin/python
INTO = $(ALONE_IN) -m pip --disable-pip-version-check install --constraint constraints.txt
ABSENT = $(ALONE_IN) -c "import importlib.util as u, sys; sys.exit(' '.join(filter(u.find_spec, sys.argv[1:])) or None)"
TESTS_IN = $(ALONE) $(ALONE_IN) -m pytest -q -p no:cacheprovider -n $(shell getconf _NPROCESSORS_ONLN) -m "not gpu"

test-environments: built
	$(MAKE) $(ENVIRONMENTS:%=in-%)
built: .venv/ready-to-test
	rm -rf $(DIST)
	$(BIN)/python -m build --config-setting=wheel.cmake=true --outdir $(DIST) .

in-numpy: NOT_THERE := torch jax ml_dtypes click matplotlib safetensors
in-torch: NOT_THERE := jax ml_dtypes
in-torch in-integrations: FIRST := torch
in-jax: NOT_THERE := torch
in-cli: NOT_THERE := torch jax ml_dtypes
in-numpy in-torch in-jax: TRIED := tests
in-cli: TRIED := tests/race tests/plan tests/show
in-numpy in-torch in-jax in-cli: in-%:
	$(PYTHON) -m venv .envs/$*
	$(INTO) pytest pytest-xdist $(FIRST)
	$(INTO) "$$(echo $(DIST)/*.whl)$(if $(filter-out numpy,$*),[$*])"
	$(INTO) --force-reinstall --no-deps $(DIST)/*.whl # that of an earlier call has the same version
	$(ABSENT) $(NOT_THERE)
	$(TESTS_IN) $(TRIED)

# Adapters and recipes beside the real packages of trainers: transformers, accelerate, lightning, timm, ... They warn of
# one another; what thalweg warns of is an error among them too. Examples of a page follow from one another.
test-integrations: built
	$(MAKE) in-integrations
in-integrations: TESTS_IN += --dist loadfile -W default -W error::thalweg.UnusedOverrideWarning \
	-W error::thalweg.ResumeWarning
in-integrations: in-%:
	$(PYTHON) -m venv .envs/$*
	$(INTO) pytest pytest-xdist $(FIRST)
	$(INTO) "$$(echo $(DIST)/*.whl)[all]" hypothesis sybil --requirement tests/integrations/packages.txt
	$(INTO) --no-deps --requirement tests/integrations/packages-alone.txt
	$(INTO) --force-reinstall --no-deps $(DIST)/*.whl
	THALWEG_INTEGRATIONS=required HF_HUB_OFFLINE=1 $(TESTS_IN) tests/integrations
	THALWEG_INTEGRATIONS=required HF_HUB_OFFLINE=1 $(TESTS_IN) docs/recipes

wheel: built
	$(MAKE) in-wheel in-sdist
# What is in both, and the native core at every vector level: the one that other tests have is built for one of them.
in-wheel: inside
inside:
	$(BIN)/python tools/inside.py $(DIST)
	$(ALONE) THALWEG_CPU_LIBRARY=$(CURDIR)/$$(echo $(DIST)/_core.*) $(PYTEST) -m "not gpu" \
		$(patsubst %,tests/kernels/test_%.py,same_bits conversions stochastic_rounding)
in-wheel in-sdist: in-%:
	rm -rf .envs/$*
	$(PYTHON) -m venv .envs/$*
	$(INTO) numpy
	$(INSTALL)
	$(ABSENT) torch jax pytest
	$(ALONE_IN) -I tools/smoke.py $(KIND)
in-wheel: INSTALL = $(INTO) $(DIST)/*.whl
in-wheel: KIND := native
# neither a compiler nor CMake nor Ninja, which come from PyPI
in-sdist: INSTALL = PATH=$(CURDIR)/.envs/$*/bin CC= CXX= $(INTO) --verbose $(DIST)/*.tar.gz \
	2>&1 | $(shell command -v grep) "WITHOUT its native CPU core"
in-sdist: KIND := pure

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
