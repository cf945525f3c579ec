/* zip.h - zip archives as torch.save writes them. */
#ifndef ZIP_H
#define ZIP_H

#include "pickle.h"

struct zip_record {
    struct slice name;
    uint64_t header; /* offset of its header in the archive */
    uint64_t data;   /* offset of its bytes; 0: not located yet */
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
    struct zip_record *records; /* by offset */
    struct zip_name *by_name;
    size_t nrecords;
};

/* Reads the directory of an archive of nbytes. The context must outlive the archive. */
rsd_status zip_open(struct zip *zip, read_at *read, void *context, uint64_t nbytes);
void zip_close(struct zip *zip);

/* Finds a record by its name without the directory, and locates it. *out is NULL if the archive lacks it. */
rsd_status zip_find(struct zip *zip, const char *name, struct zip_record **out);
rsd_status zip_locate(const struct zip *zip, struct zip_record *record);

/* Reads all of a record. EFORMAT: its CRC-32 is wrong. */
rsd_status zip_check(const struct zip *zip, struct zip_record *record);

/* Reads a located record that is a pickle. EFORMAT: its CRC-32 is wrong. */
rsd_status zip_read_pickle(const struct zip *zip, const struct zip_record *record,
                           struct pickle_tree *tree, pickle_node *root);

#endif
