/* budget.c - how much work a file may cause: in proportion to the bytes that are read of it.
 *
 * A short file can describe a lot of work: one list that many entries refer to, one name that is looked up a
 * million times. So each call that reads a checkpoint starts a budget for its thread. Every byte that is read
 * adds to it. Everything that walks, copies or prints data takes from it, also for results that are thrown
 * away. Functions stop when it is used up, in whatever state, and the end of the budget makes that an error.
 */
#include "base.h"

enum { STEPS_PER_BYTE = 20, READS_PER_BYTE = 2, MEMORY_PER_BYTE = 24, START_MEMORY = 16 << 20 };
enum { READ_STEPS = 64, READ_STEP_NBYTES = 128 }; /* of one read, and of its bytes */

static _Thread_local struct budget *current __attribute__((tls_model("initial-exec")));

static int64_t add_clamped(int64_t sum, uint64_t nbytes, int64_t factor)
{
    int64_t more = nbytes > (uint64_t)(INT64_MAX / factor) ? INT64_MAX : (int64_t)nbytes * factor;
    return add_i64(sum, more, &sum) ? sum : INT64_MAX;
}

void budget_begin(struct budget *budget, int64_t spare_steps, bool of_files)
{
    *budget = (struct budget){.steps = spare_steps,
                              .spare = spare_steps,
                              .memory = START_MEMORY,
                              .of_files = of_files,
                              .outer = current};
    current = budget;
}

bool budget_counts_files(void)
{
    return current && current->of_files;
}

void budget_add_file(uint64_t nbytes)
{
    if (budget_counts_files())
        current->input_left = add_clamped(current->input_left, nbytes, READS_PER_BYTE);
}

void budget_add_input(uint64_t nbytes)
{
    struct budget *budget = current;
    if (!budget)
        return;
    budget_take(READ_STEPS + nbytes / READ_STEP_NBYTES);
    if (budget->of_files && nbytes > (uint64_t)budget->input_left) { /* read again and again */
        budget_take((nbytes - (uint64_t)budget->input_left) / STEP_NBYTES);
        nbytes = (uint64_t)budget->input_left;
    }
    budget->input_left -= budget->of_files ? (int64_t)nbytes : 0;
    budget->steps = add_clamped(budget->steps, nbytes, STEPS_PER_BYTE);
    budget->memory = add_clamped(budget->memory, nbytes, MEMORY_PER_BYTE);
}

/* Takes from what is left of the current budget: its steps or its memory. */
static bool take_from(int64_t *left, uint64_t n)
{
    if (current->exceeded || n > (uint64_t)*left) {
        current->exceeded = true;
        return false;
    }
    *left -= (int64_t)n;
    return true;
}

bool budget_take(uint64_t nsteps)
{
    return !current || take_from(&current->steps, nsteps);
}

bool budget_take_memory(uint64_t nbytes)
{
    return !current || take_from(&current->memory, nbytes);
}

void budget_return_memory(uint64_t nbytes)
{
    if (current)
        current->memory = add_clamped(current->memory, nbytes, 1);
}

rsd_status budget_fail(void)
{
    if (current)
        current->reported = true;
    return fail(RSD_EFORMAT,
                "reading takes more work than %d steps and %d bytes of memory for each byte read",
                (int)STEPS_PER_BYTE, (int)MEMORY_PER_BYTE);
}

rsd_status budget_use(uint64_t nsteps)
{
    return budget_take(nsteps) ? RSD_OK : budget_fail();
}

rsd_status budget_use_memory(uint64_t nbytes)
{
    return budget_take_memory(nbytes) ? RSD_OK : budget_fail();
}

rsd_status budget_end(struct budget *budget, rsd_status status, int64_t *spare_steps)
{
    current = budget->outer;
    if (spare_steps)
        *spare_steps = min_i64(budget->spare, budget->exceeded ? 0 : budget->steps);
    bool fatal = status == RSD_EIO || status == RSD_ENOENT;
    if (!budget->exceeded || fatal || (budget->reported && status == RSD_EFORMAT))
        return status; /* an error that was reported names the file */
    return budget_fail();
}
