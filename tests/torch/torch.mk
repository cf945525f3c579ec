# Tests of the Python package, also with PyTorch, in a virtual environment that is created once. Wheels without CUDA
# have a tenth of the size. They are installed from the default index of pip, else from the index of PyTorch.

TORCH_NEEDS := tests/torch/requirements.txt
TORCH_INDEX := https://download.pytorch.org/whl/cpu
TORCH_PYTHON := $(BUILD)/venv/bin/python
TORCH_PIP := $(TORCH_PYTHON) -m pip --disable-pip-version-check
TORCH_TESTS := $(sort $(wildcard tests/torch/test_*.py))
PYTHON_TESTS := $(sort $(wildcard tests/python/test_*.py))

.PHONY: test-torch test-python
test-torch: python_tests := $(PYTHON_TESTS) $(TORCH_TESTS)
test-python: python_tests := $(PYTHON_TESTS)
test-torch test-python: test-ready all $(BUILD)/venv/ready $(EXAMPLES) test-wheel-ready
	PYTHONDONTWRITEBYTECODE=1 BUILD_DIR=$(CURDIR)/$(BUILD) PYTHONPATH=$(CURDIR)/python:$(CURDIR)/tests/torch CC="$(CC)" \
	    RESHARD_LIB=$(CURDIR)/$(BUILD)/libreshard.so \
	    prove --timer --failures --directives -j2 $(if $(V),-v) --exec $(TORCH_PYTHON) $(python_tests)

# Builds the wheel, if its tools can be installed. Otherwise its test is skipped.
.PHONY: test-wheel-ready
test-wheel-ready: $(BUILD)/venv/ready
	@$(MAKE) --no-print-directory $(WHEEL_VENV)/ready || echo "auditwheel cannot be installed: its test will be skipped"
	@rm -rf $(BUILD)/wheel
	@[ ! -e $(WHEEL_VENV)/ready ] || $(MAKE) --no-print-directory wheel

$(BUILD)/venv/ready: $(TORCH_NEEDS)
	@rm -rf $(@D)
	@tools/need.sh python3:python3
	@python3 -c 'import ensurepip, venv' 2>/dev/null || tools/need.sh /usr/share/doc/python3-venv:python3-venv
	@echo "installing Python packages in $(@D):" $$(cat $<)
	$(Q)python3 -m venv $(@D)
	$(Q)$(TORCH_PIP) install -q -r $< 2>/dev/null || \
	    $(TORCH_PIP) install -q -r $< --extra-index-url $(TORCH_INDEX)
	@# mpi4py is installed as a wheel, or built with mpicc. If neither works, its test is skipped.
	@$(TORCH_PIP) install -q mpi4py >/dev/null 2>&1 || echo "mpi4py cannot be installed: its test will be skipped"
	@# DeepSpeed has no wheels, and needs nothing that is compiled here. Without it, its engines are not tested.
	@DS_BUILD_OPS=0 $(TORCH_PIP) install -q --no-build-isolation deepspeed >/dev/null 2>&1 || \
	    echo "DeepSpeed cannot be installed: tests of its engines will be skipped"
	@$(TORCH_PIP) freeze
	@touch $@
