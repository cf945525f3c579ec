/* test_records.c - the check of a record: it is read once for all its sources, none of them goes on before its CRC-32
 * was compared, and all get the same result. */
#include "conversions.h"
#include "folder.h"
#include "tap.h"
#include "transfer.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

static char folder[256];

/* ---- reads that wait ---- */

static _Thread_local bool is_stopped; /* whether reads of this thread wait */
static atomic_bool is_reading, may_read;
static atomic_int nreads;

ssize_t __real_pread(int fd, void *to, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *to, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *to, size_t n, off_t at)
{
    nreads++;
    is_reading = is_reading || is_stopped;
    while (is_stopped && !may_read)
        sched_yield();
    return __real_pread(fd, to, n, at);
}

/* ---- two threads that check sources of one record ---- */

struct checker {
    pthread_t thread;
    struct record_set *set;
    struct source source;
    bool stopped;
    rsd_status status;
    char error[512];
    atomic_bool done;
};

static void *run_check(void *context)
{
    struct checker *checker = context;
    is_stopped = checker->stopped;
    checker->status = record_set_check(checker->set, &checker->source);
    is_stopped = false;
    snprintf(checker->error, sizeof checker->error, "%s", checker->status ? rsd_error() : "");
    checker->done = true;
    return NULL;
}

/* Starts a check, and a second one while the first cannot read. */
static void check_twice(struct record_set *set, rsd_checkpoint *checkpoint, struct checker *first,
                        struct checker *second)
{
    struct timespec pause = {.tv_nsec = 50000000};
    *first = (struct checker){.set = set, .stopped = true};
    *second = (struct checker){.set = set};
    OK(source_open(&first->source, checkpoint, 2, 0));
    OK(source_open(&second->source, checkpoint, 2, 0));
    is_reading = may_read = false;
    nreads = 0;
    pthread_create(&first->thread, NULL, run_check, first);
    while (!is_reading)
        sched_yield();
    pthread_create(&second->thread, NULL, run_check, second);
    nanosleep(&pause, NULL); /* the longer, the more often a check that does not wait is found */
    CHECK(!second->done, "the second thread did not wait: %s", rsd_status_name(second->status));
    may_read = true;
    pthread_join(first->thread, NULL);
    pthread_join(second->thread, NULL);
}

static void close_both(struct checker *first, struct checker *second)
{
    source_close(&first->source);
    source_close(&second->source);
}

static void no_thread_goes_on(bool damaged)
{
    CASE("a second thread waits for the check of a record that is %s",
         damaged ? "damaged" : "right");
    struct record_set set;
    struct checker first, second, third = {.set = &set};
    rsd_checkpoint *checkpoint;
    rsd_extent stored = {.struct_nbytes = sizeof stored};
    const char *path = path_in(folder, "source");
    conversion_make(path, 1);
    if (!OK(rsd_checkpoint_open(path, NULL, &checkpoint)))
        return;
    OK(rsd_checkpoint_box(checkpoint, 2, 0, &stored));
    if (damaged)
        conversion_flip_bit(path_in(folder, "source/__0_0.distcp"),
                            (long)(stored.offset + 704 + 4 * 301));
    rsd_checkpoint_close(checkpoint);
    OK(rsd_checkpoint_open(path, NULL, &checkpoint));
    record_set_open(&set);
    check_twice(&set, checkpoint, &first, &second);
    rsd_status expected = damaged ? RSD_EFORMAT : RSD_OK;
    CHECK(first.status == expected && second.status == expected, "%s and %s", first.error,
          second.error);
    CHECK(first.source.checked == !damaged && second.source.checked == !damaged);
    CHECK(strcmp(first.error, second.error) == 0, "%s and %s", first.error, second.error);

    int before = nreads;
    OK(source_open(&third.source, checkpoint, 2, 0));
    run_check(&third);
    CHECK(third.status == expected && third.source.checked == !damaged, "%s", third.error);
    CHECK(damaged == (strstr(third.error, "damaged: CRC-32") != NULL), "%s", third.error);
    CHECK(nreads <= before + 4, "%d reads", (int)nreads); /* of the frame, not of the record */
    source_close(&third.source);
    close_both(&first, &second);
    record_set_close(&set);
    rsd_checkpoint_close(checkpoint);
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("records"));
    no_thread_goes_on(false);
    no_thread_goes_on(true);
    folder_remove(folder);
    return tap_end();
}
