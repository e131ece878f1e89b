"""How many threads sums have."""

# One for each process: many would compete for the processors, and sums split over threads may differ in their last bits.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
