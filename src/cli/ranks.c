/* ranks.c - one command, many processes: rank 0 talks, the others are silent.
 *
 * What they print goes nowhere, since rank 0 prints the same. But what only one of them knows has to be said:
 * its complaints are kept, and where all compare how it went, it says them.
 */
#include "cli.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    const rsd_transport *transport; /* NULL: one process */
    FILE *loud;                     /* what was standard error */
    char *complaint;                /* the first that was not said */
    bool met; /* some meeting was held: who ends now does so where the others know of it */
    bool lost;
} ranks;

const rsd_transport *together(void)
{
    return ranks.transport;
}

static bool is_silent(void)
{
    return ranks.transport && ranks.transport->rank > 0;
}

void together_start(const rsd_transport *transport)
{
    ranks.transport = transport && transport->nranks > 1 ? transport : NULL;
    if (!is_silent())
        return;
    int loud = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    ranks.loud = loud < 0 ? NULL : fdopen(loud, "w");
    int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (nowhere < 0)
        return;
    dup2(nowhere, STDOUT_FILENO);
    dup2(nowhere, STDERR_FILENO);
    close(nowhere);
}

void together_end(void)
{
    if (ranks.loud)
        fclose(ranks.loud);
    free(ranks.complaint);
    ranks.loud = NULL;
    ranks.complaint = NULL;
    ranks.transport = NULL;
    ranks.met = false;
}

void keep_complaint(const char *verb, const char *text)
{
    if (is_silent() && !ranks.complaint)
        ranks.complaint = need_text("reshard%s%s: rank %d: %s", verb ? " " : "", verb ? verb : "",
                                    (int)ranks.transport->rank, text);
}

void note_lost(rsd_status status)
{
    ranks.lost = ranks.lost || status == RSD_EPEER || status == RSD_ETIMEOUT;
}

bool together_lost(void)
{
    return ranks.lost;
}

/* How it went on one rank, and whether it has nothing left to do. */
struct news {
    int32_t code, over;
};

/* The first rank that gives up; -1: none. */
static int32_t who_fails(const struct news *news, int32_t nranks)
{
    for (int32_t i = 0; i < nranks; i++)
        if (news[i].code > EXIT_YES)
            return i;
    return -1;
}

/* The first rank that is over while this one is not, or the other way round; -1: none. */
static int32_t who_differs(const struct news *news, int32_t nranks, int32_t over)
{
    for (int32_t i = 0; i < nranks; i++)
        if (news[i].over != over)
            return i;
    return -1;
}

static int meet(const char *verb, int code, bool over)
{
    const rsd_transport *t = ranks.transport;
    if (!t)
        return code;
    struct news own = {code, over}, *news = need_memory(calloc((size_t)t->nranks, sizeof *news));
    ranks.met = true;
    rsd_status status = rsd_gather(t, &own, sizeof own, news, 0);
    int32_t failed = status ? -1 : who_fails(news, t->nranks);
    int32_t other = status ? -1 : who_differs(news, t->nranks, own.over);
    if (status)
        code = complain_status(verb, status);
    else if (failed >= 0)
        code = news[failed].code;
    else if (other >= 0)
        code = complain(verb, EXIT_USAGE, "rank %d was asked for something else", (int)other);
    if (failed == t->rank && ranks.loud && ranks.complaint)
        fprintf(ranks.loud, "%s\n", ranks.complaint);
    free(news);
    return code;
}

int together_code(const char *verb, int code)
{
    return meet(verb, code, false);
}

int together_over(int code)
{
    return ranks.met ? code : meet(NULL, code, true);
}
