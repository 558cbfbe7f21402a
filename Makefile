PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
BUILD   := pyproject.toml constraints.txt hatch_build.py $(wildcard src/spikecal/native/*.cpp src/spikecal/native/*.h)
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# One torch thread per test process: the processes share the cores, and sums come out the same everywhere.
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
CHROMIUM := apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver

.PHONY: demo test check slow browser sanitize peers clean help

demo: $(VENV)/demo.stamp  ## convert a small trained network and show what happened
	$(BIN)/spikecal demo

test: check  ## check, then every test that is not slow
	$(PYTEST)

check: $(VENV)/dev.stamp  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(VENV)/dev.stamp  ## the slow tests only
	$(PYTEST) -m slow

browser: $(VENV)/dev.stamp  ## the report in a real browser, which is installed where that can be done
	$(INSTALL) selenium
	command -v chromedriver > /dev/null || timeout 300 sh -c '$(CHROMIUM)' || echo "no browser could be installed"
	$(PYTEST) -n 0 -m browser -rs

sanitize: $(VENV)/dev.stamp  ## the tests of the native kernels, under AddressSanitizer and UBSan
	$(INSTALL) hatchling
	$(BIN)/python scripts/sanitize.py

peers: $(VENV)/dev.stamp  ## other libraries, for benchmarks/speed.py; none of them brings another torch
	$(INSTALL) --no-deps --requirement benchmarks/peers.txt

clean:  ## remove the environment, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':|## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$NF}' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: $(BUILD) | $(BIN)/python
	$(INSTALL) --editable '.[demo]'
	touch $@

# The dev extra contains the demo extra, so one installation serves both stamps.
$(VENV)/dev.stamp: $(BUILD) | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	touch $(VENV)/demo.stamp $@
