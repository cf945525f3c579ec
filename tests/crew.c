/* crew.c - see crew.h. */
#include "crew.h"
#include "folder.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct started {
    pthread_t thread;
    struct hand *hand;
    hand_work *work;
};

static void *run(void *context)
{
    struct started *started = context;
    struct hand *hand = started->hand;
    hand->status = started->work(hand);
    snprintf(hand->message, sizeof hand->message, "%s", hand->status ? rsd_error() : "");
    return NULL;
}

void crew_run(struct crew *crew, int32_t n, hand_work *work, const void *task, unsigned absent)
{
    rsd_thread_group *group = NULL;
    struct started started[MOST_CREW];
    *crew = (struct crew){.n = n};
    if (rsd_thread_group_new(n, &group))
        abort();
    for (int32_t i = 0; i < n; i++) {
        crew->hands[i] =
            (struct hand){.transport.struct_nbytes = sizeof(rsd_transport), .task = task};
        if (rsd_thread_group_transport(group, i, &crew->hands[i].transport))
            abort();
        crew->hands[i].report.struct_nbytes = sizeof(rsd_report);
        started[i] = (struct started){.hand = &crew->hands[i], .work = work};
        if (!(absent >> i & 1))
            pthread_create(&started[i].thread, NULL, run, &started[i]);
    }
    for (int32_t i = 0; i < n; i++)
        if (!(absent >> i & 1))
            pthread_join(started[i].thread, NULL);
    rsd_thread_group_free(group);
}

void crew_free(struct crew *crew)
{
    for (int32_t i = 0; i < crew->n; i++)
        free(crew->hands[i].told);
}

void hand_tell(struct hand *hand, const char *text)
{
    size_t n = strlen(text);
    hand->told = realloc(hand->told, hand->ntold + n + 2);
    memcpy(hand->told + hand->ntold, text, n);
    hand->told[hand->ntold + n] = '\n';
    hand->told[hand->ntold + n + 1] = '\0';
    hand->ntold += n + 1;
}

bool same_folders(const char *a, const char *b)
{
    DIR *folder = opendir(a);
    bool same = folder && count_entries(a) == count_entries(b);
    if (!same)
        printf("# %s has %d files, %s has %d\n", a, count_entries(a), b, count_entries(b));
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char one[512], other[512];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(one, sizeof one, "%s/%s", a, entry->d_name);
        snprintf(other, sizeof other, "%s/%s", b, entry->d_name);
        if (!same_files(one, other)) {
            printf("# %s differs\n", other);
            same = false;
        }
    }
    if (folder)
        closedir(folder);
    return same;
}
