/* mlp.c - the tensor-parallel MLP of mlp.h; its ranks are threads.
 *
 *     build/examples/mlp [RANKS]
 *
 * Introduces: rsd_thread_group_new, rsd_thread_group_transport.
 */
#include "mlp.h"

#include <pthread.h>

struct worker {
    pthread_t thread;
    rsd_thread_group *group;
    int32_t rank;
    int failed;
};

static void *work(void *context)
{
    struct worker *worker = context;
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    or_die(rsd_thread_group_transport(worker->group, worker->rank, &transport));
    worker->failed = run_mlp(&transport);
    return NULL;
}

int main(int argc, char **argv)
{
    enum { MOST = 64 };
    static struct worker workers[MOST];
    int32_t nranks = argc > 1 ? (int32_t)strtol(argv[1], NULL, 10) : 4;
    int failed = 0;
    rsd_thread_group *group;
    if (nranks < 1 || nranks > MOST) {
        fprintf(stderr, "1 to %d ranks\n", (int)MOST);
        return 1;
    }
    or_die(rsd_thread_group_new(nranks, &group));
    for (int32_t i = 0; i < nranks; i++) {
        workers[i].group = group;
        workers[i].rank = i;
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i])) {
            fprintf(stderr, "cannot start a thread\n");
            return 1;
        }
    }
    for (int32_t i = 0; i < nranks; i++) {
        pthread_join(workers[i].thread, NULL);
        failed |= workers[i].failed;
    }
    rsd_thread_group_free(group);
    return failed || fflush(stdout) != 0;
}
