/* collective.h - conversions by one process and by many ranks, which must have the same result. A header, since the
 * counters of tap.h are static. */
#ifndef COLLECTIVE_H
#define COLLECTIVE_H

#include "folder.h"
#include "random.h"
#include "tap.h"
#include "truth.h"
#include "workers.h"

static char folder[256];

/* Returns the numbers of ranks in turn, two for each conversion. */
static inline int32_t next_nworkers(void)
{
    static const int32_t sizes[] = {2, 5, 3, 8};
    static unsigned turn;
    return sizes[turn++ % 4];
}
enum { NCREWS = 2 };

static inline const char *in_folder(const char *name)
{
    return path_in(folder, name);
}

struct task {
    const char *in, *other, *out;
    const char *out_of_one; /* of rank 1, if it is not that of all */
    rsd_convert_options convert;
    bool any_layout;
    int32_t cancels; /* this rank, plus one */
    double timeout;
};

/* Rows over one axis of a mesh, copies over the other. */
static inline rsd_status choose_copies(void *context, const rsd_tensor_info *tensor,
                                       rsd_tensor_target *choice)
{
    char text[300];
    size_t at = (size_t)snprintf(text, sizeof text, "%s[", rsd_dtype_name(tensor->dtype));
    (void)context;
    for (int32_t d = 0; d < tensor->ndim; d++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%lld", d ? "," : "",
                               (long long)tensor->shape[d]);
    snprintf(text + at, sizeof text - at, "] @ 2x2 : R, %s", tensor->ndim ? "S(0)" : "R");
    return rsd_layout_parse(text, &choice->layout);
}

static inline int on_progress(void *context, const rsd_progress *progress)
{
    const struct worker *worker = context;
    const struct task *task = worker->task;
    return progress->nbytes_done > progress->nbytes_total ||
           task->cancels == worker->transport.rank + 1;
}

static inline rsd_status convert_as(const struct task *task, const rsd_transport *transport,
                                    struct worker *worker)
{
    rsd_checkpoint *in;
    struct random random = {7}; /* the same on all ranks */
    rsd_convert_options options = task->convert;
    rsd_status status = rsd_checkpoint_open(task->in, NULL, &in);
    if (status)
        return status;
    options.struct_nbytes = sizeof options;
    rsd_io io = {.struct_nbytes = sizeof io, .transport = transport, .timeout = task->timeout};
    options.io = &io;
    if (task->any_layout) {
        options.map = random_choice;
        options.map_context = &random;
    }
    if (transport) {
        io.on_progress = on_progress;
        io.context = worker;
    }
    bool apart = transport && transport->rank == 1 && task->out_of_one;
    status = rsd_convert(in, apart ? task->out_of_one : task->out, &options, &worker->report);
    rsd_checkpoint_close(in);
    return status;
}

static inline rsd_status convert_as_rank(struct worker *worker)
{
    return convert_as(worker->task, &worker->transport, worker);
}

static inline rsd_status convert_alone(const struct task *task, rsd_report *report)
{
    struct worker worker = {.task = task};
    worker.report.struct_nbytes = sizeof worker.report;
    rsd_status status = convert_as(task, NULL, &worker);
    *report = worker.report;
    return status;
}

static inline void check_all(const struct workers *workers, rsd_status status, const char *text)
{
    for (int32_t i = 0; i < workers->n; i++)
        CHECK(workers->list[i].status == status && strstr(workers->list[i].message, text) &&
                  strcmp(workers->list[i].message, workers->list[0].message) == 0,
              "rank %d of %d: %s, %s; rank 0: %s", (int)i, (int)workers->n,
              rsd_status_name(workers->list[i].status), workers->list[i].message,
              workers->list[0].message);
}

/* All ranks have the same report as one process. */
static inline void check_reports(const struct workers *workers, const rsd_report *alone)
{
    for (int32_t i = 0; i < workers->n; i++) {
        const rsd_report *r = &workers->list[i].report;
        CHECK(memcmp(r, &workers->list[0].report, sizeof *r) == 0, "rank %d reports otherwise",
              (int)i);
        CHECK(r->ntensors == alone->ntensors && r->nbytes_needed == alone->nbytes_needed,
              "tensors %lld and %lld, needed %lld and %lld", (long long)r->ntensors,
              (long long)alone->ntensors, (long long)r->nbytes_needed,
              (long long)alone->nbytes_needed);
        CHECK(r->nbytes_read == alone->nbytes_read &&
                  r->nbytes_unchecked == alone->nbytes_unchecked,
              "read %lld and %lld, unchecked %lld and %lld", (long long)r->nbytes_read,
              (long long)alone->nbytes_read, (long long)r->nbytes_unchecked,
              (long long)alone->nbytes_unchecked);
        CHECK(r->nbytes_written == alone->nbytes_written &&
                  r->nfiles_written == alone->nfiles_written && r->nleft_out == alone->nleft_out,
              "written %lld and %lld in %lld and %lld files", (long long)r->nbytes_written,
              (long long)alone->nbytes_written, (long long)r->nfiles_written,
              (long long)alone->nfiles_written);
    }
}

static inline bool same_outputs(const char *a, const char *b)
{
    return count_entries(a) >= 0 ? same_folders(a, b) : same_files(a, b);
}

/* Converts with several numbers of ranks, and compares with the result of one process. */
static inline void convert_and_compare(struct task task, const char *label)
{
    struct workers workers;
    rsd_report alone;
    char one[300], many[300];
    bool file = strstr(label, "one file") != NULL;
    snprintf(one, sizeof one, "%s/alone%s", folder, file ? ".safetensors" : "");
    snprintf(many, sizeof many, "%s/many%s", folder, file ? ".safetensors" : "");
    task.out = one;
    if (!OK(convert_alone(&task, &alone)))
        return;
    task.out = many;
    for (int i = 0; i < NCREWS; i++) {
        int32_t n = next_nworkers();
        workers_run(&workers, n, convert_as_rank, &task, 0);
        check_all(&workers, RSD_OK, "");
        check_reports(&workers, &alone);
        CHECK(same_outputs(one, many), "%s by %d ranks", label, (int)n);
        folder_remove(many);
    }
    folder_remove(one);
}

#endif
