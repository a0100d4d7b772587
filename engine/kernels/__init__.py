"""Kernels in C++ and Triton, with the Python code that calls them."""
