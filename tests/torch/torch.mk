# Tests of the Python package, and against a live PyTorch, in an environment of their own that is made once.
# The wheels without CUDA are a tenth of those with it: taken from where pip looks anyway, else from PyTorch's
# own index.

TORCH_NEEDS := tests/torch/requirements.txt
TORCH_INDEX := https://download.pytorch.org/whl/cpu
TORCH_PYTHON := $(BUILD)/venv/bin/python
TORCH_PIP := $(TORCH_PYTHON) -m pip --disable-pip-version-check
TORCH_TESTS := $(sort $(wildcard tests/torch/test_*.py))
PYTHON_TESTS := $(sort $(wildcard tests/python/test_*.py))

.PHONY: test-torch test-python
test-torch: python_tests := $(PYTHON_TESTS) $(TORCH_TESTS)
test-python: python_tests := $(PYTHON_TESTS)
test-torch test-python: test-ready all $(BUILD)/venv/ready
	PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR)/python:$(CURDIR)/tests/torch CC="$(CC)" \
	    RESHARD_LIB=$(CURDIR)/$(BUILD)/libreshard.so \
	    prove --timer --failures --directives -j2 $(if $(V),-v) --exec $(TORCH_PYTHON) $(python_tests)

$(BUILD)/venv/ready: $(TORCH_NEEDS)
	@rm -rf $(@D)
	@tools/need.sh python3:python3
	@python3 -c 'import ensurepip, venv' 2>/dev/null || tools/need.sh /usr/share/doc/python3-venv:python3-venv
	@echo "installing Python packages in $(@D):" $$(cat $<)
	$(Q)python3 -m venv $(@D)
	$(Q)$(TORCH_PIP) install -q -r $< 2>/dev/null || \
	    $(TORCH_PIP) install -q -r $< --extra-index-url $(TORCH_INDEX)
	@# mpi4py comes as a wheel, or is built where mpicc is; its test is skipped where neither works.
	@$(TORCH_PIP) install -q mpi4py >/dev/null 2>&1 || echo "mpi4py cannot be installed: its test will be skipped"
	@$(TORCH_PIP) freeze
	@touch $@
