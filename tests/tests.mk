# Every test is a program that prints TAP, run by prove. All run with the address and undefined-behaviour sanitizers.
# Tests that use threads also run with the thread sanitizer.

comma := ,
TEST_HELPERS := tests/oracle.c tests/random.c tests/truth.c tests/folder.c tests/cases.c tests/stash_cases.c tests/workers.c tests/gpu.c tests/device_transport.c
TEST_NAMES := $(patsubst tests/test_%.c,%,$(sort $(wildcard tests/test_*.c)))
TSAN_NAMES := pool move load save items exchange exchange_wrong thread_group gather stash stash_wrong step transport collective collective_save \
    collective_stops records
TESTS = $(addprefix $(BUILD)/asan/test_,$(TEST_NAMES)) $(addprefix $(BUILD)/tsan/test_,$(TSAN_NAMES)) \
         tests/cli.sh tests/costly.sh tests/terminal.sh tests/file_systems.sh tests/completion.sh tests/examples.sh \
         tests/reflink.sh \
         tests/install.sh tests/abi.sh tests/mpi.sh tests/mpi/faults.sh tests/hosts.sh tests/mpi/command.sh \
         $(addprefix $(BUILD)/asan/replay_,$(FUZZ_NAMES))

ASAN_EXAMPLES := $(patsubst $(BUILD)/%,$(BUILD)/asan/%,$(EXAMPLES))

LINK_faults := -Wl,--wrap=calloc,--wrap=realloc
LINK_stash_faults := $(LINK_faults)
LINK_move := -Wl,--wrap=dlopen
LINK_rules := $(LINK_faults)
LINK_limits := $(addprefix -Wl$(comma)--wrap=,fallocate fstatfs ZSTD_decompressStream)
LINK_output_links := $(addprefix -Wl$(comma)--wrap=,flock renameat2)
LINK_input_links := -Wl,--wrap=fstat
LINK_records := -Wl,--wrap=pread
LINK_collective_stops := -Wl,--wrap=pwrite
LINK_disk_faults := $(addprefix -Wl$(comma)--wrap=,calloc realloc openat pread pwrite fsync rename renameat renameat2)

.PHONY: test test-ready test-mpi-ready test-tools-ready test-all
test-ready:
	@tools/need.sh prove:perl

# A second make, since variables of the first do not know packages that test-ready installed.
test: test-ready test-mpi-ready test-tools-ready
	@$(MAKE) --no-print-directory test-all

test-mpi-ready:
	@[ "$(MPI)" = no ] || tools/need.sh $(MPICC):libopenmpi-dev mpirun:openmpi-bin ip:iproute2 || \
	    echo "MPI is not installed; its tests are skipped"

# Without these, the tests that use them are skipped.
test-tools-ready:
	@tools/need.sh cmake:cmake pkg-config:pkg-config man:man-db abidiff:abigail-tools doxygen:doxygen || echo "some tests are skipped"

test-all: all $(filter $(BUILD)/%,$(TESTS)) $(BUILD)/asan/reshard $(ASAN_EXAMPLES) $(CPP_EXAMPLE) $(MPI_EXAMPLES)
	TSAN_OPTIONS=halt_on_error=1 BUILD_DIR="$(CURDIR)/$(BUILD)" EXAMPLES="$(CURDIR)/$(BUILD)/asan/examples" \
	    CPP_EXAMPLE="$(addprefix $(CURDIR)/,$(CPP_EXAMPLE))" \
	    RESHARD="$(CURDIR)/$(BUILD)/asan/reshard" PLAIN_RESHARD="$(CURDIR)/$(BUILD)/reshard" RESHARD_MPI="$(CURDIR)/$(BUILD)/reshard-mpi" \
	    MPI_TESTS="$(if $(MPI_FOUND),$(CURDIR)/$(BUILD)/asan/mpi)" \
	    MPI_EXAMPLES="$(if $(MPI_FOUND),$(CURDIR)/$(BUILD)/examples)" \
	    prove --timer --failures -j2 $(if $(V),-v) $(TESTS)

$(BUILD)/asan/test_%: $(BUILD)/asan/tests/test_%.o $(call objects,asan,$(TEST_HELPERS) $(LIB_SRC))
	@echo "  link  $@"
	$(Q)$(CC) $(SAN_asan) $(LINK_$*) -o $@ $(filter %.o,$^) $(ALL_LDLIBS) $(LDLIBS) -lm

# This one also tests files that the command writes.
$(BUILD)/asan/test_output_links: $(filter-out %/main.o,$(call objects,asan,$(CLI_SRC)))

# A GPU in software, as the two libraries that are opened at run time.
EMULATOR := $(BUILD)/asan/emulator/libcuda.so.1 $(BUILD)/asan/emulator/libnvrtc.so.13
EMULATOR_SRC := $(sort $(wildcard tests/cuda/emulator*.c))
$(EMULATOR): $(BUILD)/asan/emulator/lib%: $(EMULATOR_SRC) tests/cuda/emulator.h $(wildcard src/cuda/*.h)
	@mkdir -p $(@D)
	@echo "  link  $@"
	$(Q)$(CC) $(ALL_CPPFLAGS) $(CPPFLAGS) $(ALL_CFLAGS) $(SAN_asan) -Itests/cuda -fPIC -shared -Wl,-soname,lib$* -o $@ $(EMULATOR_SRC) -lm
$(addprefix $(BUILD)/asan/test_,device device_files devices): $(EMULATOR)

$(BUILD)/tsan/test_%: $(BUILD)/tsan/tests/test_%.o $(call objects,tsan,$(TEST_HELPERS) $(LIB_SRC))
	@echo "  link  $@"
	$(Q)$(CC) $(SAN_tsan) $(LINK_$*) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS) -lm

$(BUILD)/asan/reshard: $(call objects,asan,$(LIB_SRC) $(CLI_SRC))
	@echo "  link  $@"
	$(Q)$(CC) $(SAN_asan) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

$(BUILD)/asan/examples/%: $(BUILD)/asan/examples/%.o $(call objects,asan,$(LIB_SRC))
	@echo "  link  $@"
	$(Q)$(CC) $(SAN_asan) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

.SECONDARY:
