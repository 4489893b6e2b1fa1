# make test    ruff and every test
# make train   the main job: trains, evaluates and samples a small LaCT-LLM, then the ablation table
# make lint    ruff alone
# make clean   removes runs, caches and the virtual environment
#
# Each makes its virtual environment first where there is none. PYTHON chooses the interpreter
# (3.11 to 3.13) and VENV the folder: make test PYTHON=python3.13 VENV=.venv313

PYTHON ?= python3
VENV ?= .venv
RUNS ?= runs
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: train test lint clean
.DELETE_ON_ERROR:

# Made anew when the requirements change; only a finished installation leaves the stamp.
$(INSTALLED): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); sys.exit(None \
	    if ok else f"python {sys.version.split()[0]}: 3.11 to 3.13 needed, say make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

train: $(INSTALLED)
	$(BIN)/python launch/train.py --config=configs/lact_llm.py:tiny --workdir=$(RUNS)/tiny
	$(BIN)/python launch/evaluate.py --workdir=$(RUNS)/tiny
	$(BIN)/python launch/generate.py --workdir=$(RUNS)/tiny --prompt="The "
	$(BIN)/python launch/reproduce.py --experiment=ablation --tasks=language --seeds=1 \
	    --models=V0,V2,V6,softmax --workdir=$(RUNS)/reproduce

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=15 $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) $(RUNS) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
