# Everything from a bare Python 3.11: `make demo` and `make test` need no other step.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The modern stack: Spark 4.3, pyarrow 26, numpy 2, and no petastorm.
MODERN := .venv-modern
MODERN_STAMP := $(MODERN)/.installed
# Spark 4.0 over the packages of $(VENV), but for pyspark and py4j.
SPARK4 := .venv-spark4
CEREBRO := .venv-cerebro
# timm, torchvision, diffusers and peft over the packages of $(VENV).
ZOO := .venv-zoo
# Ray Tune over the packages of $(VENV), but for pyarrow.
RAY := .venv-ray
# DeepSpeed over the packages of $(VENV).
DEEPSPEED := .venv-deepspeed
LIGHTNING := .venv-lightning
# mkdocs and its plugins, alone.
DOCS := .venv-docs
PIP_INSTALL := -m pip install -qq --no-input --disable-pip-version-check --no-compile

# The decisions without their long searches, which know no library; what reads Arrow and
# Parquet; Java's choice; of Spark one whole run.
MODERN_TESTS := $(addprefix tests/plan/,test_plan_seeds.py messages/test_plan_actions.py \
  messages/test_plan_codec.py hop/test_plan_holders.py hop/test_plan_hop_state.py \
  schedules/test_plan_schedules.py sizing/test_plan_balance.py) \
  $(addprefix tests/data/test_data_,cache.py column_decoder.py manifest.py \
  readers.py rows.py) tests/data/existing/test_data_existing.py \
  tests/storage tests/wire tests/observe/test_observe_view.py \
  tests/spark/test_spark_checks.py tests/spark/test_spark_java.py \
  tests/spark/test_spark_transform.py::test_a_show_prints_its_table_alone \
  tests/end_to_end/drivers/test_spark_runs.py::test_a_grid_on_spark_replays_and_transforms

# One thread per task: another number of threads gives other bits.
export OMP_NUM_THREADS := 1
# Containers often set this, and then every process compiles torch anew: 2.5 seconds of a CPU.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long test-kernels test-gpu test-modern test-spark4 lint format venv venv-modern clean
.PHONY: docs test-torch test-transformers test-lightning
.PHONY: zoo map notebooks chaos integration integration-spark integration-hdfs integration-cerebro \
  integration-lightning

help:
	@echo "make demo      train eight models over a Spark DataFrame and replay every one of them"
	@echo "make test      a guard of every promise, in some 10 minutes on two cores"
	@echo "make test-long   long searches, real sizes, the demo and a standalone cluster"
	@echo "make test-kernels   the exactness part of it, with the kernels of another CPU"
	@echo "make test-gpu   the engine and devices on a CUDA GPU, and what it costs to spill there"
	@echo "make test-modern   readers, decisions and one whole run on Spark 4.3, in $(MODERN)"
	@echo "make test-spark4   what touches Spark ML, on Spark 4.0, in $(SPARK4)"
	@echo "make test-torch VERSION=2.14.1   models and a whole run on another torch; so for test-transformers, test-lightning"
	@echo "make zoo       cut architectures of other libraries, and write docs/models.md, in $(ZOO)"
	@echo "make chaos     kill drivers and agents on real Spark for 100 rounds, see benchmarks/survival"
	@echo "make lint      ruff check, ruff format --check, mypy"
	@echo "make docs      the site, in build/site, by $(DOCS)"
	@echo "make map       write the table of rooms into docs/architecture.md"
	@echo "make notebooks   execute the notebooks, and keep their outputs"
	@echo "make format    let ruff rewrite what it can"
	@echo "make integration   the three below, one after the other"
	@echo "make integration-spark   a real Spark cluster on this machine, see integration/spark_standalone"
	@echo "make integration-hdfs   a real HDFS on this machine, see integration/hdfs"
	@echo "make integration-cerebro   the searches of cerebro-dl 1.1.1 with our hopper, in $(CEREBRO)"
	@echo "make venv      only the environment, in $(VENV)"
	@echo "make clean     remove the environment and everything generated"

demo: $(STAMP)
	@$(BIN)/cerebro-hydra demo

# Three processes for two cores, because many tests wait for others. Two of them each have one group of
# the tests that share a Spark session (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadscope
test: $(STAMP)
	@$(PYTEST) -m "not long"

# What is marked long, and every property with all of its examples.
test-long: test-kernels
	@CEREBRO_HYDRA_LONG=1 $(PYTEST) -m "long or hypothesis" \
	  $(addprefix --ignore=,$(EXACT_TESTS))

# Cuts have the bits of the uncut model, with the kernels of numerics="portable" too: what has the same
# bits by luck on this one differs there. Models of real sizes would take three times as long.
EXACT_TESTS := tests/shards $(addprefix tests/conformance/test_,table_models.py text_models.py \
  vision_models.py)
OTHER_KERNELS := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
test-kernels: $(STAMP)
	@$(OTHER_KERNELS) CEREBRO_HYDRA_LONG=1 $(PYTEST) \
	  -m "long or hypothesis or kernels" $(EXACT_TESTS)

# The pinned torch is a CPU build: GPU_PYTHON is one with the same packages, whose torch has CUDA.
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(STAMP)
	@$(GPU_PYTHON) -m pytest -m gpu tests/gpu
	@PYTHONPATH=. $(GPU_PYTHON) benchmarks/cuda/run.py

venv-modern: $(MODERN_STAMP)

test-modern: $(MODERN_STAMP)
	@$(MODERN)/bin/python -m pytest $(MODERN_TESTS)

test-spark4: $(SPARK4)/.installed
	@$(SPARK4)/bin/python -m pytest tests/ml/test_ml_params.py tests/ml/test_ml_pipelines.py \
	  tests/spark/test_spark_transform.py

# Another version over the packages of $(VENV). PyPI's torch for Linux is a build for CUDA of some GB, which computes
# on CPUs as well; PIP_EXTRA_INDEX_URL may name an index of builds for CPUs.
test-torch: .venv-torch-$(VERSION)/.installed
	@$(<D)/bin/python -m pytest -m "not long" tests/conformance $(lastword $(MODERN_TESTS))

test-transformers: .venv-transformers-$(VERSION)/.installed
	@$(<D)/bin/python -m pytest -m "not long" tests/conformance/test_text_models.py \
	  tests/conformance/test_vision_models.py

test-lightning: .venv-lightning-$(VERSION)/.installed
	@PYTHONPATH=. $(<D)/bin/python -m pytest integration/lightning

# Up to an hour on one core. What an interrupted run lacks is measured by
# `PYTHONPATH=. .venv-zoo/bin/python -m integration.zoo.run --missing`.
zoo: $(ZOO)/.installed
	@PYTHONPATH=. $(ZOO)/bin/python -m integration.zoo.run
	@PYTHONPATH=. $(ZOO)/bin/python -m integration.zoo.results

# A round takes a minute; ROUNDS=5 is a trial.
ROUNDS ?= 100
chaos: $(STAMP)
	@PYTHONPATH=. $(BIN)/python benchmarks/survival/run.py --rounds $(ROUNDS)

integration: integration-spark integration-hdfs integration-cerebro integration-lightning

integration-spark: $(STAMP)
	@$(BIN)/python integration/spark_standalone/run.py

integration-hdfs: $(STAMP)
	@$(BIN)/python -m integration.hdfs.jars
	@$(BIN)/python -m pytest integration/hdfs

integration-cerebro: $(CEREBRO)/.installed
	@PYTHONPATH=. $(CEREBRO)/bin/python -m pytest integration/cerebro
	@PYTHONPATH=. $(CEREBRO)/bin/python integration/cerebro/quickstart.py

integration-lightning: $(LIGHTNING)/.installed
	@PYTHONPATH=. $(LIGHTNING)/bin/python -m pytest integration/lightning

# Into build/site; a link that leads nowhere, or a docstring that can't be read, ends it.
docs: $(DOCS)/.installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "The site is in build/site/index.html."

lint: $(STAMP)
	@echo "ruff check" && $(BIN)/ruff check .
	@echo "ruff format --check" && $(BIN)/ruff format --check .
	@echo "mypy" && $(BIN)/mypy

# The table of rooms in docs/architecture.md, from docs/rooms.toml.
map: $(STAMP)
	@$(BIN)/python -m tests.rooms --write

# Three minutes; NAMES=01_quickstart is one of them.
notebooks: $(STAMP)
	@$(BIN)/python -m tests.pages.notebooks $(NAMES)

format: $(STAMP)
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

venv: $(STAMP)
	@echo "The environment in $(VENV) is ready."

$(STAMP): requirements.lock
$(STAMP): LAST_PYTHON := 12
$(MODERN_STAMP): requirements-modern.lock
$(MODERN_STAMP): LAST_PYTHON := 13

# A lock names everything, so pip has nothing to resolve. The package is installed by link, so that
# only a change of the pins needs a new installation.
$(STAMP) $(MODERN_STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $(LAST_PYTHON)))' 2>/dev/null || { \
	  echo "$(PYTHON) is not a Python 3.11 to 3.$(LAST_PYTHON). Install Python 3.11, or name yours: make PYTHON=/path/to/python3.11 ..."; \
	  exit 1; }
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(@D) || { \
	  echo "$(PYTHON) can't make a virtual environment. On Debian and Ubuntu: apt install python3.11-venv"; \
	  rm -rf $(@D); exit 1; }
	@echo "Installing the pinned packages into $(@D); the first time this takes some minutes."
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps -r $(filter %.lock,$^)
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@echo "Compiling what agents import, so that they start faster."
	@$(@D)/bin/python -c "from cerebro_hydra.spark.daemon import preload; preload()"
	@touch $@

# It reads docstrings from the sources, so that it needs none of our packages.
$(DOCS)/.installed: requirements-docs.lock
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps -r $<
	@touch $@

# The packages of $(VENV) are seen behind the environment's own.
define SEE_PACKAGES_OF_VENV
	@$(BIN)/python -c 'import site, sysconfig; \
	  print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
endef

$(SPARK4)/.installed: $(STAMP)
	@$(BIN)/python -m venv --clear $(SPARK4)
	@$(SPARK4)/bin/python $(PIP_INSTALL) --no-deps \
	  pyspark==4.0.5 py4j==0.10.9.9
	$(SEE_PACKAGES_OF_VENV)
	@touch $@

$(ZOO)/.installed: $(STAMP) integration/zoo/requirements.txt
	@$(BIN)/python -m venv --clear $(ZOO)
	@$(ZOO)/bin/python $(PIP_INSTALL) --no-deps -r integration/zoo/requirements.txt
	$(SEE_PACKAGES_OF_VENV)
	@touch $@

$(RAY)/.installed: $(STAMP) benchmarks/search/requirements.txt
	@$(BIN)/python -m venv --clear $(RAY)
	@$(RAY)/bin/python $(PIP_INSTALL) --no-deps -r benchmarks/search/requirements.txt
	$(SEE_PACKAGES_OF_VENV)
	@touch $@

$(DEEPSPEED)/.installed: $(STAMP) benchmarks/spill/requirements.txt
	@$(BIN)/python -m venv --clear $(DEEPSPEED)
	@$(DEEPSPEED)/bin/python $(PIP_INSTALL) --no-deps -r benchmarks/spill/requirements.txt
	$(SEE_PACKAGES_OF_VENV)
	@touch $@

$(LIGHTNING)/.installed: $(STAMP) integration/lightning/requirements.txt
	@$(BIN)/python -m venv --clear $(LIGHTNING)
	@$(LIGHTNING)/bin/python $(PIP_INSTALL) --no-deps -r integration/lightning/requirements.txt
	$(SEE_PACKAGES_OF_VENV)
	@touch $@

.venv-torch-/.installed .venv-transformers-/.installed .venv-lightning-/.installed:
	@echo "Name the version, such as: make test-torch VERSION=2.14.1"; exit 1

.venv-torch-%/.installed: $(STAMP)
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) torch==$*
	$(SEE_PACKAGES_OF_VENV)
	@touch $@

.venv-transformers-%/.installed: $(STAMP)
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) transformers==$* 'numpy<2'
	$(SEE_PACKAGES_OF_VENV)
	@touch $@

.venv-lightning-%/.installed: $(STAMP) integration/lightning/requirements.txt
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps -r integration/lightning/requirements.txt
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps lightning==$* pytorch-lightning==$*
	$(SEE_PACKAGES_OF_VENV)
	@touch $@

# cerebro-dl asks for a server's packages that no longer install, so it comes without what it asks for.
$(CEREBRO)/.installed: integration/cerebro/requirements.txt
	@$(PYTHON) -m venv --clear $(CEREBRO)
	@echo "Installing TensorFlow and cerebro-dl into $(CEREBRO); the first time this takes some minutes."
	@$(CEREBRO)/bin/python $(PIP_INSTALL) -r $<
	@$(CEREBRO)/bin/python $(PIP_INSTALL) --no-deps cerebro-dl==1.1.1
	@touch $@

clean:
	rm -rf $(VENV) $(MODERN) $(SPARK4) $(CEREBRO) $(ZOO) $(RAY) $(DEEPSPEED) $(LIGHTNING) $(DOCS) \
	  .venv-torch-* .venv-transformers-* .venv-lightning-* \
	  integration/hdfs/.jars build dist *.egg-info
	rm -rf spark-warehouse metastore_db derby.log
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
