# Two commands: `make serve` and `make test`. Both make the environment (.venv) first if it is not there.
#   make serve [PORT=8000] [MODEL=/path/to/checkpoint] [ARGS="--max-model-len 4096"]
#   make test

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
MODEL ?=
ARGS ?=
# One OpenMP thread per process: small models lose time on more, and test workers would fight for the cores.
export OMP_NUM_THREADS ?= 1

# Which torch: with an NVIDIA driver pip's own choice (the CUDA build); without one the CPU build, from a local wheel folder
# (PIP_FIND_LINKS) when it holds one, else from PyTorch's CPU index. TORCH_INDEX= (empty) turns the extra index off.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
PYTHON_TAG := $(shell $(PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])' 2>/dev/null)
LOCAL_TORCH := $(firstword $(wildcard $(addsuffix /torch-*cpu-$(PYTHON_TAG)-*.whl,$(PIP_FIND_LINKS))))
ifeq ($(HAS_GPU),yes)
  CONSTRAINTS :=
  EXTRAS ?= dev,gpu
  TORCH_INDEX ?=
else
  CONSTRAINTS := -c constraints/cpu.txt
  EXTRAS ?= dev
  TORCH_INDEX ?= $(if $(LOCAL_TORCH),,https://download.pytorch.org/whl/cpu)
endif

.PHONY: venv serve test check fix test-fast test-browser browser twins test-gpu bench-scheduler bench-cpu offline-bundle size clean

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints/cpu.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) -V); Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[$(EXTRAS)]'
	@touch $@

serve: venv
	$(BIN)/whalefall serve $(MODEL) --port $(PORT) $(ARGS)

test: venv check
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

fix: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-fast: venv
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-browser: venv browser
	$(BIN)/python -m pytest -m browser

# Never fails: without a browser its tests are skipped, and say so.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi; \
	as_root=$$(test "$$(id -u)" = 0 || echo sudo -n); apt="timeout 300 $$as_root apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20"; \
	{ $$apt update && DEBIAN_FRONTEND=noninteractive $$apt install -y --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 || \
	  echo "chromium and chromedriver are missing, and apt-get cannot install them here: the browser tests are skipped"

twins: venv
	$(BIN)/python -m pytest tests/kernels/test_twins.py $(if $(OP),-k $(OP))

test-gpu: venv
	$(BIN)/python -m pytest -m gpu

bench-scheduler: venv
	$(BIN)/python -m benchmarks.scheduler_plan

bench-cpu: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[bench]'
	$(BIN)/python -m benchmarks.cpu_throughput

# For a machine with a GPU and no network: this tree's last commit and the wheels that a bare CUDA image with torch lacks, under 60 MB.
# There: tar -xzf whalefall.tar.gz && python3 -m pip install --no-index --find-links wheels -r constraints/offline.txt
offline-bundle: $(VENV)/.ready
	rm -rf build/offline && mkdir -p build/offline/wheels
	git archive --format=tar.gz -o build/offline/whalefall.tar.gz HEAD
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --only-binary=:all: -d build/offline/wheels -r constraints/offline.txt \
	  --implementation cp --python-version 3.12 --abi cp312 --abi abi3 --abi none \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64
	@size=$$(du -sb build/offline | cut -f1); echo "build/offline: $$size bytes"; \
	  test $$size -le 60000000 || { echo "larger than 60 MB"; exit 2; }

size:
	@for d in whalefall/*/; do printf '%6d  %s\n' $$(find $$d -name '*.py' | xargs cat | wc -l) $$d; done; \
	printf '%6d  total\n' $$(find whalefall -name '*.py' | xargs cat | wc -l)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache
