# make lab        open the Lab in the browser
# make demo       train on MNIST, evaluate, write runs/demo/report.html
# make docs       build the documentation in site/, with the Lab under lab/
# make test       lint, type-check and run the tests
# make test-slow  also run the tests that take minutes
# make setup      only create the environment, .venv
# make chromium   install the browser that tests the Lab, if it is missing
# make postgresql install the database that tests a search on many machines, if it is missing
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := src tests tools research
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: setup lab demo docs test test-slow lint chromium postgresql clean
setup: $(STAMP)

# install torch first: alone, it resolves to the build for this platform
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

docs: setup
	@$(BIN)/capsnet lab --export build/lab || \
	  { test $$? = 2 && rm -rf build/lab && echo "the documentation is built without the Lab under lab/"; }
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

# needs root and apt-get; without them, the tests of the page say what to do
chromium:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { test "$$(id -u)" = 0 && command -v apt-get && apt-get update && apt-get install -y chromium; } || \
	  echo "Chromium is missing and cannot be installed here: the tests of the Lab's page will fail"

# needs root and apt-get as well
postgresql:
	@command -v initdb || ls /usr/lib/postgresql/*/bin/initdb 2>/dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get && apt-get update && apt-get install -y postgresql; } || \
	  echo "PostgreSQL is missing and cannot be installed here: the tests of a search on many machines will fail"

# one thread per worker, because more threads than cores are slow; files in their own order, the longest first
test: lint chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-slow: lint chromium postgresql
	$(BIN)/python -m pytest -m "slow or not slow"

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
