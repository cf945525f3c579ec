# Tests against a server that speaks the protocol of S3 (moto), through a proxy that injects faults, in an
# environment of their own that is made once.

S3_PYTHON := $(BUILD)/venv-s3/bin/python
S3_TESTS := $(sort $(wildcard tests/s3/test_*.py))

.PHONY: test-s3
test-s3: test-ready all $(BUILD)/asan/reshard $(BUILD)/venv-s3/ready
	PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR)/python:$(CURDIR)/tests/torch:$(CURDIR)/tests/s3 \
	    RESHARD_LIB=$(CURDIR)/$(BUILD)/libreshard.so RESHARD=$(CURDIR)/$(BUILD)/asan/reshard \
	    RESHARD_MPI=$(CURDIR)/$(BUILD)/reshard-mpi TORCH_PYTHON=$(CURDIR)/$(TORCH_PYTHON) \
	    prove --timer --failures --directives -j2 $(if $(V),-v) --exec $(S3_PYTHON) $(S3_TESTS)

$(BUILD)/venv-s3/ready: tests/s3/requirements.txt
	@rm -rf $(@D)
	@tools/need.sh python3:python3
	@python3 -c 'import ensurepip, venv' 2>/dev/null || tools/need.sh /usr/share/doc/python3-venv:python3-venv
	@[ -e /usr/share/doc/libcurl4 ] || tools/need.sh /usr/share/doc/libcurl4:libcurl4
	@echo "installing Python packages in $(@D):" $$(cat $<)
	$(Q)python3 -m venv $(@D)
	$(Q)$(S3_PYTHON) -m pip --disable-pip-version-check install -q -r $<
	@touch $@
