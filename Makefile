# Everything runs in its own virtual environment; `make demo` and `make test` set it up.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-browser lint docs site bench mutants sanitise clean
.DEFAULT_GOAL := demo

$(STAMP): pyproject.toml constraints.txt src/fedloom/native/kernels.cpp
	@echo "Installing into $(VENV): about 2.5 GB, a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(STAMP)  ## compare a method of each family on the bundled digits; report in runs/demo
	$(BIN)/fedloom compare fedavg fedper fedmeta-per-maml@alpha=0.1,optimiser=adam,lr=0.03 \
		fedrolex@capacities=1:0.5,0.25:0.5 fedswap feddom@topology=waypoint,area=300 \
		--data digits --clients 20 --partition classes:3 --participation 1 --test-share 0.4 \
		--rounds 40 --seeds 3 --out runs/demo --overwrite

test: $(STAMP)  ## all tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup

test-browser: $(STAMP)  ## reports and the live page in Chromium
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		echo "There is no Chromium here. Debian: apt install chromium; Fedora: dnf install chromium;"; \
		echo "macOS: brew install --cask chromium, and put it in the PATH as chromium."; exit 1; }
	$(BIN)/python -m pytest tests/test_browser.py

lint: $(STAMP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## the generated pages of the documentation, from the code
	$(BIN)/python docs/make_reference.py

site: $(STAMP)  ## the documentation site, in build/site; warnings and dead links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## speed and memory, as ratios within one run
	$(BIN)/python -m benchmarks

mutants: $(STAMP)  ## do the tests notice deliberate errors?
	$(BIN)/python -m mutants

sanitise: $(STAMP)  ## the kernels' tests, with every access to memory checked
	mkdir -p build
	g++ -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -shared -fPIC \
		-ffp-contract=fast -Wno-psabi src/fedloom/native/kernels.cpp -o build/kernels_checked.so
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 FEDLOOM_KERNELS=build/kernels_checked.so \
		$(BIN)/python -m pytest -n 0 -p no:cacheprovider tests/test_native.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
