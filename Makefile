# The verbs of this project. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt setup.py $(wildcard compiled/* compiled/native/*) src/envfleet/native/envfleet_env.h

.DEFAULT_GOAL := help
MINUTES ?= 10
JOBS    ?= 2
# Tests that kill, time out and count what is left on the machine: they run by themselves, after the others.
ALONE   := tests/faults tests/e2e tests/ray
PYTEST  := $(BIN)/python -m pytest
SHORT   := -m "not full and not learning"
# Some tests have deadlines that a busy machine misses. What failed runs once more, one test at a time; what fails again has failed.
AGAIN    = echo "once more, one at a time:" && $(PYTEST) $(SHORT) --last-failed --last-failed-no-failures none $(1)
.PHONY: help setup demo sanitize chaos test test-full test-learning test-ray test-versions check format docs docs-serve bench bench-peers clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/.dev ## make .venv with everything the tests need (done by the other verbs by themselves)

# Three stamps in one environment: the core, what the demo needs, what the tests need.
$(VENV)/.core: $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "envfleet needs Python 3.11 or newer: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up .venv: the core and the command line"
	@$(PIP) install -q -c constraints.txt -e '.[cli]'
	@touch $@

# torch first and by itself: resolved together with the rest, some of its dependants make pip look at other versions of it.
$(VENV)/.train: $(VENV)/.core
	@echo "setting up .venv: training (PyTorch)"
	@$(PIP) install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(PIP) install -q -c constraints.txt -e '.[cli,train,classic,video,remote,datasets]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@echo "setting up .venv: everything the tests need (some 1.8 GB, a few minutes)"
	@$(PIP) install -q -c constraints.txt -e '.[dev]'
	@$(PIP) download -q --no-deps --no-binary stable-baselines3 -d .envs/sdists "$$(grep '^stable_baselines3==' constraints.txt)" \
	  || echo "no source distribution of Stable-Baselines3: its own tests (tests/peers) will be skipped"
	@$(BIN)/python -m tests.support.official_servers
	@touch $@

demo: $(VENV)/.train ## a tour in under a minute, with a page of pictures at the end
	@$(BIN)/envfleet demo --out runs/demo

test: check ## lint, types and every test but the long ones; says what was skipped and why: make test [JOBS=2]
	$(PYTEST) -n $(JOBS) --dist loadfile $(SHORT) $(ALONE:%=--ignore=%) || { [ $$? = 1 ] && $(call AGAIN,$(ALONE:%=--ignore=%)); }
	$(PYTEST) $(SHORT) $(ALONE) || { [ $$? = 1 ] && $(call AGAIN,$(ALONE)); }

test-full: check ## the same with the full counts, one test at a time
	@$(BIN)/python -m tests.support.official_servers all
	$(PYTEST) --full -m "not learning"

test-learning: $(VENV)/.dev ## the learning gates
	$(BIN)/python -m pytest -m learning

# RLlib's tests run in a venv of their own: it pins an older Gymnasium than ours. One test at a time: they start clusters.
RAY_PYTHON := $(or $(ENVFLEET_TEST_VENVS),.envs)/rllib/bin/python
test-ray: $(VENV)/.dev ## Ray with the full counts, and RLlib in a venv of its own (some 1.8 GB, made at the first call)
	$(PYTEST) --full tests/ray
	$(BIN)/python -m tests.support.rllib_venv
	PYTHONPATH=src:. $(RAY_PYTHON) -m pytest tests/ray -k rllib

test-versions: ## wheel, install and core tests on every Python of the classifiers, and on the lowest dependencies: [ONLY=3.12]
	$(PYTHON) tools/test_versions.py $(ONLY)

chaos: $(VENV)/.dev ## random fleets under attack, every row checked against a model: make chaos MINUTES=10 [SEED=1]
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

check: $(VENV)/.dev ## ruff (lint and format), mypy --strict, and src/ within its line budget
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tools/line_budget.py

format: $(VENV)/.dev ## let ruff write the format it wants
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.dev ## write docs/api.md anew from the docstrings, and build the documentation site: build/site/index.html
	$(BIN)/python docs/make_api.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

docs-serve: docs ## the site on http://127.0.0.1:8080, built again whenever a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8080

bench: $(VENV)/.dev ## ours, the limit and the peers in one run; writes docs/performance.md (some 20 minutes, quiet machine)
	$(BIN)/python -m bench

bench-peers: $(VENV)/.dev ## venvs for the peers that clash with our pins; `make bench` then measures them too
	$(BIN)/python -m bench.peers.install

clean: ## remove .venv, the venvs of the peers, and everything built
	rm -rf $(VENV) .envs build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis MUJOCO_LOG.TXT
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete

# It crashes on purpose, and the sanitizer ends a process that crashes in its own way.
CRASHES = --deselect tests/native/test_user_libraries.py::test_a_library_that_crashes_is_isolated_by_processes
sanitize: $(VENV)/.dev ## the compiled core under address and undefined-behaviour sanitizers, with its tests
	rm -rf build/sanitize && mkdir -p build/sanitize && cp -r src/envfleet build/sanitize/ && rm -f build/sanitize/envfleet/*.so
	ENVFLEET_BUILD=sanitize $(BIN)/python setup.py -q build_ext --force --build-lib build/sanitize --build-temp build/sanitize-tmp
	ENVFLEET_BUILD=sanitize LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=halt_on_error=1 PYTHONPATH=build/sanitize PYTHONMALLOC=malloc \
	  $(BIN)/python -m pytest -q -p no:cacheprovider tests/compiled tests/native tests/envs tests/conformance \
	  tests/faults/test_thread_rings.py -m "not full" -k "serial or shm or thread or aio or compiled or native" $(CRASHES)
