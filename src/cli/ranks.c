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

int together_code(const char *verb, int code)
{
    const rsd_transport *t = ranks.transport;
    if (!t)
        return code;
    int *codes = need_memory(calloc((size_t)t->nranks, sizeof *codes));
    rsd_status status = t->allgather(t->context, &code, sizeof code, codes, 300);
    if (status)
        code = complain_status(verb, status);
    for (int32_t i = 0; i < t->nranks && !status; i++) {
        if (codes[i] <= EXIT_YES)
            continue;
        if (i == t->rank && ranks.loud && ranks.complaint)
            fprintf(ranks.loud, "%s\n", ranks.complaint);
        code = codes[i];
        break;
    }
    free(codes);
    return code;
}
