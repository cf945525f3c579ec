# Benchmarks: programs that print ours beside the limit of the same run.

BENCH_NAMES := $(patsubst bench/bench_%.c,%,$(sort $(wildcard bench/bench_*.c)))

.PHONY: bench
bench: $(addprefix $(BUILD)/bench_,$(BENCH_NAMES)) $(BUILD)/reshard
	@rm -f $(BUILD)/bench.json
	@for name in $(BENCH_NAMES); do $(BUILD)/bench_$$name $(BUILD)/bench.json || exit 1; done

$(BUILD)/bench_%: $(BUILD)/obj/bench/bench_%.o $(BUILD)/libreshard.a
	@echo "  link  $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(ALL_LDLIBS) $(LDLIBS)
