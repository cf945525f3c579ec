/* scenario.c - tests in which one rank fails: what a rank expects, and a clock that all ranks share. */
#include "scenario.h"

#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

int rank, nranks;
MPI_Comm scenario_comm = MPI_COMM_NULL;

enum { MAX_RANKS = 64, TICK_NANOSECONDS = 5000000 };

/* In memory that all ranks share. */
static struct shared_clock {
    _Atomic int64_t nanoseconds;
    _Atomic int64_t ticked_at; /* real time */
    _Atomic uint64_t tick;
    struct {
        _Atomic uint64_t noticed;     /* the last tick that it knows */
        _Atomic int64_t absent_until; /* it takes no part before this time */
        _Atomic int meetings;         /* that it has come to */
        _Atomic int done_in;          /* the number of the scenario */
    } ranks[MAX_RANKS];
} * shared;

static int scenario_number;
static const char *scenario_name;
static bool good; /* all expectations of this rank hold so far */

/* ---- the clock ---- */

int __real_clock_gettime(clockid_t clock, struct timespec *time);
int __wrap_clock_gettime(clockid_t clock, struct timespec *time);
double __wrap_MPI_Wtime(void);

static int64_t real_nanoseconds(void)
{
    struct timespec now;
    __real_clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Adds the real time since the last tick, but at most TICK_NANOSECONDS. */
static void advance_clock(uint64_t tick)
{
    int64_t now = real_nanoseconds(), passed = now - atomic_load(&shared->ticked_at);
    if (!atomic_compare_exchange_strong(&shared->tick, &tick, tick + 1))
        return;
    atomic_store(&shared->ticked_at, now);
    atomic_fetch_add(&shared->nanoseconds, passed < 0                  ? 0
                                           : passed > TICK_NANOSECONDS ? TICK_NANOSECONDS
                                                                       : passed);
}

/* Looks at the clock. It ticks when all ranks that take part have noticed the last tick. A rank that looks again
 * before that leaves the processor to the others. */
static int64_t look_at_clock(void)
{
    uint64_t tick = atomic_load(&shared->tick);
    int64_t now = atomic_load(&shared->nanoseconds);
    bool all = true;
    if (atomic_exchange(&shared->ranks[rank].noticed, tick) == tick)
        usleep(50);
    for (int i = 0; i < nranks && all; i++)
        all = now < atomic_load(&shared->ranks[i].absent_until) ||
              atomic_load(&shared->ranks[i].noticed) == tick;
    if (all)
        advance_clock(tick);
    return atomic_load(&shared->nanoseconds);
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *time)
{
    if (clock != CLOCK_MONOTONIC || !shared)
        return __real_clock_gettime(clock, time);
    int64_t now = look_at_clock();
    *time = (struct timespec){.tv_sec = now / 1000000000, .tv_nsec = now % 1000000000};
    return 0;
}

double __wrap_MPI_Wtime(void)
{
    return 1e-9 * (double)look_at_clock();
}

void clock_skip(double seconds)
{
    atomic_fetch_add(&shared->nanoseconds, (int64_t)(1e9 * seconds));
}

void take_no_part(void)
{
    atomic_store(&shared->ranks[rank].absent_until, INT64_MAX);
}

static void take_part(void)
{
    atomic_store(&shared->ranks[rank].absent_until, 0);
}

void let_others_wait(double fraction)
{
    int64_t until = look_at_clock() + (int64_t)(1e9 * fraction * test_timeout);
    atomic_store(&shared->ranks[rank].absent_until, until);
    while (look_at_clock() < until)
        sched_yield();
}

/* ---- ranks that wait for each other ---- */

void pause_rank(void)
{
    int found;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
    usleep(200);
}

static void await_meeting(void)
{
    int own = atomic_fetch_add(&shared->ranks[rank].meetings, 1) + 1;
    for (int i = 0; i < nranks; i++)
        while (atomic_load(&shared->ranks[i].meetings) < own)
            pause_rank();
}

void meet_ranks(void)
{
    take_no_part();
    await_meeting();
    take_part();
    await_meeting(); /* now all take part */
}

void set_done(void)
{
    atomic_store(&shared->ranks[rank].done_in, scenario_number);
}

bool is_done(int of_rank)
{
    return atomic_load(&shared->ranks[of_rank].done_in) == scenario_number;
}

void await_others(void)
{
    take_no_part();
    for (int i = 0; i < nranks; i++)
        while (i != BAD && !is_done(i))
            pause_rank();
    take_part();
}

/* ---- results ---- */

void expect(bool holds, const char *what, rsd_status status)
{
    if (holds)
        return;
    good = false;
    printf("# %s: rank %d: %s: %s: %s\n", scenario_name, rank, what, rsd_status_name(status),
           rsd_error());
}

bool says(const char *text)
{
    return strstr(rsd_error(), text) != NULL;
}

static void print_result(void)
{
    if (good)
        printf("good %s %d\n", scenario_name, rank);
    fflush(stdout);
}

void scenario_leave(void)
{
    print_result();
    take_no_part();
    atomic_store(&shared->ranks[rank].meetings, INT_MAX);
}

/* ---- starting and ending ---- */

void scenario_start(int *argc, char ***argv)
{
    int memory[2] = {0}; /* a process, and a descriptor of it */
    char path[64];
    MPI_Init(argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    if (rank == 0) {
        memory[0] = getpid();
        memory[1] = memfd_create("clock", 0);
        if (ftruncate(memory[1], sizeof *shared))
            exit(1);
    }
    MPI_Bcast(memory, 2, MPI_INT, 0, MPI_COMM_WORLD);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", memory[0], memory[1]);
    int fd = open(path, O_RDWR);
    void *mapped = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (nranks > MAX_RANKS || fd < 0 || mapped == MAP_FAILED) {
        perror(path);
        exit(1);
    }
    shared = mapped;
    MPI_Barrier(MPI_COMM_WORLD);
}

/* Runs one scenario with a communicator of its own. */
static void run_scenario(const struct scenario *scenario)
{
    scenario_number++;
    scenario_name = scenario->name;
    good = true;
    MPI_Comm_dup(MPI_COMM_WORLD, &scenario_comm);
    meet_ranks();
    scenario->run();
    print_result();
    meet_ranks(); /* a rank that ends earlier would be reported instead of BAD */
}

void scenario_run_all(char *const *names, int nscenarios, const struct scenario *scenarios)
{
    for (; *names; names++) {
        int i = 0;
        while (i < nscenarios && strcmp(*names, scenarios[i].name) != 0)
            i++;
        if (i == nscenarios)
            break; /* the caller misses its result */
        run_scenario(&scenarios[i]);
    }
    fflush(stdout);
    _exit(0); /* with a dead rank MPI_Finalize would wait */
}
