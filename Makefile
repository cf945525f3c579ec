# make              builds the library and the command in build/
# make demo         shows the main use
# make test         runs the tests that do not need PyTorch
# make test-torch   tests the Python package, also with PyTorch, which it installs in build/venv
# make test-s3      tests s3:// and https:// against a server, which it installs in build/venv-s3
# make lint         checks format, static analysis and the rules of the source tree
# make bench        prints results beside the limits of this machine
# make bench-torch  prints results beside those of PyTorch
# make fuzz         fuzzes every parser for FUZZ_SECONDS each
# make install      installs to PREFIX (/usr/local); supports DESTDIR
#
# V=1 shows every command. ZSTD=no builds without support for compressed checkpoints, MPI=no without libreshard_mpi.

VERSION := $(shell sed -n 's/^.define RSD_VERSION  *"\(.*\)"/\1/p' include/reshard.h)
SOVERSION := 1
PREFIX ?= /usr/local
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

.PHONY: all demo test lint bench fuzz install clean
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

install: all $(MPI_INSTALL)
	install -d "$(DESTDIR)$(PREFIX)/bin" "$(DESTDIR)$(PREFIX)/include" "$(DESTDIR)$(PREFIX)/lib/pkgconfig"
	install -m 755 $(BUILD)/reshard "$(DESTDIR)$(PREFIX)/bin/"
	install -m 644 $(HEADERS) "$(DESTDIR)$(PREFIX)/include/"
	install -m 644 $(BUILD)/libreshard.a "$(DESTDIR)$(PREFIX)/lib/"
	install -m 755 $(BUILD)/libreshard.so.$(VERSION) "$(DESTDIR)$(PREFIX)/lib/"
	$(Q)ln -sf libreshard.so.$(VERSION) "$(DESTDIR)$(PREFIX)/lib/libreshard.so.$(SOVERSION)"
	$(Q)ln -sf libreshard.so.$(SOVERSION) "$(DESTDIR)$(PREFIX)/lib/libreshard.so"
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|; s|@LIBS@|$(ALL_LDLIBS)|' tools/reshard.pc.in > $(BUILD)/reshard.pc
	install -m 644 $(BUILD)/reshard.pc "$(DESTDIR)$(PREFIX)/lib/pkgconfig/"
	install -d "$(DESTDIR)$(PREFIX)/share/doc/reshard"
	install -m 644 README.md LICENSE docs/*.md "$(DESTDIR)$(PREFIX)/share/doc/reshard/"
	install -d "$(DESTDIR)$(PREFIX)/share/man/man1" "$(DESTDIR)$(PREFIX)/share/zsh/site-functions" \
	    "$(DESTDIR)$(PREFIX)/share/bash-completion/completions"
	install -m 644 man/reshard.1 "$(DESTDIR)$(PREFIX)/share/man/man1/"
	install -m 644 completion/reshard.bash "$(DESTDIR)$(PREFIX)/share/bash-completion/completions/reshard"
	install -m 644 completion/_reshard "$(DESTDIR)$(PREFIX)/share/zsh/site-functions/"
	@if [ -z "$(DESTDIR)" ] && [ "$$(id -u)" = 0 ] && command -v ldconfig >/dev/null; then ldconfig; fi

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
include tests/torch/torch.mk
include tests/s3/s3.mk
include tests/cuda/cuda.mk
include bench/bench.mk
include tests/mpi/mpi_tests.mk

demo: all $(EXAMPLES) $(CPP_EXAMPLE)
	@tools/demo.sh $(BUILD)

lint:
	@tools/need.sh git:git g++:g++ clang:clang clang-format:clang-format clang-tidy:clang-tidy \
	    cppcheck:cppcheck
	@tools/lint.sh

clean:
	rm -rf $(BUILD)
