/* zero_files.c - the files that DeepSpeed writes, and what their names say.
 *
 *     latest                                                    the name of a directory, such as global_step3
 *     latest_universal                                          the same, for a universal checkpoint
 *     TAG/mp_rank_00_model_states.pt                            parameters; stages 0 to 2
 *     TAG/zero_pp_rank_D_mp_rank_00_model_states.pt             parameters of rank D; stage 3
 *     TAG/[bf16_|fp16_]zero_pp_rank_D_mp_rank_00_optim_states.pt   flat vectors of rank D
 *     TAG/zero/NAME/fp32.pt                                     a universal checkpoint
 */
#include "zero.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum zero_role { ROLE_OTHER, ROLE_MODEL, ROLE_RANK_MODEL, ROLE_OPTIM, ROLE_LAYER, ROLE_EXPERT };

/* What the name of a file says. */
struct zero_name {
    enum zero_role role;
    size_t nprefix;        /* characters before zero_pp_rank_ */
    uint32_t rank, tensor; /* data-parallel and tensor-parallel rank */
};

/* Returns what a file is by its name: of which rank, and of the model or the optimizer. */
static struct zero_name parse_zero_name(const char *name)
{
    static const struct {
        const char *form;
        enum zero_role role;
    } forms[] = {
        {"mp_rank_#_model_states.pt", ROLE_MODEL},
        {"zero_pp_rank_#_mp_rank_#_model_states.pt", ROLE_RANK_MODEL},
        {"zero_pp_rank_#_mp_rank_#_optim_states.pt", ROLE_OPTIM},
        {"zero_pp_rank_#_mp_rank_#optim_states.pt", ROLE_OPTIM}, /* of early versions */
        {"layer_*expert*model_states.pt", ROLE_EXPERT},
        {"layer_*model_states.pt", ROLE_LAYER},
        {"expp_rank_*_optim_states.pt", ROLE_EXPERT},
    };
    bool prefixed = strncmp(name, "bf16_", 5) == 0 || strncmp(name, "fp16_", 5) == 0;
    struct zero_name out = {.nprefix = prefixed ? 5 : 0};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        int64_t numbers[2] = {0};
        if (!name_has_form(name + out.nprefix, forms[i].form, numbers))
            continue;
        out.role = forms[i].role;
        out.rank = out.role == ROLE_MODEL ? 0 : (uint32_t)numbers[0];
        out.tensor = (uint32_t)numbers[out.role == ROLE_MODEL ? 0 : 1];
        break;
    }
    return out;
}

/* ---- signs ---- */

static bool has_directory(const struct store_listing *listing)
{
    for (size_t i = 0; i < listing->n; i++)
        if (listing->entries[i].directory)
            return true;
    return false;
}

int zero_probe(const struct store_listing *listing, const struct store_entry *entry,
               struct slice start)
{
    if (entry->directory || start.bytes) /* a single file is not a checkpoint of DeepSpeed */
        return NOT_SURE;
    if (strcmp(entry->base, "latest") == 0 || strcmp(entry->base, "latest_universal") == 0)
        return has_directory(listing) ? SURE_OF_ZERO_TAG : NOT_SURE;
    return parse_zero_name(entry->base).role != ROLE_OTHER ? SURE_OF_ZERO_FILE : NOT_SURE;
}

/* ---- tags ---- */

/* Reads the name of a directory from `latest` or `latest_universal`. *tag is NULL if the store has no such
 * file; the caller frees it. */
static rsd_status read_tag(struct store *store, const char *name, char **tag)
{
    enum { MAX_TAG_NBYTES = 4096 };
    char *text = NULL;
    size_t n = 0, begin = 0;
    uint32_t file = 0;
    *tag = NULL;
    while (file < store->names.n && strcmp(store_file_name(store, file), name) != 0)
        file++;
    if (file == store->names.n)
        return RSD_OK;
    rsd_status status = store_load(store, file, MAX_TAG_NBYTES, &text, &n);
    if (status)
        return store_fail_in(store, file, status);
    while (n > 0 && strchr(" \t\r\n", text[n - 1]))
        n--;
    while (begin < n && strchr(" \t\r\n", text[begin]))
        begin++;
    struct slice trimmed = {text + begin, n - begin};
    if (memchr(trimmed.bytes, '/', trimmed.nbytes) || memchr(trimmed.bytes, '\0', trimmed.nbytes) ||
        store_check_name(trimmed))
        status = store_fail_in(
            store, file,
            fail(RSD_EFORMAT, "'%.*s' is not the name of a directory beside it; name the directory",
                 slice_width(trimmed, 100), trimmed.bytes));
    memmove(text, text + begin, trimmed.nbytes);
    text[trimmed.nbytes] = '\0';
    if (status)
        mem_free(text);
    else
        *tag = text;
    return status;
}

/* Chooses between two tags. A universal checkpoint is one of a tag that it was made of. */
static rsd_status choose_tag(struct store *store, char *latest, char *universal, char **directory)
{
    size_t n = latest ? strlen(latest) : 0;
    if (latest && universal && strncmp(universal, latest, n) != 0)
        return fail(RSD_EFORMAT,
                    "%s: latest names %.100s and latest_universal names %.100s; name the directory "
                    "to read",
                    store->path, latest, universal);
    *directory = text_copy(universal ? universal : latest ? latest : "");
    return *directory ? RSD_OK : RSD_ENOMEM;
}

static rsd_status find_tag(struct store *store, char **directory)
{
    char *latest, *universal = NULL;
    TRY(read_tag(store, "latest", &latest));
    rsd_status status = read_tag(store, "latest_universal", &universal);
    if (!status)
        status = choose_tag(store, latest, universal, directory);
    mem_free(latest);
    mem_free(universal);
    return status;
}

/* ---- the files of a tag ---- */

/* Files of one role, by rank. */
struct role_files {
    const char **names; /* NULL: the rank has no file */
    uint32_t n, nfound; /* the largest rank plus 1 */
    size_t nprefix;
};

static rsd_status fail_role(const struct store *store, const char *name, const char *what)
{
    return fail(RSD_EUNSUPPORTED, "%s/%s: %s", store->path, name, what);
}

/* Keeps a file of a role. Its rank is limited by the number of entries: a larger one is found missing. */
static rsd_status keep_role_file(struct role_files *files, const struct store *store,
                                 const struct store_entry *entry, const struct zero_name *name,
                                 size_t nentries)
{
    if (name->tensor > 0)
        return fail_role(store, entry->name,
                         "tensor-parallel checkpoints of DeepSpeed are not supported");
    if (files->nfound && files->nprefix != name->nprefix)
        return fail(RSD_EFORMAT,
                    "%s/%s: other files have another prefix; move files of other runs away",
                    store->path, entry->name);
    files->nprefix = name->nprefix;
    if (name->rank >= files->n)
        files->n = name->rank + 1;
    if (name->rank < nentries && files->names[name->rank])
        return fail(RSD_EFORMAT, "%s/%s: rank %u has another file, %s; move one of them away",
                    store->path, entry->name, name->rank, files->names[name->rank]);
    if (name->rank < nentries)
        files->names[name->rank] = entry->base;
    files->nfound++;
    return RSD_OK;
}

/* Adds the files of a role to the store. */
static rsd_status add_role_files(const struct role_files *files, struct store *store,
                                 const char *directory, const char *kind, uint32_t **out)
{
    for (uint32_t r = 0; r < files->n && r <= files->nfound; r++)
        if (r == files->nfound || !files->names[r])
            return fail(RSD_ENOENT,
                        "%s%s%s: %s file of rank %u is missing: a file of rank %u is there",
                        store->path, *directory ? "/" : "", directory, kind, r, files->n - 1);
    *out = mem_new(files->n, sizeof **out);
    if (!*out)
        return RSD_ENOMEM;
    for (uint32_t r = 0; r < files->n; r++)
        TRY(format_add_file(store, directory, slice_of(files->names[r]), &(*out)[r]));
    return RSD_OK;
}

/* What a directory of a tag has in it. */
struct tag_listing {
    struct role_files model, rank_model, optim;
};

/* Sorts the files of a checkpoint by what they have. EUNSUPPORTED: it is of a pipeline or of experts. */
static rsd_status sort_entries(struct tag_listing *tag, const struct store *store,
                               const struct store_listing *listing)
{
    for (size_t i = 0; i < listing->n; i++) {
        const struct store_entry *entry = &listing->entries[i];
        struct zero_name name = parse_zero_name(entry->base);
        if (entry->directory)
            continue;
        if (name.role == ROLE_LAYER)
            return fail_role(store, entry->name,
                             "pipeline-parallel checkpoints of DeepSpeed are not supported");
        if (name.role == ROLE_EXPERT)
            return fail_role(store, entry->name,
                             "mixture-of-experts checkpoints of DeepSpeed are not supported");
        if (name.role == ROLE_MODEL)
            TRY(keep_role_file(&tag->model, store, entry, &name, listing->n));
        if (name.role == ROLE_RANK_MODEL)
            TRY(keep_role_file(&tag->rank_model, store, entry, &name, listing->n));
        if (name.role == ROLE_OPTIM)
            TRY(keep_role_file(&tag->optim, store, entry, &name, listing->n));
    }
    return RSD_OK;
}

/* Chooses the files to read. ENOENT: no file has the model. */
static rsd_status take_entries(struct zero_files *files, struct tag_listing *tag,
                               struct store *store, const struct store_listing *listing)
{
    const char *slash = *files->directory ? "/" : "";
    TRY(sort_entries(tag, store, listing));
    if (tag->model.n > 0 && tag->rank_model.n > 0)
        return fail(
            RSD_EFORMAT,
            "%s%s%s: found model files of stage 3 and of another stage; move one of them away",
            store->path, slash, files->directory);
    const struct role_files *model = tag->model.n > 0 ? &tag->model : &tag->rank_model;
    if (model->n == 0)
        return fail(RSD_ENOENT, "%s%s%s: found no mp_rank_00_model_states.pt", store->path, slash,
                    files->directory);
    TRY(add_role_files(model, store, files->directory, "model", &files->model));
    TRY(add_role_files(&tag->optim, store, files->directory, "optimizer", &files->optim));
    files->model_by_rank = model == &tag->rank_model;
    files->nmodel = model->n;
    files->noptim = tag->optim.n;
    for (size_t i = 0; i < listing->n; i++)
        if (listing->entries[i].directory && strcmp(listing->entries[i].base, "zero") == 0)
            files->universal = true;
    return RSD_OK;
}

rsd_status zero_find_files(struct store *store, struct zero_files *files)
{
    struct store_listing listing = {0};
    struct tag_listing tag = {0};
    files->optimizer_state = UINT32_MAX;
    TRY(find_tag(store, &files->directory));
    rsd_status status = store_list(store, files->directory, &listing);
    if (status)
        return fail_in(status, "%s/%s: ", store->path, files->directory);
    tag.model.names = mem_new(listing.n, sizeof *tag.model.names);
    tag.rank_model.names = mem_new(listing.n, sizeof *tag.rank_model.names);
    tag.optim.names = mem_new(listing.n, sizeof *tag.optim.names);
    if (!tag.model.names || !tag.rank_model.names || !tag.optim.names)
        status = RSD_ENOMEM;
    if (!status)
        status = take_entries(files, &tag, store, &listing);
    mem_free(tag.model.names);
    mem_free(tag.rank_model.names);
    mem_free(tag.optim.names);
    store_listing_drop(&listing);
    return status;
}

void zero_files_drop(struct zero_files *files)
{
    mem_free(files->directory);
    mem_free(files->model);
    mem_free(files->optim);
    *files = (struct zero_files){0};
}
