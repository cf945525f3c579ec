# Tests against a live PyTorch, in an environment of their own that is made once. The wheels without CUDA
# are a tenth of those with it: taken from where pip looks anyway, else from PyTorch's own index.

TORCH_PACKAGES := torch==2.13.0+cpu numpy safetensors zstandard transformers
TORCH_INDEX := https://download.pytorch.org/whl/cpu
TORCH_PYTHON := $(BUILD)/venv/bin/python
TORCH_PIP := $(TORCH_PYTHON) -m pip install --disable-pip-version-check -q
TORCH_TESTS := $(sort $(wildcard tests/torch/test_*.py))

.PHONY: test-torch
test-torch: test-ready $(BUILD)/libreshard.so $(BUILD)/venv/ready
	PYTHONDONTWRITEBYTECODE=1 RESHARD_LIB=$(BUILD)/libreshard.so CC="$(CC)" \
	    prove --timer --failures --directives -j2 $(if $(V),-v) --exec $(TORCH_PYTHON) $(TORCH_TESTS)

$(BUILD)/venv/ready: tests/torch/torch.mk
	@rm -rf $(@D)
	@tools/need.sh python3:python3
	@python3 -c 'import ensurepip, venv' 2>/dev/null || tools/need.sh /no/venv:python3-venv
	@echo "installing Python packages in $(@D): $(TORCH_PACKAGES)"
	$(Q)python3 -m venv $(@D)
	$(Q)$(TORCH_PIP) $(TORCH_PACKAGES) 2>/dev/null || $(TORCH_PIP) --extra-index-url $(TORCH_INDEX) $(TORCH_PACKAGES)
	@$(TORCH_PYTHON) -m pip list --disable-pip-version-check --format=freeze
	@touch $@
