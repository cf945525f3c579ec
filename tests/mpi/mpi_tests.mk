# Tests over real processes, under mpirun.
