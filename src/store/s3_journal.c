/* s3_journal.c - the journal of an output in a bucket: which uploads belong to it.
 *
 *     upload ID NBYTES KEY       an upload has begun; NBYTES: 0 if its length is not known
 *     ended NBYTES KEY           all of its parts are there
 *     owned NAME                 a file of the checkpoint that is replaced
 *
 * Other processes of the same run have a journal of their own, PREFIX/reshard-journal.X, with the first two.
 */
#include "s3.h"

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_JOURNAL = 1 << 28, QUICK_NOTES = 100 };
#define NOTE_SECONDS 5.0

/* Reads the journal of this process. The caller frees the text. */
static rsd_status read_own_journal(const struct s3_output *output, char **text, size_t *n)
{
    struct stat found;
    if (fstat(output->base.journal_fd, &found) != 0)
        return fail(RSD_EIO, "journal: %s", strerror(errno));
    *text = mem_new((size_t)found.st_size + 1, 1);
    if (!*text)
        return RSD_ENOMEM;
    ssize_t some = pread(output->base.journal_fd, *text, (size_t)found.st_size, 0);
    if (some == found.st_size) {
        *n = (size_t)some;
        return RSD_OK;
    }
    mem_free(*text);
    return fail(RSD_EIO, "journal: %s", strerror(errno));
}

rsd_status s3_journal_put(struct s3_output *output, bool only_new)
{
    char *text;
    size_t n;
    TRY(read_own_journal(output, &text, &n));
    rsd_status status =
        s3_put_object(output->remote, output->journal_key, text, n, output->run, only_new);
    mem_free(text);
    if (!status)
        output->noted_at = seconds_now();
    if (status == RSD_EEXIST)
        return fail(RSD_EEXIST, "%s is being written by another process", output->base.path);
    return status ? fail_in(status, "%s: ", output->journal_key) : RSD_OK;
}

/* The first notes are put at once, later ones now and then: what is lost is uploaded again. */
rsd_status s3_journal_put_if_due(struct s3_output *output, bool force)
{
    pthread_mutex_lock(&output->journal_lock);
    bool due = force || ++output->nnotes <= QUICK_NOTES ||
               seconds_now() - output->noted_at >= NOTE_SECONDS;
    rsd_status status = due ? s3_journal_put(output, false) : RSD_OK;
    pthread_mutex_unlock(&output->journal_lock);
    return status;
}

rsd_status s3_journal_append(struct s3_output *output, struct text *line)
{
    char *chars;
    TRY(text_take(line, &chars));
    size_t n = strlen(chars);
    bool written = write(output->base.journal_fd, chars, n) == (ssize_t)n;
    rsd_free(chars);
    return written ? RSD_OK : fail(RSD_EIO, "journal: %s", strerror(errno));
}

rsd_status s3_journal_note_upload(const struct s3_upload *upload)
{
    struct s3_output *output = upload->output;
    struct text line = {0};
    if (output->base.journal_fd < 0)
        return RSD_OK;
    if (upload->ended)
        text_add(&line, "ended %llu %s\n", (unsigned long long)upload->end, upload->key);
    else
        text_add(&line, "upload %s %llu %s\n", upload->id, (unsigned long long)upload->nbytes,
                 upload->key);
    TRY(s3_journal_append(output, &line));
    /* Another process that commits has nothing but the journal. */
    return s3_journal_put_if_due(output, upload->ended && output->options.mode == OUTPUT_JOIN);
}

struct earlier_upload *s3_journal_find(struct s3_output *output, const char *key)
{
    for (size_t i = output->nearlier; i > 0; i--) /* the last one counts */
        if (strcmp(output->earlier[i - 1].key, key) == 0)
            return &output->earlier[i - 1];
    return NULL;
}

/* Adds an upload that an earlier run began. */
static rsd_status add_earlier(struct s3_output *output, const char *id, uint64_t nbytes,
                              const char *key)
{
    struct earlier_upload one = {.nbytes = nbytes};
    TRY(GROW(output->earlier, output->earlier_capacity, output->nearlier + 1));
    one.id = text_copy(id);
    one.key = text_copy(key);
    if (one.id && one.key) {
        output->earlier[output->nearlier++] = one;
        return RSD_OK;
    }
    mem_free(one.id);
    mem_free(one.key);
    return RSD_ENOMEM;
}

/* Takes a line of a journal of an earlier run, or of another process. Others are not for the store. */
static rsd_status take_journal_line(struct s3_output *output, const char *line)
{
    unsigned long long nbytes;
    char id[MAX_UPLOAD_ID];
    int at = 0;
    if (sscanf(line, "upload %1099s %llu %n", id, &nbytes, &at) == 2 && at > 0 && line[at])
        return add_earlier(output, id, nbytes, line + at);
    if (sscanf(line, "ended %llu %n", &nbytes, &at) == 1 && at > 0 && line[at]) {
        struct earlier_upload *one = s3_journal_find(output, line + at);
        if (one) {
            one->ended = true;
            one->end = nbytes;
        }
    } else if (strncmp(line, "owned ", 6) == 0 && line[6])
        return name_list_add(&output->owned, (struct slice){line + 6, strlen(line + 6)});
    return RSD_OK;
}

/* Takes all complete lines of a journal. */
static rsd_status take_journal_lines(struct s3_output *output, struct bytes *text)
{
    rsd_status status = RSD_OK;
    char *at = (char *)text->data;
    for (size_t left = text->n; left > 0 && !status;) {
        char *end = memchr(at, '\n', left);
        if (!end)
            break; /* a line without its end does not count */
        *end = '\0';
        status = take_journal_line(output, at);
        *end = '\n';
        left -= (size_t)(end + 1 - at);
        at = end + 1;
    }
    return status;
}

/* Reads a journal of the bucket. ENOENT: it does not exist. */
rsd_status s3_journal_load(struct s3_output *output, const char *key, bool own)
{
    struct bytes text = {0};
    char run[40] = "";
    TRY(s3_load_object(output->remote, key, MAX_JOURNAL, &text, run));
    rsd_status status = take_journal_lines(output, &text);
    if (!status && own && text.n > 0 &&
        write(output->base.journal_fd, text.data, text.n) != (ssize_t)text.n)
        status = fail(RSD_EIO, "journal: %s", strerror(errno));
    if (!status && own && run[0])
        memcpy(output->run, run, sizeof run);
    bytes_drop(&text);
    return status;
}

/* Reads the journals of other processes. With `remove`, removes them. */
rsd_status s3_journal_visit_others(struct s3_output *output, bool load, bool remove)
{
    struct store_listing listing = {0};
    size_t n = strlen(S3_JOURNAL ".");
    rsd_status status = s3_list(&output->remote->base, "", &listing);
    if (status == RSD_ENOENT)
        status = RSD_OK;
    for (size_t i = 0; i < listing.n && !status; i++) {
        char *key;
        if (strncmp(listing.entries[i].name, S3_JOURNAL ".", n) != 0)
            continue;
        status = s3_key(output->remote, listing.entries[i].name, &key);
        if (!status && load)
            status = s3_journal_load(output, key, false);
        if (!status && remove)
            status = s3_remove_object(output->remote, key);
        rsd_free(key);
    }
    store_listing_drop(&listing);
    return status;
}
