# A fresh machine needs Python 3.11 or newer, make and a package registry; everything else is installed into .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CHECKOV := $(VENV)-checkov
INSTALLED := $(VENV)/.installed
# Processes for the suite. A file stays in one of them, with what its tests have set up together.
JOBS ?= 2
# Bytecode is kept, whatever the environment says: hundreds of processes start in the suite, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
# One BLAS thread: results are the same bits, and two processes on two cores do not spin against each other.
export OMP_NUM_THREADS = 1
export OPENBLAS_NUM_THREADS = 1
export MKL_NUM_THREADS = 1

.PHONY: demo test test-slow e2e browser check checkov docs bench proto clean

demo: $(INSTALLED)
	rm -rf runs/demo
	$(BIN)/coterie run hsb --hosts 4 --output runs/demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow and not e2e and not browser" -n $(JOBS) --dist loadfile

# SHARD=NAME: one of the shards of tests/slow.py. MINUTES=N: as much as fits.
test-slow: $(INSTALLED)
	$(BIN)/python -m tests.slow $(SHARD) --jobs $(JOBS) $(if $(MINUTES),--minutes $(MINUTES))

# On a Docker engine that runs, or is started here, a Slurm of four nodes and a Ray of two that are started here, and behind nginx. Without them it
# says so loudly and ends well; with REQUIRE_ENGINE=1 it fails.
e2e: $(INSTALLED)
	tests/e2e/engine.sh up || test $$? -eq 77 -a -z "$$REQUIRE_ENGINE"
	tests/e2e/slurm.sh up || test $$? -eq 77 -a -z "$$REQUIRE_ENGINE"
	tests/e2e/nginx.sh || test $$? -eq 77 -a -z "$$REQUIRE_ENGINE"
	status=0; $(BIN)/python -m pytest tests/e2e -m e2e --timeout 300 || status=$$?; \
	tests/e2e/slurm.sh down; tests/e2e/engine.sh down; exit $$status

# The dashboard and the report in Chromium. Says loudly when there is none, and passes over it; tests/browser/chromium.sh installs it.
browser: $(INSTALLED)
	$(BIN)/python -m pytest tests/browser -m browser --timeout 300

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy common server client deploy docs/_extension protos/generate.py
	$(BIN)/buf lint protos

# The Dockerfile and manifests by the rules of checkov, less those that deploy/checkov.yaml names. It pins many packages, so it has an
# environment of its own, 220 MB, which takes a minute or more to install.
checkov: $(INSTALLED)
	test -x $(CHECKOV)/bin/checkov || { $(PYTHON) -m venv $(CHECKOV) && $(CHECKOV)/bin/pip install -q --no-compile checkov==3.3.30; }
	rm -rf $(CHECKOV)/checked && mkdir $(CHECKOV)/checked && cp deploy/Dockerfile $(CHECKOV)/checked/
	$(BIN)/coterie kubernetes hsb --hosts 2 --namespace ns --output $(CHECKOV)/checked/flat.yml
	$(BIN)/coterie kubernetes schools --hosts 2 --namespace ns --mtls certs --monitoring --output $(CHECKOV)/checked/clusters.yml
	$(CHECKOV)/bin/checkov --config-file deploy/checkov.yaml -d $(CHECKOV)/checked

# The site, in docs/_build/html, without a network. A warning is an error.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

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
	rm -rf $(VENV) $(CHECKOV) runs build dist docs/_build docs/_made
