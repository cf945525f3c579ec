/* expect.h - results of one rank under mpirun, for tests of failures. Included by one file of a test. */
#ifndef EXPECT_H
#define EXPECT_H

#include "reshard.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static int rank, nranks;
static bool good = true; /* all expectations of this rank hold so far */

static void expect(bool holds, const char *what, rsd_status status)
{
    if (holds)
        return;
    good = false;
    printf("# rank %d: %s: %s: %s\n", rank, what, rsd_status_name(status), rsd_error());
}

/* Returns whether the last error contains a text. */
static bool says(const char *text)
{
    return strstr(rsd_error(), text) != NULL;
}

#endif
