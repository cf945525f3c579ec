/* kinds.c - the table of kinds of memory that belong to devices.
 *
 * Memory that no kind knows is plain memory of the host. A module that implements a kind builds on this one, and
 * nothing else refers to it.
 */
#include "memory.h"

extern const struct memory_kind cuda_kind;

static const struct memory_kind *const kinds[] = {&cuda_kind, NULL};

bool memory_has_devices(void)
{
    for (size_t i = 0; kinds[i]; i++)
        if (kinds[i]->is_used())
            return true;
    return false;
}

struct memory_place memory_find_place(const void *address)
{
    for (size_t i = 0; kinds[i]; i++) {
        struct memory_place place = {.kind = kinds[i]};
        if (kinds[i]->find_place(address, &place))
            return place;
    }
    return (struct memory_place){.device = -1, .for_host = true};
}

rsd_status memory_find_device(const void *address, struct memory_device **device)
{
    struct memory_device *found = NULL;
    struct memory_place place = memory_find_place(address);
    if (address && !place.for_host)
        TRY(place.kind->open_device(place.device, &found));
    *device = found;
    return RSD_OK;
}

rsd_status memory_open_device(int ordinal, struct memory_device **device)
{
    return kinds[0]->open_device(ordinal, device);
}

/* ---- freeing ---- */

void memory_queue_free(struct memory_queue *queue)
{
    if (queue)
        queue->kind->queue_free(queue);
}

void memory_program_free(struct memory_program *program)
{
    if (program)
        program->kind->program_free(program);
}

void memory_buffer_free(struct memory_buffer *buffer)
{
    if (buffer->memory)
        buffer->device->kind->buffer_free(buffer);
    *buffer = (struct memory_buffer){0};
}

void memory_pieces_drop(struct memory_pieces *pieces)
{
    if (pieces->n)
        pieces->kind->unexport(pieces->list, pieces->n);
    mem_free(pieces->list);
    *pieces = (struct memory_pieces){0};
}
