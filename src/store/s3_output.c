/* s3_output.c - an output in a bucket: uploads that become objects when all of them have ended.
 *
 *     PREFIX/reshard-journal     while the output is built: readers refuse the prefix
 *     uploads                    invisible
 *          |  all have ended
 *          v  the files of an old checkpoint are removed; uploads become objects, one by one
 *     PREFIX/.metadata           (or the index) comes last, and the journal is removed
 *
 * There is no rename in a bucket, so a reader may find no checkpoint for a moment, but never a part of one. A
 * run that is killed leaves the journal, with the identifiers of its uploads: another run continues
 * from there, or removes them.
 */
#include "s3.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static struct s3_output *output_of(struct store *store)
{
    return remote_store_of(store)->output;
}

static rsd_status s3_sync_journal(struct store_output *base)
{
    struct s3_output *output = (struct s3_output *)(void *)base;
    return base->journal_fd < 0 ? RSD_OK : s3_journal_put_if_due(output, false);
}

/* ---- opening ---- */

/* Sets the key of a file, before its upload begins. */
static rsd_status set_file_key(struct s3_output *output, uint32_t file)
{
    char **key = &output->files[file]->key;
    if (output->only_key)
        return remote_set_text(key, output->only_key);
    return s3_key(output->remote, store_file_name(&output->remote->base, file), key);
}

/* Takes the parts that an earlier run has uploaded. */
static rsd_status resume_file(struct s3_upload *upload)
{
    struct s3_output *output = upload->output;
    const struct earlier_upload *one = s3_journal_find(output, upload->key);
    if (!one || output->options.mode == OUTPUT_JOIN)
        return RSD_OK;
    upload->nbytes = one->nbytes;
    TRY(remote_set_text(&upload->id, one->id));
    rsd_status status = s3_adopt_upload(upload);
    if (status == RSD_ENOENT) {
        s3_forget_parts(upload);
        status = s3_find_completed(upload);
        return status == RSD_ENOENT ? RSD_OK : status;
    }
    TRY(status);
    upload->ended = one->ended && s3_uploaded_nbytes(upload) == one->end;
    upload->end = upload->ended ? one->end : 0;
    return RSD_OK;
}

rsd_status s3_prepare_upload(struct s3_output *output, uint32_t file)
{
    if (output->files[file]->key)
        return RSD_OK;
    TRY(set_file_key(output, file));
    return resume_file(output->files[file]);
}

/* Prepares one more file: its key is set when it is needed. */
static rsd_status add_upload(struct store *store)
{
    struct s3_output *output = output_of(store);
    TRY(remote_add(store));
    /* A list of pointers. NOLINTNEXTLINE(bugprone-sizeof-expression) */
    TRY(GROW(output->files, output->files_capacity, store->names.n + 1));
    struct s3_upload *upload = mem_new(1, sizeof *upload);
    if (!upload)
        return RSD_ENOMEM;
    upload->output = output;
    output->files[store->names.n] = upload;
    return RSD_OK;
}

/* Keeps a small file in memory. It is written when the output is committed. */
static rsd_status put_later(struct store *store, const char *name, const void *data, size_t n)
{
    struct s3_output *output = output_of(store);
    struct pending_put put = {.n = n};
    if (output->options.mode == OUTPUT_IN_PLACE || output->options.mode == OUTPUT_JOIN)
        return fail(RSD_EUNSUPPORTED, "only the process that commits writes small files");
    TRY(GROW(output->puts, output->puts_capacity, output->nputs + 1));
    rsd_status status = remote_set_text(&put.name, name);
    if (!status && !(put.data = mem_copy(data, n + (n == 0), 1)))
        status = RSD_ENOMEM;
    if (status)
        mem_free(put.name);
    else
        output->puts[output->nputs++] = put;
    return status;
}

static rsd_status sync_nothing(struct store *store)
{
    (void)store;
    return RSD_OK;
}

static rsd_status refuse_rename(struct store *store, const char *from, const char *to)
{
    (void)store, (void)from, (void)to;
    return fail(RSD_EUNSUPPORTED, "an object cannot be renamed");
}

static rsd_status remove_file(struct store *store, const char *name)
{
    char *key;
    TRY(s3_key(remote_store_of(store), name, &key));
    rsd_status status = s3_remove_object(remote_store_of(store), key);
    rsd_free(key);
    return status;
}

/* The store of an output. */
static const struct store_ops s3_upload_store = {.scheme = "s3",
                                                 .close = remote_close,
                                                 .add = add_upload,
                                                 .list = s3_list,
                                                 .stat = s3_stat_output,
                                                 .has = s3_has,
                                                 .create = s3_create,
                                                 .write = s3_write,
                                                 .end_file = s3_end_file,
                                                 .sync = s3_sync,
                                                 .sync_names = sync_nothing,
                                                 .put = put_later,
                                                 .rename = refuse_rename,
                                                 .remove = remove_file};

static rsd_status choose_run(char run[40])
{
    unsigned char bytes[16];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return fail(RSD_EIO, "no random numbers: %s", strerror(errno));
    hex_write(bytes, sizeof bytes, run);
    return RSD_OK;
}

/* Opens the store that a path names, and sets the keys of the journal and of an output that is one file. Sends nothing.
 * EINVAL: nothing can be put at the path. */
static rsd_status set_keys(struct s3_output *output, const char *path)
{
    const struct output_options *options = &output->options;
    size_t n = strlen(path);
    while (n > 0 && path[n - 1] == '/')
        n--;
    struct text text = {0}, journal = {0};
    text_add(&text, "%.*s", (int)n, path);
    TRY(text_take(&text, &output->base.path));
    const char *shown = output->base.path, *slash = strrchr(shown, '/');
    const char *bucket = shown + strlen("s3://");
    if (n <= strlen("s3://") || (options->one_file && slash < bucket))
        return fail(RSD_EINVAL, "'%s' is not a valid output path", path);
    TRY(s3_open_prefix(shown, options->one_file ? (size_t)(slash - shown) : n, options->storage,
                       &output->remote));
    output->remote->base.ops = &s3_upload_store;
    output->remote->base.writable = true;
    output->remote->output = output;
    output->base.store = &output->remote->base;
    if (options->one_file)
        TRY(s3_key(output->remote, slash + 1, &output->only_key));
    if (options->one_file)
        text_add(&journal, "%s.reshard-part/%s", output->only_key, S3_JOURNAL);
    else if (options->mode == OUTPUT_JOIN)
        text_add(&journal, "%s%s", output->remote->prefix,
                 options->journal ? options->journal : S3_JOURNAL);
    else
        text_add(&journal, "%s%s", output->remote->prefix, S3_JOURNAL);
    if (options->mode == OUTPUT_JOIN && !options->journal)
        text_add(&journal, ".%s", output->run);
    return text_take(&journal, &output->journal_key);
}

/* Says whether something is at the path that may not be replaced. */
static rsd_status check_directory_free(struct s3_output *output)
{
    struct store_listing listing = {0};
    size_t n = strlen(S3_JOURNAL), nothers = 0;
    rsd_status status = s3_list(&output->remote->base, "", &listing);
    for (size_t i = 0; i < listing.n; i++)
        nothers += strncmp(listing.entries[i].name, S3_JOURNAL, n) != 0;
    store_listing_drop(&listing);
    if (status == RSD_ENOENT || (!status && nothers == 0))
        return RSD_OK;
    TRY(status);
    if (!output->options.overwrite)
        return fail(RSD_EEXIST, "%s already exists; set overwrite to replace it",
                    output->base.path);
    status = output->options.list_owned(output->base.path, output->options.storage, &output->owned);
    if (!status)
        return RSD_OK;
    return fail(RSD_EEXIST,
                "%s exists and is not a checkpoint; not replaced. Remove it or choose another path",
                output->base.path);
}

static rsd_status check_file_free(struct s3_output *output)
{
    struct http_answer answer;
    const char *name = strrchr(output->base.path, '/') + 1;
    rsd_status status = remote_head(output->remote, name, &answer);
    if (status == RSD_ENOENT || (!status && output->options.overwrite))
        return RSD_OK;
    TRY(status);
    return fail(RSD_EEXIST, "%s already exists; set overwrite to replace it", output->base.path);
}

static rsd_status check_free(struct s3_output *output)
{
    return output->options.one_file ? check_file_free(output) : check_directory_free(output);
}

/* Removes the uploads and journals of an earlier run. */
static rsd_status remove_earlier(struct s3_output *output)
{
    rsd_status status = s3_journal_load(output, output->journal_key, false);
    bool found = !status;
    if (status == RSD_ENOENT)
        status = RSD_OK;
    if (!status && !output->options.one_file)
        status = s3_journal_visit_others(output, true, true);
    for (size_t i = 0; i < output->nearlier && !status; i++)
        status = s3_remove_upload(output->remote, output->earlier[i].key, output->earlier[i].id);
    if (!status && found)
        status = s3_remove_object(output->remote, output->journal_key);
    name_list_drop(&output->owned);
    return status;
}

static rsd_status write_owned(struct s3_output *output)
{
    struct text lines = {0};
    for (size_t i = 0; i < output->owned.n; i++)
        text_add(&lines, "owned %s\n", output->owned.list[i].bytes);
    return output->owned.n ? s3_journal_append(output, &lines) : RSD_OK;
}

/* Finds what an earlier run has left. */
static rsd_status take_earlier(struct s3_output *output)
{
    enum output_mode mode = output->options.mode;
    if (mode == OUTPUT_REPLACE)
        return remove_earlier(output);
    rsd_status status = s3_journal_load(output, output->journal_key, mode == OUTPUT_RESUME);
    if (status == RSD_ENOENT)
        return RSD_OK;
    TRY(status);
    if (mode == OUTPUT_NEW)
        return fail(RSD_EEXIST, "%s was left by a run that did not finish; resume or remove it",
                    output->base.path);
    output->base.resumed = true;
    return output->options.one_file ? RSD_OK : s3_journal_visit_others(output, true, true);
}

static rsd_status open_for_commit(struct s3_output *output)
{
    TRY(take_earlier(output));
    if (output->base.resumed)
        return RSD_OK; /* what is at the path was checked by the run that is resumed */
    TRY(check_free(output));
    TRY(write_owned(output));
    return s3_journal_put(output, output->options.mode == OUTPUT_NEW);
}

static void s3_close_output(struct store_output *base, bool keep);

/* Opens the journal of an output; the process that commits also finds what an earlier run left. */
static rsd_status start_output(struct s3_output *output, const char *path)
{
    enum output_mode mode = output->options.mode;
    TRY(choose_run(output->run));
    TRY(set_keys(output, path));
    if (mode == OUTPUT_IN_PLACE)
        return RSD_OK;
    int fd = output->base.journal_fd = memfd_create(S3_JOURNAL, MFD_CLOEXEC);
    if (fd < 0 || fcntl(fd, F_SETFL, O_APPEND) != 0)
        return fail(RSD_EIO, "journal: %s", strerror(errno));
    return mode == OUTPUT_JOIN ? RSD_OK : open_for_commit(output);
}

/* Opens an output. An object that is missing is not an input that is, so ENOENT becomes EIO. */
static rsd_status s3_open_output(const char *path, const struct output_options *options,
                                 struct store_output **out)
{
    struct s3_output *output = mem_new(1, sizeof *output);
    if (!output)
        return RSD_ENOMEM;
    output->base = (struct store_output){.ops = &s3_store, .journal_fd = -1};
    output->options = *options;
    pthread_mutex_init(&output->journal_lock, NULL);
    pthread_mutex_init(&output->lock, NULL);
    pthread_cond_init(&output->changed, NULL);
    rsd_status status = start_output(output, path);
    if (status) {
        output->committed = true; /* nothing was begun */
        s3_close_output(&output->base, true);
        return status == RSD_ENOENT ? RSD_EIO : status;
    }
    *out = &output->base;
    return RSD_OK;
}

/* Checks whether an output could be written, without a trace. */
static rsd_status s3_check_output(const char *path, const struct output_options *options)
{
    struct s3_output output = {.options = *options};
    rsd_status status = set_keys(&output, path);
    if (!status)
        status = check_free(&output);
    if (output.remote) {
        output.remote->base.ops = &s3_store;
        store_close(&output.remote->base);
    }
    name_list_drop(&output.owned);
    mem_free(output.only_key);
    mem_free(output.journal_key);
    mem_free(output.base.path);
    return status;
}

/* ---- committing ---- */

/* Finds the uploads of other processes. */
static rsd_status collect_uploads(struct s3_output *output)
{
    const struct store *store = &output->remote->base;
    bool missing = false;
    for (uint32_t i = 0; i < store->names.n; i++)
        missing = missing || !output->files[i]->ended;
    if (missing && !output->options.one_file)
        TRY(s3_journal_visit_others(output, true, false));
    for (uint32_t i = 0; i < store->names.n; i++) {
        struct s3_upload *upload = output->files[i];
        if (upload->ended)
            continue;
        if (!upload->key)
            TRY(set_file_key(output, i));
        const struct earlier_upload *one = s3_journal_find(output, upload->key);
        if (!one || !one->ended)
            return fail(RSD_EIO, "%s: no process has uploaded it", upload->key);
        s3_forget_parts(upload);
        upload->foreign = upload->ended = true;
        upload->nbytes = one->nbytes;
        upload->end = one->end;
        TRY(remote_set_text(&upload->id, one->id));
        rsd_status status = s3_adopt_upload(upload);
        if (status == RSD_ENOENT)
            status = RSD_EIO;
        if (status)
            return fail_in(status, "%s: ", upload->key);
    }
    return RSD_OK;
}

static bool is_output_file(const struct s3_output *output, const char *name)
{
    const struct name_list *names = &output->remote->base.names;
    for (size_t i = 0; i < names->n; i++)
        if (strcmp(names->list[i].bytes, name) == 0)
            return true;
    return false;
}

/* Removes the old checkpoint: first what makes it one, which is put anew, then all that the new one lacks. */
static rsd_status remove_owned(struct s3_output *output)
{
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < output->owned.n; i++) {
            const char *name = output->owned.list[i].bytes;
            bool put = false;
            for (size_t k = 0; k < output->nputs; k++)
                put = put || strcmp(output->puts[k].name, name) == 0;
            if (put == (pass == 0) && !is_output_file(output, name))
                TRY(store_remove(&output->remote->base, name));
        }
    return RSD_OK;
}

/* Writes the small files in the order in which they were put: the metadata comes last. */
static rsd_status put_small_files(struct s3_output *output)
{
    for (size_t i = 0; i < output->nputs; i++) {
        const struct pending_put *put = &output->puts[i];
        char *key;
        TRY(s3_key(output->remote, put->name, &key));
        rsd_status status =
            s3_put_object(output->remote, key, put->data, put->n, output->run, false);
        rsd_free(key);
        if (status)
            return fail_in(status, "%s/%s: ", output->base.path, put->name);
    }
    return RSD_OK;
}

/* Completes all uploads, then writes the small files, and removes the journal. */
static rsd_status s3_commit(struct store_output *base)
{
    struct s3_output *output = (struct s3_output *)(void *)base;
    TRY(collect_uploads(output));
    TRY(s3_journal_put_if_due(output, true));
    TRY(remove_owned(output));
    for (uint32_t i = 0; i < output->remote->base.names.n; i++) {
        rsd_status status = s3_complete_upload(output->files[i]);
        if (status)
            return store_fail_in(&output->remote->base, i, status);
    }
    TRY(put_small_files(output));
    (void)s3_remove_lost_uploads(output); /* the output is complete with or without them */
    if (!output->options.one_file)
        TRY(s3_journal_visit_others(output, false, true));
    TRY(s3_remove_object(output->remote, output->journal_key));
    output->committed = true;
    return RSD_OK;
}

/* ---- closing ---- */

/* Cancels all parts that are being uploaded, and waits for them. */
static void cancel_parts(struct s3_output *output, size_t nfiles)
{
    pthread_mutex_lock(&output->lock);
    for (size_t i = 0; i < nfiles; i++)
        for (size_t k = 0; k < output->files[i]->nparts; k++) {
            struct s3_part *part = output->files[i]->parts[k];
            if (part && part->started && !part->uploaded && part->data && part->request.storage)
                http_cancel(&part->request);
        }
    while (atomic_load(&output->nactive) > 0)
        pthread_cond_wait(&output->changed, &output->lock);
    pthread_mutex_unlock(&output->lock);
}

static void drop_output(struct s3_output *output)
{
    size_t n = output->remote ? output->remote->base.names.n : 0;
    for (size_t i = 0; i < n; i++) {
        s3_forget_parts(output->files[i]);
        mem_free(output->files[i]->key);
        mem_free(output->files[i]);
    }
    mem_free(output->files);
    mem_free(output->only_key);
    for (size_t i = 0; i < output->nearlier; i++) {
        mem_free(output->earlier[i].key);
        mem_free(output->earlier[i].id);
    }
    for (size_t i = 0; i < output->nputs; i++) {
        mem_free(output->puts[i].name);
        mem_free(output->puts[i].data);
    }
    mem_free(output->earlier);
    mem_free(output->puts);
    name_list_drop(&output->owned);
    mem_free(output->journal_key);
    mem_free(output->base.path);
    if (output->remote)
        store_close(&output->remote->base);
    if (output->base.journal_fd >= 0)
        close(output->base.journal_fd);
    pthread_mutex_destroy(&output->journal_lock);
    pthread_mutex_destroy(&output->lock);
    pthread_cond_destroy(&output->changed);
    mem_free(output);
}

/* Removes an output that is at its path: first what makes it a checkpoint. Failures leave objects behind. */
static void remove_committed(const struct s3_output *output)
{
    struct store *store = &output->remote->base;
    for (size_t i = output->nputs; i-- > 0;)
        (void)store_remove(store, output->puts[i].name);
    for (size_t i = 0; i < store->names.n; i++)
        (void)s3_remove_object(output->remote, output->files[i]->key);
}

/* Keeps the error text of the failure that led here. */
static void s3_close_output(struct store_output *base, bool keep)
{
    struct s3_output *output = (struct s3_output *)(void *)base;
    size_t n = output->remote ? output->remote->base.names.n : 0;
    char *message = text_copy(rsd_error());
    cancel_parts(output, n);
    bool in_place = output->options.mode == OUTPUT_IN_PLACE;
    if (!output->committed && (!keep || in_place)) {
        for (size_t i = 0; i < n; i++)
            s3_abort_upload(output->files[i]);
        (void)s3_remove_lost_uploads(output);
        if (!in_place)
            s3_remove_object(output->remote, output->journal_key);
    } else if (!output->committed && output->options.mode != OUTPUT_JOIN)
        (void)s3_journal_put_if_due(output, true);
    else if (output->committed && !keep)
        remove_committed(output);
    drop_output(output);
    if (message)
        error_set("%s", message);
    mem_free(message);
}

const struct store_ops s3_store = {.scheme = "s3",
                                   .open = s3_open,
                                   .close = remote_close,
                                   .add = remote_add,
                                   .list = s3_list,
                                   .stat = remote_stat,
                                   .read = remote_read,
                                   .prefetch = remote_prefetch,
                                   .start_prefetch = remote_start_prefetch,
                                   .release = remote_release,
                                   .open_output = s3_open_output,
                                   .check_output = s3_check_output,
                                   .sync_journal = s3_sync_journal,
                                   .commit = s3_commit,
                                   .close_output = s3_close_output};
