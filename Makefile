# make help lists the targets. Everything lives in .venv and in $OCTAVO_CACHE (default ~/.cache/octavo).
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python -P
OLDEST := $(VENV)/oldest-transformers

export OCTAVO_CACHE ?= $(HOME)/.cache/octavo

.PHONY: help setup run test slow check types format items clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(VENV)/.installed model  ## virtual environment, packages, embedded model

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "octavo needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	@test "$$(uname)" = Linux || { echo "octavo runs on Linux; this is $$(uname)."; exit 1; }
	@echo "installing into $(VENV): about 6 GB, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	@echo "installed; 'source $(VENV)/bin/activate' puts octavo on your path"
	@touch $@

.PHONY: model
model: $(VENV)/.installed
	@$(PY) -m octavo.scripts.setup_model

$(OLDEST)/.installed: tests/oldest-requirements.txt $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(OLDEST) -r $<
	@touch $@

run: setup  ## the main job: code completion, dense and sparse, on real files (ARGS="limit=2" for a short one)
	$(VENV)/bin/octavo $(ARGS)

test: setup $(OLDEST)/.installed  ## the suite, then parity with the oldest supported transformers
	$(PY) -m pytest -q -n auto --maxprocesses=4 $(ARGS)
	PYTHONPATH=$(OLDEST) $(PY) -m pytest -q -n auto --maxprocesses=4 -m 'parity and not gpu and not slow' $(ARGS)

slow: setup $(OLDEST)/.installed  ## what takes longer: the whole of all tables, of which the suite runs a telling part
	$(PY) -m pytest -q -n auto --maxprocesses=4 -m 'slow and not gpu and not soak' $(ARGS)
	PYTHONPATH=$(OLDEST) $(PY) -m pytest -q -n auto --maxprocesses=4 -m 'parity and slow and not gpu' $(ARGS)

check: $(VENV)/.installed  ## lint, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@$(MAKE) --no-print-directory types

types: $(VENV)/.installed
	@mkdir -p $(VENV)/types && ln -sfn $(CURDIR) $(VENV)/types/octavo  # the import name, for mypy
	MYPYPATH=$(VENV)/types $(VENV)/bin/mypy -p octavo.core

format: $(VENV)/.installed  ## let ruff rewrite
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

items: setup  ## make the code-completion items again from their pinned sources
	$(PY) -m octavo.scripts.setup_sources
	$(PY) -m octavo.scripts.tasks.build_items

clean:  ## remove the environment and build products; the cache stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
