# make demo: from nothing to a trained draft and its report. make test: everything that must hold before a commit.
#
# PYTHON          the interpreter for .venv (3.11 or newer); found by itself when not given
# PIP_EXTRA_ARGS  arguments for the pip call that fetches torch, for instance an index of CPU-only or CUDA builds

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP_EXTRA_ARGS ?=
PIP := .venv/bin/python -m pip install -q --disable-pip-version-check --no-compile
TORCH := torch==2.13.0
STAMP := .venv/eyas-installed
TARGET := models/smollm2-135m/config.json

.PHONY: setup target demo test test-engines engine-table engine-integers doctor-table lint engines clean

setup: $(STAMP)

# The stamp comes last: an environment without it was cut off half-way and is made again from nothing.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "eyas needs Python 3.11 or newer; $(or $(PYTHON),python3) is older or missing. Install one and name it: make setup PYTHON=python3.12" >&2; \
	  exit 2; }
	@test -e $@ || "$(PYTHON)" -m venv --clear .venv
	@echo "installing $(TORCH)" >&2
	@$(PIP) $(TORCH) $(PIP_EXTRA_ARGS)
	@echo "installing eyas and its other dependencies" >&2
	@$(PIP) -e '.[dev,gguf]'
	@touch $@

target: $(TARGET)

$(TARGET): | $(STAMP)
	@.venv/bin/python tools/demo_target.py

demo: setup target
	.venv/bin/eyas run examples/smollm2.yaml

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# llama.cpp's quick part is among these when its environment is there (make engines ENGINES=llamacpp, seconds).
test: lint target
	.venv/bin/python -m pytest --ignore=tests/test_engines_vllm.py --ignore=tests/test_engines_sglang.py \
	  --ignore=tests/test_engines_openvino.py

# Every fault and every integer in every engine whose environment is there.
test-engines: engines
	EYAS_ENGINES=all .venv/bin/python -m pytest tests/test_engines_*.py

# Predicted against seen, tried anew in each of them and written into docs/engines.md (it takes long: one that was cut
# off goes on with RESUME=--resume)
engine-table: engines
	.venv/bin/python tests/engines/faults.py $(ENGINES) $(RESUME)

# The demo draft's greedy tokens, drafted and accepted in each engine beside our own decoder's
engine-integers: engines
	.venv/bin/python tests/engines/side_by_side.py

# What the doctor says of drafts broken on purpose, written into docs/doctor.md
doctor-table: setup
	.venv/bin/python tests/doctor_table.py

# The real engines, each in an environment of its own: make engines, or make engines ENGINES="llamacpp openvino"
engines: setup
	.venv/bin/python tools/engines.py $(ENGINES)

# What can be made again. The demo target and your runs stay.
clean:
	rm -rf .venv build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
