/* scenario.h - tests in which one rank fails: what a rank expects, and a clock that all ranks share.
 *
 * The library reads this clock. It stands still while a rank that takes part does not look at it, so a rank that the
 * machine does not run is never late. Ranks wait for each other in shared memory, since MPI may wait for a dead rank.
 */
#ifndef SCENARIO_H
#define SCENARIO_H

#include "reshard_mpi.h"

#include <stdbool.h>

enum { BAD = 1 };                        /* the rank that fails */
static const double test_timeout = 0.25; /* seconds of the shared clock */
extern int rank, nranks;                 /* of MPI_COMM_WORLD */
extern MPI_Comm scenario_comm;           /* of the current scenario only */

struct scenario {
    const char *name;
    void (*run)(void);
};

/* Calls MPI_Init, and opens the shared clock. */
void scenario_start(int *argc, char ***argv);

/* Runs the scenarios that are named one after the other, and ends the process. Each rank prints "good NAME RANK" if all
 * its expectations were met. */
void scenario_run_all(char *const *names, int nscenarios, const struct scenario *scenarios);

void expect(bool holds, const char *what, rsd_status status);

/* Returns whether the last error contains a text. */
bool says(const char *text);

/* Adds to the shared clock. */
void clock_skip(double seconds);

/* From now on the clock does not wait for this rank. */
void take_no_part(void);
/* Takes no part while the other ranks wait for a fraction of the time-out. */
void let_others_wait(double fraction);

/* Sleeps for a moment. Other ranks may need the progress of MPI on this rank, which continues meanwhile. */
void pause_rank(void);

/* Waits until all ranks have called it, except dead ones. A rank that waits here takes no part. */
void meet_ranks(void);

/* Says that this rank has done what another rank waits for, and whether a rank has. Until the end of the scenario. */
void set_done(void);
bool is_done(int of_rank);
/* Takes no part until all ranks except BAD have called set_done. */
void await_others(void);

/* Prints the result of a rank that ends before the scenario does. */
void scenario_leave(void);

#endif
