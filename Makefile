# make lab        set up, open the Lab in the browser
# make demo       set up, train on MNIST, test, write runs/demo/report.html
# make test       set up, lint, types and every test
# make test-slow  also what takes minutes: presets held to their promise
# make setup      .venv/bin/capsnet and nothing else
# make chromium   the browser that the Lab's page is tested in, where it is missing
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: setup lab demo test test-slow lint chromium clean
setup: $(STAMP)

# torch first and exact: on its own it resolves to the build that suits this platform
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "capsnet needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (a minute or two, once)"
	@$(PIP) install --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

lab: setup
	@$(BIN)/capsnet lab

demo: setup
	@$(BIN)/capsnet demo

lint: setup
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

# needs root and apt-get; where neither is, the tests of the page say what to do
chromium:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { test "$$(id -u)" = 0 && command -v apt-get && apt-get update && apt-get install -y chromium; } || \
	  echo "there is no Chromium and it cannot be installed from here: the tests of the Lab's page will fail"

# one thread for each worker: threads that wait for each other are slow where cores are shared with others
test: lint chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-slow: lint chromium
	$(BIN)/python -m pytest -m "slow or not slow"

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
