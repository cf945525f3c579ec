/* workers.c - see workers.h. */
#include "workers.h"
#include "folder.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct started {
    pthread_t thread;
    struct worker *worker;
    worker_function *work;
};

static void *run(void *context)
{
    struct started *started = context;
    struct worker *worker = started->worker;
    worker->status = started->work(worker);
    snprintf(worker->message, sizeof worker->message, "%s", worker->status ? rsd_error() : "");
    return NULL;
}

void workers_run(struct workers *workers, int32_t n, worker_function *work, const void *task,
                 unsigned absent)
{
    rsd_thread_group *group = NULL;
    struct started started[MOST_WORKERS];
    *workers = (struct workers){.n = n};
    if (rsd_thread_group_new(n, &group))
        abort();
    for (int32_t i = 0; i < n; i++) {
        workers->list[i] =
            (struct worker){.transport.struct_nbytes = sizeof(rsd_transport), .task = task};
        if (rsd_thread_group_transport(group, i, &workers->list[i].transport))
            abort();
        workers->list[i].report.struct_nbytes = sizeof(rsd_report);
        started[i] = (struct started){.worker = &workers->list[i], .work = work};
        if (!(absent >> i & 1))
            pthread_create(&started[i].thread, NULL, run, &started[i]);
    }
    for (int32_t i = 0; i < n; i++)
        if (!(absent >> i & 1))
            pthread_join(started[i].thread, NULL);
    rsd_thread_group_free(group);
}

void workers_free(struct workers *workers)
{
    for (int32_t i = 0; i < workers->n; i++)
        free(workers->list[i].lines);
}

void worker_add_line(struct worker *worker, const char *text)
{
    size_t n = strlen(text);
    worker->lines = realloc(worker->lines, worker->nchars + n + 2);
    memcpy(worker->lines + worker->nchars, text, n);
    worker->lines[worker->nchars + n] = '\n';
    worker->lines[worker->nchars + n + 1] = '\0';
    worker->nchars += n + 1;
}

bool same_folders(const char *a, const char *b)
{
    DIR *folder = opendir(a);
    bool same = folder && count_entries(a) == count_entries(b);
    if (!same)
        printf("# %s has %d files, %s has %d\n", a, count_entries(a), b, count_entries(b));
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char one[512], other[512];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(one, sizeof one, "%s/%s", a, entry->d_name);
        snprintf(other, sizeof other, "%s/%s", b, entry->d_name);
        if (!same_files(one, other)) {
            printf("# %s differs\n", other);
            same = false;
        }
    }
    if (folder)
        closedir(folder);
    return same;
}
