/* scalapack_mpi.c - redistributes a block-cyclic matrix of ScaLAPACK, as pdgemr2d does, without ScaLAPACK.
 *
 *     mpirun -np 4 build/examples/scalapack_mpi 1000 800  2 2 64 64  4 1 128 32
 *
 * The arguments are the rows and columns of the matrix, then, for each side, the rows and columns of the process grid and
 * of a block. A descriptor of ScaLAPACK is a layout with two cyclic placements and column-major arrays:
 *
 *     grid P x Q, MB, NB, RSRC = CSRC = 0      f64[M,N] @ PxQ : C(0,MB),C(1,NB)
 *
 * Introduces: rsd_bind_mpi_many with column-major arrays.
 */
#include "elements.h"
#include "reshard_mpi.h"

struct matrix {
    int64_t m, n;   /* of elements */
    int64_t p, q;   /* of processes */
    int64_t mb, nb; /* of a block */
};

/* As NUMROC: how many of n rows or columns a process has. */
static int64_t local_count(int64_t n, int64_t block, int64_t process, int64_t nprocesses)
{
    int64_t blocks = n / block, count = blocks / nprocesses * block, extra = blocks % nprocesses;
    return count + (process < extra ? block : process == extra ? n % block : 0);
}

/* As INDXL2G: the global index of a local row or column. */
static int64_t global_index(int64_t local, int64_t block, int64_t process, int64_t nprocesses)
{
    return nprocesses * block * (local / block) + local % block + process * block;
}

/* Fills or compares the local array by the formulas of ScaLAPACK. Returns the number of elements that are right. */
static int64_t visit(const struct matrix *a, int rank, double *array, int fill)
{
    int64_t row = rank / a->q, column = rank % a->q, right = 0;
    if (row >= a->p)
        return 0;
    int64_t lld = local_count(a->m, a->mb, row, a->p),
            width = local_count(a->n, a->nb, column, a->q);
    for (int64_t j = 0; j < width; j++)
        for (int64_t i = 0; i < lld; i++) {
            double value = (double)(global_index(i, a->mb, row, a->p) * a->n +
                                    global_index(j, a->nb, column, a->q));
            if (fill)
                array[j * lld + i] = value;
            right += array[j * lld + i] == value;
        }
    return right;
}

static rsd_layout *layout_of(const struct matrix *a)
{
    char text[256];
    rsd_layout *layout;
    snprintf(text, sizeof text, "f64[%lld,%lld] @ %lldx%lld : C(0,%lld),C(1,%lld)", (long long)a->m,
             (long long)a->n, (long long)a->p, (long long)a->q, (long long)a->mb, (long long)a->nb);
    or_die(rsd_layout_parse(text, &layout));
    return layout;
}

int main(int argc, char **argv)
{
    int64_t v[10] = {1000, 800, 2, 2, 64, 64, 4, 1, 128, 32}, nsrc, ndst, right, sum;
    int rank;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int i = 1; i < argc && i <= 10; i++)
        v[i - 1] = atoll(argv[i]);
    struct matrix a = {v[0], v[1], v[2], v[3], v[4], v[5]},
                  b = {v[0], v[1], v[6], v[7], v[8], v[9]};
    rsd_layout *from = layout_of(&a), *to = layout_of(&b);
    void **src = new_arrays(from, rank, &nsrc), **dst = new_arrays(to, rank, &ndst);
    visit(&a, rank, nsrc ? src[0] : NULL, 1);
    rsd_plan *plan;
    rsd_exec *exec;
    rsd_bind_options fortran = RSD_INIT(rsd_bind_options);
    fortran.src_column_major = fortran.dst_column_major = 1;
    or_die(rsd_plan_new(from, to, NULL, &plan));
    or_die(rsd_bind_mpi_many(1, (const rsd_plan *const *)&plan, &fortran, MPI_COMM_WORLD, NULL,
                             &exec));
    or_die(rsd_exec_run(exec, (const void *const *)src, dst));

    right = visit(&b, rank, ndst ? dst[0] : NULL, 0);
    MPI_Reduce(&right, &sum, 1, MPI_INT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%lldx%lld elements on a grid of %lldx%lld: %lld are wrong\n", (long long)b.m,
               (long long)b.n, (long long)b.p, (long long)b.q, (long long)(b.m * b.n - sum));
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    free_arrays(src, nsrc);
    free_arrays(dst, ndst);
    rsd_layout_free(from);
    rsd_layout_free(to);
    MPI_Finalize();
    return rank == 0 && (sum != b.m * b.n || fflush(stdout) != 0);
}
