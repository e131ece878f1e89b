# A fresh machine needs Python 3.11 or newer, make and a package registry; everything else is installed into .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Processes for the suite. A file stays in one of them, with what its tests have set up together.
JOBS ?= 2
# Bytecode is kept, whatever the environment says: hundreds of processes start in the suite, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
# One BLAS thread: results are the same bits, and two processes on two cores do not spin against each other.
export OMP_NUM_THREADS = 1
export OPENBLAS_NUM_THREADS = 1
export MKL_NUM_THREADS = 1

.PHONY: demo test test-slow e2e browser check bench proto clean

demo: $(INSTALLED)
	rm -rf runs/demo
	$(BIN)/coterie run hsb --hosts 4 --output runs/demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow and not e2e and not browser" -n $(JOBS) --dist loadfile

# SHARD=NAME: one of the shards of tests/slow.py. MINUTES=N: as much as fits.
test-slow: $(INSTALLED)
	$(BIN)/python -m tests.slow $(SHARD) --jobs $(JOBS) $(if $(MINUTES),--minutes $(MINUTES))

# On a Docker engine: one that runs, or one that is started here. Without one it says so loudly and ends well; with REQUIRE_ENGINE=1 it fails.
e2e: $(INSTALLED)
	tests/e2e/engine.sh up || test $$? -eq 77 -a -z "$$REQUIRE_ENGINE"
	status=0; $(BIN)/python -m pytest tests/e2e -m e2e --timeout 300 || status=$$?; tests/e2e/engine.sh down; exit $$status

# The dashboard and the report in Chromium. Says loudly when there is none, and passes over it; tests/browser/chromium.sh installs it.
browser: $(INSTALLED)
	$(BIN)/python -m pytest tests/browser -m browser --timeout 300

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy common server client deploy protos/generate.py
	$(BIN)/buf lint protos

bench: $(INSTALLED)
	$(BIN)/pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python -m tests.benchmarks

proto: $(INSTALLED)
	$(BIN)/python protos/generate.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
# pip compiles to bytecode on one core, which takes longer than all else it does here. That this fails means only that some file in some
# package is no Python, which pip passes over as well. Packages' own tests are never imported.
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e ".[dev]"
	$(BIN)/python -m compileall -qq -j 0 -x 'site-packages/.*/tests/' $(VENV)/lib || true
	touch $@

clean:
	rm -rf $(VENV) runs build dist
