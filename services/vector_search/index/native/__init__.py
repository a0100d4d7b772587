"""The C++ kernels of vector search: no torch, no OpenMP."""
