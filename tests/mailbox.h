/* mailbox.h - a transport between threads of one process: what a plan is carried over in tests. */
#ifndef MAILBOX_H
#define MAILBOX_H

#include "reshard.h"

struct mailbox;

/* For so many ranks, each a thread. */
struct mailbox *mailbox_new(int32_t nranks);
void mailbox_free(struct mailbox *mailbox);
rsd_transport mailbox_transport(struct mailbox *mailbox, int32_t rank);

#endif
