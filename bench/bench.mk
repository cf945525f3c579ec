# Benchmarks: programs that print each result beside the limit, measured in the same run.

BENCH_NAMES := $(patsubst bench/bench_%.c,%,$(sort $(wildcard bench/bench_*.c)))

.PHONY: bench
bench: $(addprefix $(BUILD)/bench_,$(BENCH_NAMES)) $(BUILD)/reshard
	@rm -f $(BUILD)/bench.json
	@for name in $(BENCH_NAMES); do $(BUILD)/bench_$$name $(BUILD)/bench.json || exit 1; done
	$(if $(MPI_FOUND),@$(MAKE) --no-print-directory bench-mpi)

$(BUILD)/bench_%: $(BUILD)/obj/bench/bench_%.o $(BUILD)/libreshard.a
	@echo "  link  $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

# Benchmarks over MPI, and beside ScaLAPACK, if they are installed.
SCALAPACK := $(wildcard /usr/lib/*/libscalapack-openmpi.so)
MPIRUN := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
    OMPI_MCA_mpi_yield_when_idle=1 mpirun

.PHONY: bench-mpi
bench-mpi: $(BUILD)/bench_mpi $(if $(SCALAPACK),$(BUILD)/bench_scalapack)
	@$(MPIRUN) -np 4 $(BUILD)/bench_mpi $(BUILD)/bench.json
	@$(if $(SCALAPACK),$(MPIRUN) -np 4 $(BUILD)/bench_scalapack $(BUILD)/bench.json,\
	    echo "no ScaLAPACK here (apt-get install libscalapack-openmpi-dev)")
	@tools/hosts.sh $(CURDIR)/$(BUILD)/bench_mpi $(CURDIR)/$(BUILD)/bench.json hosts || [ $$? = 77 ]

$(BUILD)/mpi/bench/%.o: ALL_CPPFLAGS += -Ibench
$(BUILD)/bench_scalapack: ALL_LDLIBS += -lscalapack-openmpi
$(BUILD)/bench_mpi $(BUILD)/bench_scalapack: $(BUILD)/bench_%: $(BUILD)/mpi/bench/mpi/bench_%.o \
        $(BUILD)/libreshard_mpi.a $(BUILD)/libreshard.a
	@echo "  link  $@"
	$(Q)$(MPICC) $(LDFLAGS) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

# On a GPU, beside copies by the driver.
.PHONY: bench-cuda
bench-cuda: $(BUILD)/bench_cuda $(BUILD)/libreshard.so
	@RESHARD_GPU=1 $(BUILD)/bench_cuda $(BUILD)/bench.json /dev/shm
	@RESHARD_GPU=1 $(MPIRUN) -np 4 $(BUILD)/bench_cuda $(BUILD)/bench.json ranks
	@PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR)/python RESHARD_LIB=$(CURDIR)/$(BUILD)/libreshard.so \
	    $(CUDA_PYTHON) bench/bench_torch_cuda.py

$(BUILD)/bench_cuda: ALL_CPPFLAGS += -Itests
# With the object files of the library, since tests/gpu.c compiles kernels with its functions for NVRTC.
$(BUILD)/bench_cuda: $(BUILD)/mpi/bench/cuda/bench_cuda.o $(BUILD)/obj/tests/gpu.o $(BUILD)/libreshard_mpi.a $(LIB_OBJ)
	@echo "  link  $@"
	$(Q)$(MPICC) $(LDFLAGS) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

# dcp.load, dcp.save and the like, ours and torch's in turns; in the environment of the torch tests.
.PHONY: bench-torch
bench-torch: $(BUILD)/libreshard.so $(BUILD)/venv/ready
	@for name in $(sort $(wildcard bench/bench_torch_*.py)); do \
	    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR)/python RESHARD_LIB=$(CURDIR)/$(BUILD)/libreshard.so \
	        $(TORCH_PYTHON) $$name || exit 1; done

# Checkpoints of trainers beside their own tools. ORBAX_PYTHON and DEEPSPEED_PYTHON name Pythons that have them.
.PHONY: bench-trainers
bench-trainers: $(BUILD)/reshard $(BUILD)/venv/ready
	@PYTHONDONTWRITEBYTECODE=1 $(TORCH_PYTHON) bench/bench_trainers.py $(BUILD)/reshard

# Reading and writing s3:// beside as many curls at once.
.PHONY: bench-s3
bench-s3: $(BUILD)/libreshard.so $(BUILD)/venv-s3/ready
	@tools/need.sh curl:curl
	@PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR)/python RESHARD_LIB=$(CURDIR)/$(BUILD)/libreshard.so \
	    $(S3_PYTHON) bench/bench_storage.py

# A merge that shares extents on XFS, beside cp. Needs root.
.PHONY: bench-reflink
bench-reflink: $(BUILD)/reshard
	@tools/need.sh mkfs.xfs:xfsprogs bc:bc
	@RESHARD=$(CURDIR)/$(BUILD)/reshard BUILD=$(CURDIR)/$(BUILD) sh bench/bench_reflink.sh
