# make              builds the library and the command in build/
# make demo         shows the main use
# make test         runs the tests that do not need PyTorch
# make test-torch   tests the Python package, also with PyTorch, which it installs in build/venv
# make test-s3      tests s3:// and https:// against a server, which it installs in build/venv-s3
# make test-faults  repeats the tests in which one rank fails, ROUNDS times
# make lint         checks format, static analysis and the rules of the source tree
# make bench        prints results beside the limits of this machine
# make bench-torch  prints results beside those of PyTorch
# make fuzz         fuzzes every parser for FUZZ_SECONDS each
# make fuzz-coverage  prints which branches of the readers the fuzzers reach
# make docs         builds the reference of the C interface: HTML and manual pages in build/docs
# make wheel        builds a wheel with the command in build/wheel, for any Linux with the same or a newer C library
# make abi-check    compares the libraries with the interface of the last release
# make install      installs to PREFIX (/usr/local) and LIBDIR (PREFIX/lib); supports DESTDIR; make uninstall removes it
#
# As root, targets other than all, install and uninstall install missing Debian packages and print their names.
# V=1 shows every command. ZSTD=no builds without support for compressed checkpoints, MPI=no without libreshard_mpi.

VERSION := $(shell sed -n 's/^.define RSD_VERSION  *"\(.*\)"/\1/p' include/reshard.h)
SOVERSION := 1
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
OBJCOPY ?= objcopy
BUILD := build
Q := $(if $(V),,@)
ifeq ($(origin CC),default)
CC := gcc
endif

MODULES := base layout plan memory cuda peer exec codec store format transfer checkpoint
LIB_SRC := $(foreach module,$(MODULES),$(sort $(wildcard src/$(module)/*.c)))
CLI_SRC := $(sort $(wildcard src/cli/*.c))

ALL_CPPFLAGS := -Iinclude $(addprefix -iquote src/,$(MODULES)) -D_GNU_SOURCE
WARNINGS := -Wall -Wextra -Wshadow -Wconversion -Wpedantic -Wstrict-prototypes -Wmissing-prototypes \
            -Wvla -Wpointer-arith -Wcast-qual -Wformat=2
CFLAGS ?= -O2 -g -DNDEBUG
ALL_CFLAGS := -std=c11 -ffp-contract=off $(WARNINGS)
ALL_LDLIBS := -lpthread -ldl
ifneq ($(ZSTD),no)
ALL_CPPFLAGS += -DRSD_HAVE_ZSTD=1
ALL_LDLIBS += -lzstd
endif

# Whether tools/need.sh may install packages: not for make, make install and single files.
MAY_INSTALL := $(filter demo test% lint bench% fuzz% docs wheel abi-%,$(MAKECMDGOALS))
export MAY_INSTALL

.PHONY: all demo test lint bench fuzz install uninstall clean
.DELETE_ON_ERROR:
all: $(BUILD)/libreshard.a $(BUILD)/libreshard.so $(BUILD)/reshard

include tools/variants.mk

# ---- the library ----

HEADERS := $(filter-out include/reshard_mpi.h,$(sort $(wildcard include/*.h)))

$(BUILD)/symbols: $(HEADERS) tools/symbols.sh
	@mkdir -p $(@D)
	$(Q)tools/symbols.sh $(HEADERS) > $@

$(BUILD)/reshard.map: $(BUILD)/symbols
	$(Q)(echo "RESHARD_$(SOVERSION) {"; echo "global:"; sed 's/.*/    &;/' $<; echo "local:"; echo "    *;"; echo "};") > $@

# One object file in which only the functions of the public headers are visible.
$(BUILD)/libreshard.a: $(LIB_OBJ) $(BUILD)/symbols
	$(Q)$(LD) -r -o $(BUILD)/reshard.o $(LIB_OBJ)
	$(Q)$(OBJCOPY) --keep-global-symbols=$(BUILD)/symbols $(BUILD)/reshard.o
	$(Q)rm -f $@
	$(Q)$(AR) rcs $@ $(BUILD)/reshard.o

$(BUILD)/libreshard.so.$(VERSION): $(LIB_OBJ) $(BUILD)/reshard.map
	@echo "  link  $@"
	$(Q)$(CC) -shared -Wl,-soname,libreshard.so.$(SOVERSION) -Wl,--version-script=$(BUILD)/reshard.map \
	    $(LDFLAGS) -o $@ $(LIB_OBJ) $(ALL_LDLIBS) $(LDLIBS)

$(BUILD)/libreshard.so: $(BUILD)/libreshard.so.$(VERSION)
	$(Q)ln -sf libreshard.so.$(VERSION) $(BUILD)/libreshard.so.$(SOVERSION)
	$(Q)ln -sf libreshard.so.$(SOVERSION) $@

$(BUILD)/reshard: $(CLI_OBJ) $(BUILD)/libreshard.a
	@echo "  link  $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $(CLI_OBJ) $(BUILD)/libreshard.a $(ALL_LDLIBS) $(LDLIBS)

include src/mpi/mpi.mk

install uninstall: export LIBS := $(ALL_LDLIBS)
install uninstall: export DESTDIR := $(DESTDIR)
install uninstall: export PREFIX := $(PREFIX)
install uninstall: export LIBDIR := $(LIBDIR)
install uninstall: export BUILD := $(BUILD)
install uninstall: export VERSION := $(VERSION)
install uninstall: export SOVERSION := $(SOVERSION)
install uninstall: export HEADERS := $(HEADERS)
install uninstall: export MPI_FOUND := $(MPI_FOUND)
install: all
	@tools/install.sh install

uninstall:
	@tools/install.sh uninstall

EXAMPLES := $(patsubst examples/%.c,$(BUILD)/examples/%,$(filter-out %_mpi.c,$(sort $(wildcard examples/*.c))))

# Built if a C++ compiler is installed.
CXX_FOUND := $(shell command -v $(CXX) 2>/dev/null)
CPP_EXAMPLE := $(if $(CXX_FOUND),$(BUILD)/examples/plan)
$(BUILD)/examples/plan: examples/plan.cpp include/reshard.h $(BUILD)/libreshard.a
	@mkdir -p $(@D)
	@echo "  c++   $@"
	$(Q)$(CXX) -std=c++11 -Iinclude -Wall -Wextra -Wpedantic -Wshadow -O2 $(LDFLAGS) -o $@ $< \
	    $(BUILD)/libreshard.a $(ALL_LDLIBS) $(LDLIBS)

$(BUILD)/examples/%: $(BUILD)/obj/examples/%.o $(BUILD)/libreshard.a
	@mkdir -p $(@D)
	@echo "  link  $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

# ---- tests ----

include fuzz/fuzz.mk
include tests/tests.mk
include tools/wheel.mk
include tests/torch/torch.mk
include tests/s3/s3.mk
include tests/cuda/cuda.mk
include bench/bench.mk
include tests/mpi/mpi_tests.mk

.PHONY: docs
docs:
	@tools/need.sh doxygen:doxygen python3:python3
	@rm -rf $(BUILD)/docs
	@mkdir -p $(BUILD)/docs
	$(Q)(cat tools/docs/Doxyfile; echo "PROJECT_NUMBER = $(VERSION)"; echo "INPUT = include"; \
	    echo "OUTPUT_DIRECTORY = $(BUILD)/docs") | doxygen -
	@echo "  docs  $(BUILD)/docs/html/index.html, $(BUILD)/docs/man/man3"

# The interface of the last release is in tools/abi. abi-record replaces it; docs/versions.md says when.
.PHONY: abi-check abi-record
abi-check: all
	@tools/need.sh abidiff:abigail-tools readelf:binutils
	@tools/abi.sh check $(BUILD)

abi-record: all
	@tools/need.sh abidw:abigail-tools
	@tools/abi.sh record $(BUILD)

demo: all $(EXAMPLES) $(CPP_EXAMPLE)
	@tools/demo.sh $(BUILD)

lint:
	@tools/need.sh git:git g++:g++ clang:clang clang-format:clang-format clang-tidy:clang-tidy \
	    cppcheck:cppcheck
	@[ "$(MPI)" = no ] || tools/need.sh $(MPICC):libopenmpi-dev || true
	@tools/lint.sh

clean:
	rm -rf $(BUILD)
