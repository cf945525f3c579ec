/* zip.h - the archives of torch.save. */
#ifndef ZIP_H
#define ZIP_H

#include "pickle.h"

/* ---- zip.c ---- */

struct zip_record {
    struct slice name;
    uint64_t header; /* where its header begins in the archive */
    uint64_t data;   /* and its bytes, once located; 0: not yet */
    uint64_t nbytes;
    uint32_t crc;
};

struct zip_name {
    struct zip_record *record;
};

struct zip {
    read_at *read;
    void *context;
    uint64_t nbytes;
    uint64_t directory_at;
    unsigned char *directory;
    struct zip_record *records; /* by place */
    struct zip_name *by_name;
    size_t nrecords;
};

rsd_status zip_open(struct zip *zip, read_at *read, void *context, uint64_t nbytes);
void zip_close(struct zip *zip);

/* A record by its name without the folder, located; NULL: there is none. */
rsd_status zip_find(struct zip *zip, const char *name, struct zip_record **out);
rsd_status zip_locate(const struct zip *zip, struct zip_record *record);

/* The values of a located record that is a pickle; EFORMAT if its CRC-32 is wrong. */
rsd_status zip_read_pickle(const struct zip *zip, const struct zip_record *record,
                           struct pickle_tree *tree, pickle_node *root);

#endif
