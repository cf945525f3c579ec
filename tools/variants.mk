# Builds the same sources in several variants: plain for use, with sanitizers for tests.
#   build/obj/...    plain          build/asan/...   address and undefined behaviour
#   build/tsan/...   threads

SAN_asan := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g
SAN_tsan := -fsanitize=thread -O1 -g

objects = $(patsubst %.c,$(BUILD)/$(1)/%.o,$(2))

LIB_OBJ := $(call objects,obj,$(LIB_SRC))
CLI_OBJ := $(call objects,obj,$(CLI_SRC))

# Before the first compilation: checks that the compiler finds its headers, and zstd.
$(BUILD)/ready:
	@mkdir -p $(@D)
	@tools/need.sh "$(CC):gcc" "$(LD):binutils" "$(OBJCOPY):binutils"
	@echo '#include <stdio.h>' | $(CC) -E - >/dev/null 2>&1 || tools/need.sh /usr/include/stdio.h:libc6-dev
	@[ "$(ZSTD)" = no ] || echo '#include <zstd.h>' | $(CC) $(CPPFLAGS) -E - >/dev/null 2>&1 || \
	    tools/need.sh /usr/include/zstd.h:libzstd-dev || { echo "or build without it: make ZSTD=no" >&2; exit 1; }
	@touch $@

$(BUILD)/obj/%.o: %.c | $(BUILD)/ready
	@mkdir -p $(@D)
	@echo "  cc    $@"
	$(Q)$(CC) $(ALL_CPPFLAGS) $(CPPFLAGS) $(ALL_CFLAGS) $(CFLAGS) -fPIC -MMD -MP -c -o $@ $<

$(BUILD)/asan/%.o: %.c | $(BUILD)/ready
	@mkdir -p $(@D)
	@echo "  cc    $@"
	$(Q)$(CC) $(ALL_CPPFLAGS) $(CPPFLAGS) $(ALL_CFLAGS) $(SAN_asan) -MMD -MP -c -o $@ $<

$(BUILD)/tsan/%.o: %.c | $(BUILD)/ready
	@mkdir -p $(@D)
	@echo "  cc    $@"
	$(Q)$(CC) $(ALL_CPPFLAGS) $(CPPFLAGS) $(ALL_CFLAGS) $(SAN_tsan) -MMD -MP -c -o $@ $<

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
