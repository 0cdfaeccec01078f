# `make help` lists what there is.  Every target brings the environments it
# needs up to date first; when they are, that takes a fraction of a second.

PYTHON := .venv/bin/python
SETUP  := requirements/setup.sh
CONFIG ?= configs/local.toml
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu final test bench lint pins clean clean-all

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
	  while IFS='|' read -r target text; do printf '%-18s %s\n' "$$target" "$$text"; done

setup:  ## install everything a run needs (main and engine environments)
	@$(SETUP) main engine

setup-gpu:  ## the same for a machine with NVIDIA GPUs
	@$(SETUP) main gpu

final:  ## the whole campaign of CONFIG (configs/local.toml); ARGS go to rl.final
	@$(SETUP) main engine
	@$(PYTHON) -m rl.prepare model --config $(CONFIG)
	@$(PYTHON) -m rl.final --config $(CONFIG) $(ARGS)

# Unit tests share the cores; the others start clusters and engines that need all of them.
test:  ## every test, unit tests first; or, with ARGS, what `pytest $(ARGS)` runs
	@$(SETUP) main dev engine
	@$(if $(strip $(ARGS)),$(PYTHON) -m pytest $(ARGS),\
	$(PYTHON) -m pytest tests/unit --numprocesses auto --maxprocesses 8 --dist worksteal && \
	$(PYTHON) -m pytest tests/integration tests/chaos)

bench:  ## a short pass over every benchmark; ARGS go to each
	@$(SETUP) main bench engine
	@found=; for file in benchmarks/*.py; do \
	  module=$$(basename "$$file" .py); \
	  case $$module in _*|'*') continue;; esac; \
	  found=yes; echo "== benchmarks.$$module"; \
	  $(PYTHON) -m "benchmarks.$$module" --quick $(ARGS) || exit $$?; \
	done; \
	if [ -z "$$found" ]; then echo "there are no benchmarks yet"; fi

lint:  ## style, formatting, types and import direction
	@$(SETUP) main dev
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright
	@.venv/bin/lint-imports

pins:  ## resolve requirements/*.in again; ARGS=--upgrade takes the newest releases
	@UV=$$($(SETUP) uv) && \
	compile() { "$$UV" pip compile --quiet --generate-hashes --no-emit-index-url --no-header \
	  --python-version 3.12 $(ARGS) "requirements/$$1.in" -o "requirements/$$1.txt" $$2; } && \
	compile uv && \
	compile main "--override requirements/main-overrides.txt" && \
	compile dev "--override requirements/main-overrides.txt" && \
	compile bench --no-deps && \
	compile gpu && \
	compile engine "--override requirements/engine-overrides.txt" && \
	compile engine-gpu

clean:  ## remove caches of tests, linters and Python
	@rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
	@find rl actors sandboxes benchmarks tests -type d -name __pycache__ -prune -exec rm -rf {} +

clean-all: clean  ## the same and both environments; state/ stays
	@rm -rf .venv .venv-engine
