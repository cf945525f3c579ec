# The library for MPI. It is separate, so that libreshard does not need MPI. Built if mpicc is found.

MPICC ?= mpicc
MPI_FOUND := $(if $(filter no,$(MPI)),,$(shell command -v $(MPICC) 2>/dev/null))
MPI_SRC := src/mpi/transport_mpi.c
MPI_OBJ := $(call objects,mpi,$(MPI_SRC))

# The compiler wrapper of either MPI calls this compiler.
export OMPI_CC := $(CC)
export MPICH_CC := $(CC)

MPI_EXAMPLES := $(if $(MPI_FOUND),$(patsubst examples/%.c,$(BUILD)/examples/%,$(wildcard examples/*_mpi.c)))

ifneq ($(MPI_FOUND),)
all: $(BUILD)/libreshard_mpi.a $(BUILD)/libreshard_mpi.so $(BUILD)/reshard-mpi
endif

$(BUILD)/examples/%_mpi: $(BUILD)/mpi/examples/%_mpi.o $(BUILD)/libreshard_mpi.a $(BUILD)/libreshard.a
	@mkdir -p $(@D)
	@echo "  link  $@"
	$(Q)$(MPICC) $(LDFLAGS) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

$(BUILD)/mpi/%.o: %.c | $(BUILD)/ready
	@mkdir -p $(@D)
	@echo "  mpicc $@"
	$(Q)$(MPICC) $(ALL_CPPFLAGS) $(CPPFLAGS) $(ALL_CFLAGS) $(CFLAGS) -fPIC -MMD -MP -c -o $@ $<

$(BUILD)/mpi_symbols: include/reshard_mpi.h $(BUILD)/symbols
	$(Q)tools/symbols.sh $< | grep -vxFf $(BUILD)/symbols > $@

$(BUILD)/reshard_mpi.map: $(BUILD)/mpi_symbols
	$(Q)(echo "RESHARD_MPI_$(SOVERSION) {"; echo "global:"; sed 's/.*/    &;/' $<; echo "local:"; echo "    *;"; echo "};") > $@

$(BUILD)/libreshard_mpi.a: $(MPI_OBJ)
	$(Q)rm -f $@
	$(Q)$(AR) rcs $@ $^

$(BUILD)/libreshard_mpi.so.$(VERSION): $(MPI_OBJ) $(BUILD)/reshard_mpi.map $(BUILD)/libreshard.so
	@echo "  link  $@"
	$(Q)$(MPICC) -shared -Wl,-soname,libreshard_mpi.so.$(SOVERSION) -Wl,--version-script=$(BUILD)/reshard_mpi.map \
	    $(LDFLAGS) -o $@ $(MPI_OBJ) -L$(BUILD) -lreshard $(LDLIBS)

$(BUILD)/libreshard_mpi.so: $(BUILD)/libreshard_mpi.so.$(VERSION)
	$(Q)ln -sf libreshard_mpi.so.$(VERSION) $(BUILD)/libreshard_mpi.so.$(SOVERSION)
	$(Q)ln -sf libreshard_mpi.so.$(SOVERSION) $@

# The command, started by mpirun or srun.
MPI_COMMAND_OBJ := $(call objects,mpi,src/mpi/launch.c) $(filter-out $(BUILD)/obj/src/cli/main.o,$(CLI_OBJ))

$(BUILD)/mpi/src/mpi/launch.o: ALL_CPPFLAGS += -iquote src/cli

$(BUILD)/reshard-mpi: $(MPI_COMMAND_OBJ) $(BUILD)/libreshard_mpi.a $(BUILD)/libreshard.a
	@echo "  link  $@"
	$(Q)$(MPICC) $(LDFLAGS) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)
