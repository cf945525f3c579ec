# Tests between processes, under mpirun. They are built if mpicc is found. The leak check is off, since MPI does not free
# everything.

MPI_TEST_NAMES := $(patsubst tests/mpi/%.c,%,$(sort $(wildcard tests/mpi/test_*.c)))
SHARED_CLOCK := -Wl,--wrap=clock_gettime,--wrap=MPI_Wtime
LINK_test_mpi_faults := -Wl,--wrap=calloc,--wrap=realloc $(SHARED_CLOCK)
LINK_test_mpi_gpu := $(SHARED_CLOCK)
MPI_TESTS := $(addprefix $(BUILD)/asan/mpi/,$(MPI_TEST_NAMES))

$(BUILD)/asan/mpi/%.o: %.c | $(BUILD)/ready
	@mkdir -p $(@D)
	@echo "  mpicc $@"
	$(Q)$(MPICC) $(ALL_CPPFLAGS) -Itests $(CPPFLAGS) $(ALL_CFLAGS) $(SAN_asan) -MMD -MP -c -o $@ $<

$(BUILD)/asan/mpi/%: $(BUILD)/asan/mpi/tests/mpi/%.o $(call objects,asan/mpi,$(MPI_SRC)) \
                     $(call objects,asan,$(TEST_HELPERS) $(LIB_SRC))
	@echo "  link  $@"
	$(Q)$(MPICC) $(SAN_asan) $(LINK_$*) -o $@ $(filter %.o,$^) $(ALL_LDLIBS) $(LDLIBS) -lm
$(BUILD)/asan/mpi/test_mpi $(BUILD)/asan/mpi/test_mpi_gpu: $(EMULATOR)
$(BUILD)/asan/mpi/test_mpi_faults $(BUILD)/asan/mpi/test_mpi_gpu: $(call objects,asan/mpi,tests/mpi/scenario.c)

ifneq ($(MPI_FOUND),)
test-all: $(MPI_TESTS)
endif

# The scenarios in which one rank fails, ROUNDS times over. Stops at the first round that differs.
ROUNDS := 10
.PHONY: test-faults repeat-faults
test-faults: test-mpi-ready
	@$(MAKE) --no-print-directory repeat-faults

repeat-faults: $(if $(MPI_FOUND),$(addprefix $(BUILD)/asan/mpi/,test_mpi_faults test_mpi_gpu))
	@MPI_TESTS="$(if $(MPI_FOUND),$(CURDIR)/$(BUILD)/asan/mpi)" FAULTS_OUT="$(CURDIR)/$(BUILD)/faults" \
	    nice -n 10 tests/mpi/faults.sh $(ROUNDS)

# The same tests with MPICH, on two ranks.
.PHONY: test-mpich
test-mpich:
	@tools/need.sh mpicc.mpich:libmpich-dev mpirun.mpich:mpich
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/mpich MPICC=mpicc.mpich build-mpi-tests
	MPI_TESTS=$(CURDIR)/$(BUILD)/mpich/asan/mpi prove --timer $(if $(V),-v) tests/mpich.sh

.PHONY: build-mpi-tests
build-mpi-tests: $(MPI_TESTS)
