/* packed.h - the files of a checkpoint in one input.
 *
 *     options (2 bytes) | the allocation that fails, 0: none (1 byte) | file | file ...
 *     file:    name (1 byte) | form (1 byte) | length (2 bytes) | content
 *
 * The name is an index into a table; from 128 on it is that of a data file of DCP. For 127 it is in front of the
 * content, behind its length. The form says what is made of the content, so that lengths and CRCs are right: an
 * archive of records, or a frame of OCDBT or zstd.
 */
#ifndef PACKED_H
#define PACKED_H

#include "crc.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum packed_form { FORM_RAW, FORM_ARCHIVE, FORM_MANIFEST, FORM_NODE, FORM_ZSTD, NFORMS };

enum { PACKED_HEAD = 3, FILE_HEAD = 4 };

/* fuzz/pack.py reads this table. */
static const char *const packed_names[] = {
    ".metadata",
    "__0.metadata",
    "__1.metadata",
    "__0_0.distcp",
    "__1_0.distcp",
    "metadata.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "shard-00001-model-00001-of-00001.safetensors",
    "shard-00002-model-00001-of-00001.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model-00002-of-00002.bin",
    "fsdp_config.json",
    "model_world_size_2_rank_0.pt",
    "model_world_size_2_rank_1.pt",
    "optim_world_size_2_rank_0.pt",
    "optim_world_size_2_rank_1.pt",
    "extra_state_world_size_2_rank_0.pt",
    "latest",
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "zero_pp_rank_1_mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "zero/w/fp32.pt",
    "zero/w/exp_avg.pt",
    "zero/w/step.pt",
    "zero/optimizer_state.pt",
    "step_1/mp_rank_00_model_states.pt",
    "latest_checkpointed_iteration.txt",
    "mp_rank_00/model_optim_rng.pt",
    "mp_rank_01/model_optim_rng.pt",
    "mp_rank_00_000/model_optim_rng.pt",
    "mp_rank_01_000/model_optim_rng.pt",
    "mp_rank_00_001/model_optim_rng.pt",
    "mp_rank_01_001/model_optim_rng.pt",
    "iter_0000003/mp_rank_00/model_optim_rng.pt",
    "_METADATA",
    "_strings.json",
    "_CHECKPOINT_METADATA",
    "manifest.ocdbt",
    "d/0",
    "ocdbt.process_0/manifest.ocdbt",
    "ocdbt.process_0/d/0",
    "w/.zarray",
    "w/zarr.json",
    "w/0",
    "w/0.0",
    "w/1.0",
    "w/c/0",
    "w/c/0/0",
    "w/c/1/0",
    "v/.zarray",
    "v/0",
    "default/_METADATA",
    "default/w/.zarray",
    "default/w/0.0",
    "other/_METADATA",
};
enum {
    NPACKED_NAMES = sizeof packed_names / sizeof *packed_names,
    OWN_NAME = 127,
    FIRST_DATA_FILE = 128
};

/* A file of an input. */
struct packed_file {
    size_t begin; /* in the input */
    int name;
    enum packed_form form;
    const uint8_t *data;
    size_t n;
};

/* Finds the next file; *at is where it begins, and then where the one behind it does. */
static bool next_file(const uint8_t *input, size_t n, size_t *at, struct packed_file *file)
{
    if (*at >= n || n - *at < FILE_HEAD)
        return false;
    const uint8_t *head = input + *at;
    size_t length = head[2] | (size_t)head[3] << 8, left = n - *at - FILE_HEAD;
    *file = (struct packed_file){.begin = *at,
                                 .name = head[0] < OWN_NAME ? head[0] % NPACKED_NAMES : head[0],
                                 .form = (enum packed_form)(head[1] % NFORMS),
                                 .data = head + FILE_HEAD,
                                 .n = length < left ? length : left};
    *at += FILE_HEAD + file->n;
    return true;
}

/* ---- forms ---- */

static void put_archive(struct bytes *out, const uint8_t *data, size_t n)
{
    struct bytes directory = {0};
    uint64_t nrecords = 0;
    while (n >= 3) { /* length of the name, length of the content, name, content */
        size_t nname = data[0], length = data[1] | (size_t)data[2] << 8;
        nname = nname < n - 3 ? nname : n - 3;
        length = length < n - 3 - nname ? length : n - 3 - nname;
        const uint8_t *name = data + 3, *content = name + nname;
        uint64_t at = out->n, crc = crc32_of(content, length);
        bytes_put(out, "PK\3\4\0\0\0\0\0\0\0\0\0\0", 14);
        bytes_put_number(out, crc, 4);
        bytes_put_number(out, length, 4);
        bytes_put_number(out, length, 4);
        bytes_put_number(out, nname, 2);
        bytes_put_number(out, 0, 2);
        bytes_put(out, name, nname);
        bytes_put(out, content, length);
        bytes_put(&directory, "PK\1\2\0\0\0\0\0\0\0\0\0\0\0\0", 16);
        bytes_put_number(&directory, crc, 4);
        bytes_put_number(&directory, length, 4);
        bytes_put_number(&directory, length, 4);
        bytes_put_number(&directory, nname, 2);
        bytes_put(&directory, "\0\0\0\0\0\0\0\0\0\0\0\0", 12);
        bytes_put_number(&directory, at, 4);
        bytes_put(&directory, name, nname);
        nrecords++;
        data += 3 + nname + length;
        n -= 3 + nname + length;
    }
    uint64_t at = out->n;
    bytes_put(out, directory.data, directory.n);
    bytes_put(out, "PK\5\6\0\0\0\0", 8);
    bytes_put_number(out, nrecords, 2);
    bytes_put_number(out, nrecords, 2);
    bytes_put_number(out, directory.n, 4);
    bytes_put_number(out, at, 4);
    bytes_put_number(out, 0, 2);
    bytes_drop(&directory);
}

/* The content begins with the compression. */
static void put_frame_of(struct bytes *out, uint32_t magic, const uint8_t *data, size_t n)
{
    const unsigned char big[4] = {(unsigned char)(magic >> 24), (unsigned char)(magic >> 16),
                                  (unsigned char)(magic >> 8), (unsigned char)magic};
    size_t begin = out->n;
    bytes_put(out, big, sizeof big);
    bytes_put_number(out, n + 17, 8);
    bytes_put_number(out, 0, 1);
    bytes_put(out, data, n);
    bytes_put_number(out, crc32c_of(out->data + begin, out->n - begin), 4);
}

/* Nodes follow each other: length, content, length, content. */
static void put_nodes(struct bytes *out, const uint8_t *data, size_t n)
{
    while (n >= 2) {
        size_t length = data[0] | (size_t)data[1] << 8;
        length = length < n - 2 ? length : n - 2;
        put_frame_of(out, 0x0cdb20de, data + 2, length);
        data += 2 + length;
        n -= 2 + length;
    }
}

static void put_zstd(struct bytes *out, const uint8_t *data, size_t n)
{
    bytes_put(out, "\x28\xb5\x2f\xfd\0\x38", 6);
    bytes_put_number(out, n << 3 | 1, 3); /* the last block, not compressed */
    bytes_put(out, data, n);
}

static void put_form(struct bytes *out, const struct packed_file *file)
{
    switch (file->form) {
    case FORM_ARCHIVE:
        put_archive(out, file->data, file->n);
        break;
    case FORM_MANIFEST:
        put_frame_of(out, 0x0cdb3a2a, file->data, file->n);
        break;
    case FORM_NODE:
        put_nodes(out, file->data, file->n);
        break;
    case FORM_ZSTD:
        put_zstd(out, file->data, file->n);
        break;
    default:
        bytes_put(out, file->data, file->n);
    }
}

/* ---- on disk ---- */

static void make_parents(char *path)
{
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0700);
        *slash = '/';
    }
}

/* Writes the name of a file. Returns false for one that would be outside of the directory. */
static bool make_name(struct packed_file *file, char name[256])
{
    if (file->name < OWN_NAME) {
        snprintf(name, 256, "%s", packed_names[file->name]);
    } else if (file->name >= FIRST_DATA_FILE) {
        snprintf(name, 256, "__%d_0.distcp", file->name - FIRST_DATA_FILE);
    } else {
        if (file->n == 0 || file->data[0] > file->n - 1)
            return false;
        snprintf(name, 256, "%.*s", file->data[0], (const char *)file->data + 1);
        size_t skip = 1 + (size_t)file->data[0];
        file->data += skip;
        file->n -= skip;
    }
    return *name && *name != '/' && !strstr(name, "..");
}

static void write_packed(const char *directory, struct packed_file file)
{
    char path[512], name[256];
    struct bytes bytes = {0};
    if (!make_name(&file, name))
        return;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    make_parents(path);
    put_form(&bytes, &file);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) { /* it cannot be the name of a file */
        bytes_drop(&bytes);
        return;
    }
    if (bytes.failed || write(fd, bytes.data, bytes.n) != (ssize_t)bytes.n || close(fd) != 0)
        abort();
    bytes_drop(&bytes);
}

static int remove_entry(const char *path, const struct stat *about, int kind, struct FTW *place)
{
    (void)about, (void)kind, (void)place;
    return remove(path);
}

static void remove_tree(const char *path)
{
    nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

#endif
