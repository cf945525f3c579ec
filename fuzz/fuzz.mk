# A fuzz target is fuzz_NAME.c with its corpus in corpus/NAME. `make fuzz` runs each with libFuzzer, `make -j4 fuzz` four at
# a time; `make test` replays the corpora with gcc's sanitizers. `make fuzz-coverage` prints which branches of the readers
# the corpora, the hostile, costly and golden checkpoints of the tests, and what `make fuzz` found before reach.

FUZZ_NAMES := $(patsubst fuzz/fuzz_%.c,%,$(sort $(wildcard fuzz/fuzz_*.c)))
FUZZ_RUNS := $(addprefix fuzz-run-,$(FUZZ_NAMES))
FUZZ_SECONDS ?= 60
FUZZ_LINK_checkpoint = $(LINK_faults)

$(BUILD)/asan/replay_%: $(BUILD)/asan/fuzz/fuzz_%.o fuzz/replay.c $(call objects,asan,$(LIB_SRC))
	@echo "  link  $@"
	$(Q)$(CC) $(SAN_asan) $(FUZZ_LINK_$*) -std=c11 -D_GNU_SOURCE -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

FUZZ_FLAGS := -std=c11 -g -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
COVERAGE_FLAGS := -std=c11 -g -O1 -fprofile-instr-generate -fcoverage-mapping
FUZZ_HEADERS := $(wildcard include/*.h src/*/*.h fuzz/*.h tests/alloc_faults.h)

$(BUILD)/fuzz/obj/%.o: %.c $(FUZZ_HEADERS)
	@mkdir -p $(@D)
	@echo "  clang $@"
	$(Q)clang $(ALL_CPPFLAGS) $(CPPFLAGS) $(FUZZ_FLAGS) -c -o $@ $<

$(BUILD)/coverage/obj/%.o: %.c $(FUZZ_HEADERS)
	@mkdir -p $(@D)
	@echo "  clang $@"
	$(Q)clang $(ALL_CPPFLAGS) $(CPPFLAGS) $(COVERAGE_FLAGS) -c -o $@ $<

FUZZ_OBJ := $(patsubst %.c,$(BUILD)/fuzz/obj/%.o,$(LIB_SRC))
COVERAGE_OBJ := $(patsubst %.c,$(BUILD)/coverage/obj/%.o,$(LIB_SRC))

$(BUILD)/fuzz/fuzz_%: $(BUILD)/fuzz/obj/fuzz/fuzz_%.o $(FUZZ_OBJ)
	@echo "  link  $@"
	$(Q)clang -fsanitize=fuzzer,address,undefined $(FUZZ_LINK_$*) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

$(BUILD)/coverage/replay_%: $(BUILD)/coverage/obj/fuzz/fuzz_%.o $(BUILD)/coverage/obj/fuzz/replay.o $(COVERAGE_OBJ)
	@echo "  link  $@"
	$(Q)clang -fprofile-instr-generate $(FUZZ_LINK_$*) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)

.PHONY: fuzz fuzz-ready fuzz-coverage $(FUZZ_RUNS)
fuzz-ready: $(BUILD)/ready
	@tools/need.sh clang:clang
	@tools/need.sh "$$(clang -print-runtime-dir)/libclang_rt.fuzzer-$$(uname -m).a:libclang-rt-14-dev"
	@python3 fuzz/more_seeds.py $(BUILD)/fuzz/seeds/checkpoint
	@rm -rf $(BUILD)/fuzz/costly
	@for script in tests/make_costly*.py; do python3 $$script $(BUILD)/fuzz/costly || exit 1; done
	@python3 fuzz/pack.py $(BUILD)/fuzz/seeds/checkpoint tests/bad/* tests/golden/*/ckpt* tests/golden/*/truth.safetensors \
	    $(BUILD)/fuzz/costly/*

fuzz: fuzz-ready
	@$(MAKE) $(addprefix $(BUILD)/fuzz/fuzz_,$(FUZZ_NAMES))
	@$(MAKE) $(FUZZ_RUNS)

FUZZ_LENGTH_checkpoint := 300000
$(FUZZ_RUNS): fuzz-run-%: $(BUILD)/fuzz/fuzz_%
	@mkdir -p $(BUILD)/fuzz/new/$* $(BUILD)/fuzz/seeds/$*
	@echo "== $*"
	@$< -max_total_time=$(FUZZ_SECONDS) -max_len=$(or $(FUZZ_LENGTH_$*),4000) \
	    -timeout=120 -rss_limit_mb=4096 -malloc_limit_mb=512 \
	    -print_final_stats=1 -verbosity=0 -artifact_prefix=$(BUILD)/fuzz/$*- \
	    $(BUILD)/fuzz/new/$* fuzz/corpus/$* $(BUILD)/fuzz/seeds/$*

# What reads a byte of a file: codecs and formats, but for what only writes.
READERS := $(filter-out %_write.c src/format/manifest.c src/format/torch_archive.c src/codec/crc.c,$(filter src/codec/%.c src/format/%.c,$(LIB_SRC)))

fuzz-coverage: fuzz-ready
	@tools/need.sh llvm-cov:llvm llvm-profdata:llvm
	@$(MAKE) $(addprefix $(BUILD)/coverage/replay_,$(FUZZ_NAMES))
	@rm -f $(BUILD)/coverage/*.profraw
	@for name in $(FUZZ_NAMES); do \
	    mkdir -p $(BUILD)/fuzz/new/$$name $(BUILD)/fuzz/seeds/$$name; \
	    LLVM_PROFILE_FILE=$(BUILD)/coverage/$$name.profraw $(BUILD)/coverage/replay_$$name \
	        fuzz/corpus/$$name $(BUILD)/fuzz/new/$$name $(BUILD)/fuzz/seeds/$$name || exit 1; \
	done
	@FUZZ_FAULTS=1 LLVM_PROFILE_FILE=$(BUILD)/coverage/faults.profraw $(BUILD)/coverage/replay_checkpoint
	@llvm-profdata merge -o $(BUILD)/coverage/all.profdata $(BUILD)/coverage/*.profraw
	@llvm-cov report -show-branch-summary -instr-profile=$(BUILD)/coverage/all.profdata \
	    $(BUILD)/coverage/replay_checkpoint \
	    $(addprefix -object $(BUILD)/coverage/replay_,$(filter-out checkpoint,$(FUZZ_NAMES))) $(READERS)
