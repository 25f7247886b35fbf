"""Step features of the benchmarks."""
