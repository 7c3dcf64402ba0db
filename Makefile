# Every target builds .venv by itself from locks/venv.txt and constraints.txt; nothing else is
# needed than Python 3.11 (with venv) and make.
#
#   make test ARGS="-k fragments"   more arguments for pytest
#   make slow SEEDS=5000 KILLS=1000 MINUTES=60
#   make venv TORCH_INDEX=URL       take torch from this index (only torch, only at the first build)

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
WORKERS ?= 3
SEEDS ?= 2000
KILLS ?= 500
MINUTES ?= 10
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
TOOLS := build/tools

# Without this, `python -m ...` at the root would find our folder `proto` under that name.
export PYTHONSAFEPATH := 1
# Several processes share the machine, so that more threads in each of them only get in the way.
OMP_NUM_THREADS ?= 1
NUMBA_NUM_THREADS ?= 1
export OMP_NUM_THREADS NUMBA_NUM_THREADS

.PHONY: help demo bench test slow check land fmt venv sbom audit

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## four learners train one model, one of them is killed and comes back
	$(BIN)/narrows demo $(ARGS)

bench: $(READY)  ## `narrows bench` with ARGS, such as ARGS="codec --short"
	$(BIN)/narrows bench $(ARGS)

test: $(READY)  ## what has to pass, in three to five minutes; tests that need a second run are named
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile $(ARGS)

slow: $(READY)  ## SEEDS simulated runs with every fault, KILLS of a real broker, MINUTES of wild frames
	$(BIN)/pytest -q -n 2 --timeout 0 tests/unit/test_simulation.py -m "" --seeds=$(SEEDS)
	$(BIN)/narrows bench chaos --kills $(KILLS)
	NARROWS_MINUTES=$(MINUTES) $(BIN)/pytest -q -m slow --timeout 0 tests/acceptance

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

land:  ## run the gate on a fresh clone of HEAD in a fresh environment, and print one line
	@.ci/land

fmt: $(READY)  ## format, and repair what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

venv: $(READY)  ## only build .venv
	@echo "ready: source $(BIN)/activate"

sbom: $(READY) $(TOOLS)/.ready  ## build/sbom.json: what .venv is made of, as CycloneDX
	$(TOOLS)/bin/cyclonedx-py environment --output-file build/sbom.json $(BIN)/python
	@echo "written: build/sbom.json"

audit: $(TOOLS)/.ready  ## known vulnerabilities of the pinned packages, where the network allows it
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes \
		--requirement locks/venv.txt --requirement locks/tools.txt
	$(TOOLS)/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

$(TOOLS)/.ready: locks/tools.txt
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes --requirement $<
	@touch $@

# All files have pinned digests, but for torch: it comes alone, because TORCH_INDEX may be an index
# that has little besides it; the last command adds what torch alone depends on. The marker is
# written last: a build that was interrupted is done again.
$(READY): locks/venv.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps --require-hashes --requirement locks/venv.txt
	$(PIP) install --constraint constraints.txt --no-deps \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) install --constraint constraints.txt --no-build-isolation \
		--editable '.[learner,bench,dev]'
	@touch $@
