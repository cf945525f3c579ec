/* sockets.c - runs a plan between processes over sockets, with the transport of sockets.h.
 *
 *     build/examples/sockets 'f32[1000,1000] : 4:S0 -> 2x2:S0,S1'
 *
 * Introduces: rsd_transport, rsd_bind_transport, rsd_gather.
 */
#include "sockets.h"

#include <sys/wait.h>
#include <unistd.h>

/* What a rank does: moves the tensor, and rank 0 prints how many elements are wrong. Returns the exit status. */
static int run_rank(const char *problem, int32_t rank, rank_queues *queues)
{
    rsd_transport transport = socket_transport(rank, queues);
    rsd_exchange_options options = RSD_INIT(rsd_exchange_options);
    rsd_layout *from, *to;
    rsd_plan *plan;
    rsd_exec *exec;
    int64_t nsrc, ndst, nelements = 0, wrong, all[NRANKS];
    options.node = -1; /* without shared memory, so that all data goes through the sockets */
    or_die(rsd_problem_parse(problem, &from, &to));
    or_die(rsd_plan_new(from, to, NULL, &plan));
    or_die(
        rsd_bind_transport(1, (const rsd_plan *const *)&plan, NULL, &transport, &options, &exec));
    void **src = new_arrays(from, rank, &nsrc), **dst = new_arrays(to, rank, &ndst);
    put_elements(from, rank, src, 1, &nelements);
    or_die(rsd_exec_run(exec, (const void *const *)src, dst));
    wrong = put_elements(to, rank, dst, 0, &nelements);
    or_die(rsd_gather(&transport, &wrong, sizeof wrong, all, 0));
    for (int i = 1; i < NRANKS; i++)
        all[0] += all[i];
    if (rank == 0)
        printf("%d processes: %lld elements are wrong\n", NRANKS, (long long)all[0]);
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    free_arrays(src, nsrc);
    free_arrays(dst, ndst);
    rsd_layout_free(from);
    rsd_layout_free(to);
    return all[0] != 0 || fflush(stdout) != 0;
}

int main(int argc, char **argv)
{
    static rank_queues queues[NRANKS];
    int failed = 0, status;
    for (int a = 0; a < NRANKS; a++)
        for (int b = 0; b < a; b++)
            for (int tag = 0; tag < NTAGS; tag++) {
                int pair[2];
                if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
                    return perror("socketpair"), 1;
                for (int way = 0; way < 2; way++) {
                    queues[a][b][tag][way] = (struct queue){pair[0], way, NULL};
                    queues[b][a][tag][way] = (struct queue){pair[1], way, NULL};
                }
            }
    for (int32_t rank = 0; rank < NRANKS; rank++)
        if (fork() == 0)
            return run_rank(argc > 1 ? argv[1] : "f32[1000,1000] : 4:S0 -> 2x2:S0,S1", rank,
                            &queues[rank]);
    while (wait(&status) > 0)
        failed |= status != 0;
    return failed;
}
