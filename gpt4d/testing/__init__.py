"""Tools of the tests and the benchmarks: virtual devices, and the measured memory of a function."""
