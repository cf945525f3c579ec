/* side_files.c - configs and tokenizers that go with the weights, so that transformers and PEFT load the result.
 *
 * They are looked for in the directory of --config-from; else in IN, in IN/huggingface, where verl puts them, and
 * beside IN. A server behind https:// does not list its files, so it is asked for known names. Files of
 * subdirectories are copied when the output is in its place.
 */
#include "cli.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_SIDE_NBYTES = 1 << 26, MAX_SIDE_DEPTH = 2 };

static bool is_model_card(const char *name)
{
    return cli_has_suffix(name, ".md") || strncmp(name, "LICENSE", 7) == 0 ||
           strncmp(name, "NOTICE", 6) == 0;
}

/* Whether a file is copied along with the weights: config.json, tokenizer.json, tokenizer.model and others. */
static bool is_side_file(const char *name)
{
    static const char *const suffixes[] = {".json", ".model",    ".txt", ".jinja",
                                           ".py",   ".tiktoken", NULL};
    if (name[0] == '.' || name[0] == '_' || strcmp(name, "commit_success.txt") == 0 ||
        cli_has_suffix(name, ".index.json") || strstr(name, "reshard-"))
        return false;
    if (strcmp(name, "metadata.json") == 0 || strncmp(name, "latest_", 7) == 0 ||
        strcmp(name, "zero_to_fp32.py") == 0)
        return false; /* of Megatron and DeepSpeed: it says how IN is stored */
    for (const char *const *suffix = suffixes; *suffix; suffix++)
        if (cli_has_suffix(name, *suffix))
            return true;
    return false;
}

/* The names of transformers and PEFT for such files. */
static const char *const known_names[] = {"config.json",
                                          "generation_config.json",
                                          "adapter_config.json",
                                          "tokenizer.json",
                                          "tokenizer.model",
                                          "tokenizer_config.json",
                                          "special_tokens_map.json",
                                          "added_tokens.json",
                                          "chat_template.json",
                                          "chat_template.jinja",
                                          "vocab.json",
                                          "vocab.txt",
                                          "merges.txt",
                                          "spiece.model",
                                          "preprocessor_config.json",
                                          "processor_config.json",
                                          NULL};

/* Whether a file has a known name. Others beside IN are not its own. */
static bool is_known_side_file(const char *name)
{
    for (const char *const *known = known_names; *known; known++)
        if (strcmp(name, *known) == 0)
            return true;
    return false;
}

static bool is_regular_file(const char *path)
{
    struct stat about;
    rsd_storage *storage;
    int64_t nbytes;
    if (urls_is_url(path))
        return urls_open_storage(path, &storage) == RSD_OK &&
               rsd_storage_load(storage, path, 0, NULL, &nbytes) == RSD_OK;
    return stat(path, &about) == 0 && S_ISREG(about.st_mode);
}

static rsd_status ignore_name(void *context, const char *name)
{
    (void)context, (void)name;
    return RSD_OK;
}

static bool has_entries(const char *path)
{
    struct stat about;
    rsd_storage *storage;
    if (!urls_is_url(path))
        return stat(path, &about) == 0 && S_ISDIR(about.st_mode);
    return urls_is_listed(path) && urls_open_storage(path, &storage) == RSD_OK &&
           rsd_storage_list(storage, path, ignore_name, NULL) == RSD_OK;
}

static bool has_file(const char *directory, const char *name)
{
    return is_regular_file(cli_text("%s/%s", directory, name));
}

static bool has_config(const char *directory)
{
    return has_file(directory, "config.json") || has_file(directory, "adapter_config.json");
}

/* ---- links ---- */

/* Returns whether a path is that of a file below a directory, whose path has n bytes. */
static bool is_path_below(const char *path, const char *directory, size_t n)
{
    return strncmp(path, directory, n) == 0 && path[n] == '/';
}

/* Returns whether a resolved path is in a directory, or a blob of the same cache of Hugging Face:
 * CACHE/snapshots/REVISION has links to CACHE/blobs. */
static bool is_inside(const char *path, const char *directory)
{
    size_t n = strlen(directory);
    if (is_path_below(path, directory, n))
        return true;
    while (n > 0 && directory[n - 1] != '/')
        n--;
    static const char snapshots[] = "/snapshots/", blobs[] = "/blobs";
    size_t m = sizeof snapshots - 1;
    if (n <= m || memcmp(directory + n - m, snapshots, m) != 0)
        return false;
    return strncmp(path, directory, n - m) == 0 &&
           is_path_below(path + (n - m), blobs, sizeof blobs - 1);
}

/* Returns whether a path leads out of a directory, through a link that the user has not allowed. */
static bool leads_out(const char *path, const char *directory)
{
    if (urls_is_url(path) || input_follows_links())
        return false;
    char *found = realpath(path, NULL), *above = realpath(directory, NULL);
    bool out = found && above && !is_inside(found, above);
    free(found);
    free(above);
    return out;
}

static int fail_outside(const struct conversion *request, const char *path, const char *directory)
{
    return cli_fail(request->verb, EXIT_UNREADABLE,
                    "%s: link leads out of %s; not followed unless links are allowed "
                    "(--follow-links)",
                    path, directory);
}

/* ---- what is copied ---- */

/* Returns whether a directory is the one of verl, below IN or beside it. */
static bool is_huggingface(const char *directory)
{
    return cli_has_suffix(directory, "/huggingface");
}

/* Returns the directory that configs are copied from. *beside: it is not IN, and only files with known names are
 * taken. */
static const char *find_config_directory(const struct conversion *request, bool *beside)
{
    *beside = false;
    if (request->config_from)
        return request->config_from;
    const char *huggingface = cli_text("%s/huggingface", request->in);
    if (has_entries(huggingface))
        return huggingface;
    if (has_config(request->in) || urls_is_root(request->in))
        return request->in;
    const char *parent = cli_parent_path(request->in);
    const char *beside_huggingface = cli_text("%s/huggingface", parent);
    const char *found = has_config(parent)               ? parent
                        : has_config(beside_huggingface) ? beside_huggingface
                                                         : NULL;
    *beside = found != NULL;
    return found ? found : request->in;
}

/* Adds a path, unless it is not a file. */
static void add_side_file(struct conversion *request, char *path)
{
    if (!is_regular_file(path))
        return;
    request->side_files = cli_need_memory(
        realloc(request->side_files, (request->nside_files + 1) * sizeof *request->side_files));
    request->side_files[request->nside_files++] = path;
    request->convert.side_files = (const char *const *)request->side_files;
    request->convert.nside_files = (int64_t)request->nside_files;
}

/* Megatron reads a DCP only with its own two files beside .metadata. */
static void find_megatron_files(struct conversion *request, const rsd_checkpoint *in)
{
    for (int64_t i = 0; i < rsd_checkpoint_nfiles(in); i++) {
        const char *file = rsd_checkpoint_file(in, i), *slash = strrchr(file, '/');
        int n = slash ? (int)(slash + 1 - file) : 0;
        if (strcmp(file + n, ".metadata") != 0)
            continue;
        add_side_file(request, cli_text("%s/%.*scommon.pt", request->in, n, file));
        if (request->nside_files > 0)
            add_side_file(request, cli_text("%s/%.*smetadata.json", request->in, n, file));
        return;
    }
}

static int by_path(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool names_one_file(const char *out)
{
    return cli_has_suffix(out, ".safetensors") || cli_has_suffix(out, ".pt") ||
           cli_has_suffix(out, ".pth") || cli_has_suffix(out, ".bin");
}

/* A directory whose files are added. */
struct side_search {
    struct conversion *request;
    const char *directory;
    bool beside; /* only files with known names are taken */
};

static rsd_status take_side_file(void *context, const char *name)
{
    const struct side_search *search = context;
    bool from = search->request->config_from != NULL;
    if (search->beside ? is_known_side_file(name)
                       : is_side_file(name) || (from && is_model_card(name)))
        add_side_file(search->request, cli_text("%s/%s", search->directory, name));
    return RSD_OK;
}

/* Adds the files of a directory, in any order. ENOENT: there is none. */
static rsd_status search_side_files(struct side_search *search)
{
    rsd_storage *storage;
    rsd_status status = urls_open_storage(search->directory, &storage);
    if (status)
        return status;
    if (urls_is_url(search->directory))
        search->request->io.storage = storage;
    if (!urls_is_url(search->directory) || urls_is_listed(search->directory))
        return rsd_storage_list(storage, search->directory, take_side_file, search);
    for (const char *const *name = known_names; *name; name++)
        take_side_file(search, *name);
    return RSD_OK;
}

/* Adds the files of a directory. Returns GO_ON or an exit code. */
static int list_side_files(struct conversion *request, const char *directory, bool beside)
{
    struct side_search search = {request, directory, beside};
    if (search_side_files(&search) && request->config_from)
        return cli_fail(request->verb, EXIT_USAGE, "--config-from %s", rsd_error());
    if (request->nside_files > 1)
        qsort(request->side_files, request->nside_files, sizeof *request->side_files, by_path);
    if (beside && request->nside_files && !request->quiet)
        cli_note(request->verb, "configs are copied from %s", directory);
    return GO_ON;
}

static bool copies_side_file(const struct conversion *request, const char *name)
{
    for (size_t i = 0; i < request->nside_files; i++) {
        const char *slash = strrchr(request->side_files[i], '/');
        if (strcmp(slash ? slash + 1 : request->side_files[i], name) == 0)
            return true;
    }
    return false;
}

/* An adapter keeps the names of PEFT for its file and its tensors. Returns GO_ON or an exit code. */
static int keep_adapter_names(struct conversion *request)
{
    bool adapter = copies_side_file(request, "adapter_config.json") &&
                   !copies_side_file(request, "config.json");
    if (!adapter || request->kind != MERGE)
        return GO_ON;
    request->convert.adapter = 1;
    if (request->all)
        return GO_ON;
    rsd_status status =
        rsd_rules_add(request->rules, RSD_RULE_RENAME, "s/[.](lora_[A-Za-z_]+)[.]default/.\\1/");
    return status ? cli_fail_status(request->verb, status) : GO_ON;
}

int side_files_find(struct conversion *request, const rsd_checkpoint *in)
{
    if (request->kind == CONVERT && request->convert.format == RSD_FORMAT_DCP)
        find_megatron_files(request, in);
    if (request->kind != MERGE && request->kind != SPLIT)
        return GO_ON;
    if (names_one_file(request->out))
        return !request->config_from ? GO_ON
                                     : cli_fail(request->verb, EXIT_USAGE,
                                                "--config-from needs an OUT that is a directory");
    bool beside;
    const char *directory = find_config_directory(request, &beside);
    const char *above = cli_parent_path(directory);
    if (!request->config_from && is_huggingface(directory) && leads_out(directory, above))
        return fail_outside(request, directory, above);
    int code = list_side_files(request, directory, beside);
    return code == GO_ON ? keep_adapter_names(request) : code;
}

char *side_files_find_config(const struct conversion *request)
{
    bool beside;
    const char *directory = find_config_directory(request, &beside);
    char *path = cli_text("%s/config.json", directory), *text = NULL;
    rsd_storage *storage;
    int64_t n;
    if (!is_regular_file(path))
        return NULL;
    if (leads_out(path, is_huggingface(directory) ? cli_parent_path(directory) : directory)) {
        if (!request->quiet)
            cli_note(request->verb, "the number of heads is not known: %s leads out of %s", path,
                     directory);
        return NULL;
    }
    if (!urls_is_url(path))
        return path;
    if (!urls_open_storage(path, &storage) &&
        rsd_storage_load(storage, path, MAX_SIDE_NBYTES, &text, &n) == RSD_OK) {
        char *config = cli_text("%s", text + strspn(text, " \t\r\n"));
        rsd_free(text);
        return config;
    }
    return NULL;
}

void side_files_note_missing(const struct conversion *request)
{
    if (request->kind != MERGE || names_one_file(request->out) ||
        copies_side_file(request, "config.json") ||
        copies_side_file(request, "adapter_config.json"))
        return;
    cli_note(request->verb,
             "%s has no config.json, without which transformers builds a default model; copy that "
             "of the model with --config-from DIR",
             request->out);
}

/* ---- subdirectories ---- */

/* Opens a directory below OUT, and makes it and those above it. Links are not followed: OUT may have had some before.
 * Returns -1 and sets errno on failure. */
static int open_below(const char *out, const char *inner)
{
    int fd = out_file_open_directory(out);
    char *parts = cli_text("%s", inner), *save = NULL;
    for (char *part = strtok_r(parts, "/", &save); part && fd >= 0;
         part = strtok_r(NULL, "/", &save)) {
        int below = mkdirat(fd, part, 0777) == 0 || errno == EEXIST
                        ? openat(fd, part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                        : -1;
        int error = errno;
        close(fd);
        errno = error;
        fd = below;
    }
    return fd;
}

/* Opens a file of --config-from. A link in it may lead out only if the user allows it. */
static int open_side_file(const struct conversion *request, const char *path, FILE **file)
{
    char *found = realpath(path, NULL);
    struct stat about;
    int code = EXIT_YES;
    *file = NULL;
    if (leads_out(path, request->config_from)) {
        code = fail_outside(request, path, request->config_from);
    } else {
        int fd = found ? open(found, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC) : -1;
        bool regular = fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode);
        *file = regular ? fdopen(fd, "rb") : NULL;
        if (!*file)
            code = cli_fail(request->verb, EXIT_IO, "%s: %s", path, strerror(errno));
        if (fd >= 0 && !*file)
            close(fd);
    }
    free(found);
    return code;
}

/* Copies one file to a directory below OUT. Returns EXIT_YES or an exit code. */
static int copy_file(const struct conversion *request, const char *from, const char *inner,
                     const char *name)
{
    struct out_file file;
    char block[1 << 14];
    FILE *in;
    int code = open_side_file(request, from, &in);
    if (code)
        return code;
    bool fine = out_file_open_in(&file, open_below(request->out, inner), name, true);
    for (size_t n; fine && (n = fread(block, 1, sizeof block, in)) > 0;)
        fine = fwrite(block, 1, n, file.stream) == n;
    fine = fine && !ferror(in);
    fine = out_file_close(&file, fine);
    int error = errno;
    fclose(in);
    errno = error;
    return fine ? EXIT_YES
                : cli_fail(request->verb, EXIT_IO, "%s%s/%s: %s", request->out, inner, name,
                           out_file_error());
}

static int copy_directory(const struct conversion *request, const char *inner, int depth);

/* Copies what an entry is: a file of the right name and size, or a directory with such files. A link to a directory
 * is not entered. */
static int copy_entry(const struct conversion *request, const char *inner, const char *name,
                      int depth)
{
    struct stat about;
    int code = EXIT_YES;
    char *source = cli_text("%s%s/%s", request->config_from, inner, name);
    if (lstat(source, &about) == 0 && S_ISDIR(about.st_mode)) {
        if (depth < MAX_SIDE_DEPTH)
            code = copy_directory(request, cli_text("%s/%s", inner, name), depth + 1);
    } else if (depth > 0 && (is_side_file(name) || is_model_card(name)) &&
               stat(source, &about) == 0 && S_ISREG(about.st_mode) &&
               about.st_size <= MAX_SIDE_NBYTES) {
        code = copy_file(request, source, inner, name);
    }
    return code;
}

/* Copies all files of a directory below --config-from but hidden ones, down to a depth. */
static int copy_directory(const struct conversion *request, const char *inner, int depth)
{
    char *from = cli_text("%s%s", request->config_from, inner);
    DIR *entries = opendir(from);
    int code = EXIT_YES;
    if (!entries)
        code = cli_fail(request->verb, EXIT_IO, "%s: %s", from, strerror(errno));
    for (struct dirent *entry; entries && !code && (entry = readdir(entries));)
        if (entry->d_name[0] != '.')
            code = copy_entry(request, inner, entry->d_name, depth);
    if (entries)
        closedir(entries);
    return code;
}

int side_files_copy_below(const struct conversion *request)
{
    const rsd_transport *transport = ranks_transport();
    if (!request->config_from || (transport && transport->rank > 0))
        return EXIT_YES;
    if (!urls_is_url(request->out) && !urls_is_url(request->config_from))
        return copy_directory(request, "", 0);
    if (!request->quiet)
        cli_note(request->verb, "subdirectories of %s are not copied from or to a URL",
                 request->config_from);
    return EXIT_YES;
}
