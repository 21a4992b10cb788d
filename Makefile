# One command surface. `make demo` and `make test` work on a fresh machine; everything else builds on `make setup`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test test-long lint format bench bench-peers chaos chaos-short kernels-compile clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(READY) ## virtual environment with the pinned packages, then the model; does nothing where both are in place
	@$(BIN)/python -m kernels.cpu.build
	$(BIN)/python -m engine.weights.fetch smollm2-135m

$(READY): pyproject.toml constraints.txt
	@echo "setup: creating $(VENV) with the packages pinned in constraints.txt (about 2.4 GB, 1-3 minutes)"
	command -v $(PYTHON) >/dev/null || { echo "setup: there is no $(PYTHON); name one: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "setup: Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3")'
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || { echo "setup: python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install -q -c constraints.txt torch numpy 2>&1 | { grep -v '^WARNING: Location' || true; }
	$(BIN)/pip install -q -c constraints.txt -e '.[engine,dev]' 2>&1 | { grep -v '^WARNING: Location' || true; }
	touch $@

demo: setup ## summarizes real documents through every part, on an embedded server
	@$(BIN)/python -m bench.demo

test: setup ## all tests but the long ones
	@$(BIN)/python -m pytest -m "not long" -n 2 --dist loadfile $(ARGS)

test-long: setup ## the long tests
	@$(BIN)/python -m pytest -m long $(ARGS)

chaos: setup ## the queue's proofs on Valkey and Redis, thousands of jobs; at most 30 minutes a server
	@code=0
	for server in valkey redis; do timeout 1800 $(BIN)/python -m bench.chaos --server $$server --at-once 2 --write || code=1; done
	exit $$code

chaos-short: setup ## the same with a few jobs each, on Valkey; under 4 minutes
	@timeout 240 $(BIN)/python -m bench.chaos --short --at-once 2

lint: setup ## ruff, mypy --strict, import direction
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## what ruff can mend by itself
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## the engine's figures: claims, exactness, sampler, a workload
	@$(BIN)/python -m bench.run
	$(BIN)/python -m bench.claims
	$(BIN)/python -m bench.sampler
	$(BIN)/python -m bench.exactness

bench-peers: setup ## ours and the peers on the same work, in turn, cold start, prefixes; about an hour, on an idle machine
	@code=0
	for part in "peers $(ARGS)" coldstart prefix steps report; do $(BIN)/python -m bench.$$part || code=1; done
	exit $$code

kernels-compile: setup ## every Triton kernel for sm_80, sm_90, sm_100 and gfx942, without a GPU; fails where registers spill
	@$(BIN)/python -m kernels.compile

clean: ## forgets the virtual environment; the model cache stays
	rm -rf $(VENV)
