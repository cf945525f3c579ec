# A fuzz target is fuzz_NAME.c with its corpus in corpus/NAME. `make fuzz` runs each with libFuzzer;
# `make test` replays the corpora with gcc's sanitizers.

FUZZ_NAMES := $(patsubst fuzz/fuzz_%.c,%,$(sort $(wildcard fuzz/fuzz_*.c)))
FUZZ_SECONDS ?= 60

$(BUILD)/asan/replay_%: $(BUILD)/asan/fuzz/fuzz_%.o fuzz/replay.c $(call objects,asan,$(LIB_SRC))
	@echo "  link  $@"
	$(Q)$(CC) $(SAN_asan) -std=c11 -D_GNU_SOURCE -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

FUZZ_FLAGS := -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all

$(BUILD)/fuzz/fuzz_%: fuzz/fuzz_%.c $(LIB_SRC) $(wildcard include/*.h src/*/*.h)
	@mkdir -p $(@D)
	@echo "  link  $@"
	$(Q)clang $(ALL_CPPFLAGS) $(CPPFLAGS) $(FUZZ_FLAGS) -o $@ $(filter %.c,$^) $(ALL_LDLIBS) $(LDLIBS)

.PHONY: fuzz
fuzz:
	@tools/need.sh clang:clang
	@tools/need.sh "$$(clang -print-runtime-dir)/libclang_rt.fuzzer-$$(uname -m).a:libclang-rt-14-dev"
	@$(MAKE) $(addprefix $(BUILD)/fuzz/fuzz_,$(FUZZ_NAMES))
	@for name in $(FUZZ_NAMES); do \
	    mkdir -p $(BUILD)/fuzz/new/$$name; \
	    echo "== $$name"; \
	    $(BUILD)/fuzz/fuzz_$$name -max_total_time=$(FUZZ_SECONDS) -max_len=4000 -timeout=20 -rss_limit_mb=4096 \
	        -print_final_stats=1 -verbosity=0 -artifact_prefix=$(BUILD)/fuzz/ \
	        $(BUILD)/fuzz/new/$$name fuzz/corpus/$$name || exit 1; \
	done
