"""Tools of the tests and the benchmarks: virtual devices, counted kernels and measured memory."""
