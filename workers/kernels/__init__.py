"""Compiled CPU kernels: numba functions over raw addresses, with tokens in vector lanes.

Activations are kept feature by feature with 16 tokens side by side, one per vector lane, so that
norms, rotations and activations need no reductions across lanes and a block of 16 tokens is what
the matrix tiles of a CPU take. No C++ compiler is needed; compiled code is cached on disk.
"""
