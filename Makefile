# Every target builds .venv by itself from locks/venv.txt and constraints.txt; nothing else is
# needed than Python 3.11 (with venv) and make.
#
#   make demo ARGS="--baselines"    more arguments for `narrows demo`
#   make bench ARGS=--full          the long selections (as root: those with lines too)
#   make test ARGS="-k fragments"   more arguments for pytest
#   make chaos SEEDS=5000           more simulated runs with faults
#   make chaos-broker KILLS=1000    more kills of a real broker
#   make fuzz MINUTES=60 ARGS=payloads    longer, and one decoder beside the ports alone
#   make mutation SEED=2 COUNT=60    planted errors, another list of them for each seed
#   make venv TORCH_INDEX=URL       take torch from this index (only torch, only at the first build)

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
SEEDS ?= 2000
WORKERS ?= 3
KILLS ?= 500
SEED ?= 1
COUNT ?= 60
MINUTES ?= 10
REPORT ?= runs/mutation.json
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
TOOLS := build/tools

# The fuzzer is no part of .venv: no other target needs it, and it is not there for every platform.
FUZZ := .venv-fuzz

# Without this, `python -m ...` at the root would find our folder `proto` under that name.
export PYTHONSAFEPATH := 1
# Several processes share the machine, so that more threads in each of them only get in the way.
OMP_NUM_THREADS ?= 1
NUMBA_NUM_THREADS ?= 1
export OMP_NUM_THREADS NUMBA_NUM_THREADS

.PHONY: help demo test test-old check land fmt bench house transcript chaos chaos-broker \
	chaos-connections chaos-names chaos-end fuzz mutation venv sbom audit

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## four learners train one model, one of them is killed and comes back
	$(BIN)/narrows demo $(ARGS)

bench: $(READY)  ## a small selection of every bench and a report; ARGS=--full: the long one
	$(BIN)/narrows bench all $(ARGS)

test: $(READY)  ## what has to pass, in three to five minutes; tests that need a second run are named
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile $(ARGS)

test-old: $(READY)  ## tests of code that is about to go: half an hour, and not part of the gate
	$(BIN)/pytest -q -m "" --timeout 900 -o faulthandler_timeout=0 $(ARGS) \
		tests/e2e tests/chaos tests/fuzz tests/mutation tests/test_house.py \
		tests/unit/test_bench_attack.py tests/unit/test_bench_quality.py

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

land:  ## run the gate on a fresh clone of HEAD in a fresh environment, and print one line
	@.ci/land

fmt: $(READY)  ## format, and repair what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

transcript: $(READY)  ## walk two sites with real commands, and write what they print into docs/two-sites.md
	PYTHONPATH=tests $(BIN)/python tests/two_sites.py

house: $(READY)  ## write the tree into docs/house.md
	PYTHONPATH=tests $(BIN)/python tests/house.py

chaos: $(READY)  ## SEEDS simulated runs with loss, delay, crashes and returns
	$(BIN)/pytest tests/protocol -k seeds -m "" --seeds=$(SEEDS) $(ARGS)

chaos-broker: $(READY)  ## KILLS times SIGKILL to a real broker under load, then everything is compared
	$(BIN)/python tests/chaos/broker_kills.py $(KILLS)

chaos-connections: $(READY)  ## ten thousand connections to a broker, half of them cut in mid-transfer
	PYTHONPATH=tests $(BIN)/python tests/chaos/connections.py 10000

chaos-end: $(READY)  ## the end of a run: 1.5 million parameters at 100 kbit/s, a long step, a hang, a trickle
	for case in slow-line long-step hung trickle; do $(BIN)/python tests/chaos/end_of_run.py $$case || exit; done

chaos-names: $(READY)  ## a hundred thousand learners come and go in virtual time, five thousand for real
	PYTHONPATH=tests $(BIN)/python tests/chaos/names.py 100000
	PYTHONPATH=tests $(BIN)/python tests/chaos/connections.py 10000 10000

fuzz: $(READY) $(FUZZ)/.ready  ## MINUTES of made-up bytes for every decoder, and for the ports of a broker
	PYTHONPATH=$(FUZZ) $(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) $(ARGS)
	$(BIN)/python tests/fuzz/ports.py --minutes $(MINUTES)
	$(BIN)/python tests/fuzz/ports.py --minutes $(MINUTES) --keys

mutation: $(READY)  ## COUNT small errors drawn by SEED: which of them do the tests notice?
	$(BIN)/python tests/mutation/run.py --seed $(SEED) --count $(COUNT) --report $(REPORT) $(ARGS)

venv: $(READY)  ## only build .venv
	@echo "ready: source $(BIN)/activate"

sbom: $(READY) $(TOOLS)/.ready  ## build/sbom.json: what .venv is made of, as CycloneDX
	$(TOOLS)/bin/cyclonedx-py environment --output-file build/sbom.json $(BIN)/python
	@echo "written: build/sbom.json"

audit: $(TOOLS)/.ready  ## known vulnerabilities of the pinned packages, where the network allows it
	@$(TOOLS)/bin/python -c 'import urllib.request as u; u.urlopen("https://pypi.org/pypi/pip/json", timeout=20)' \
		2>/dev/null || { echo "make audit asks pypi.org, which does not answer from here; run it elsewhere" >&2; exit 1; }
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes \
		--requirement locks/venv.txt --requirement locks/tools.txt --requirement locks/fuzz.txt
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

$(FUZZ)/.ready: locks/fuzz.txt | $(READY)
	$(PIP) install --no-deps --upgrade --require-hashes --target $(FUZZ) --requirement $<
	@touch $@
