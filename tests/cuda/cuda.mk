# Tests on a GPU, with what is installed there: a C compiler, MPI, and a Python that has torch with CUDA. Nothing is
# downloaded. Without a GPU they are skipped.

CUDA_PYTHON := python3

.PHONY: test-cuda
test-cuda: $(BUILD)/asan/test_device $(BUILD)/asan/test_device_files $(BUILD)/asan/test_devices $(BUILD)/test_device $(BUILD)/libreshard.so \
           $(if $(MPI_FOUND),$(BUILD)/asan/mpi/test_mpi $(BUILD)/asan/mpi/test_mpi_gpu)
	@prove --timer tests/cuda/gpu.sh
	@$(CUDA_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || \
	    { echo "the tests of CUDA tensors are skipped: $(CUDA_PYTHON) has no torch that finds a GPU"; exit 0; } && \
	    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR)/python:$(CURDIR)/tests/torch RESHARD_LIB=$(CURDIR)/$(BUILD)/libreshard.so \
	    prove --timer --directives $(if $(V),-v) --exec $(CUDA_PYTHON) $(sort $(wildcard tests/torch/test_*cuda*.py))

# Without the sanitizers of the compiler, for the one of CUDA.
$(BUILD)/test_device: $(BUILD)/obj/tests/test_device.o $(call objects,obj,$(TEST_HELPERS) $(LIB_SRC))
	@echo "  link  $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS) -lm

# Compiles the kernels without a GPU.
$(BUILD)/compile_kernels: $(BUILD)/obj/tests/cuda/compile_kernels.o $(call objects,obj,$(filter src/base/% src/cuda/% src/memory/% src/layout/%,$(LIB_SRC)))
	@echo "  link  $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)
test-torch: $(BUILD)/compile_kernels
