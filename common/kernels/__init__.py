"""Triton kernels: one idea a file, each a launcher over plain tensors with no state of its own.

A launcher allocates nothing, so that it can be recorded in a CUDA graph: outputs and workspaces are
arguments. Each kernel has a slow torch reference of the same file name in tests/reference/kernels.
A row's bits never depend on how many rows or sequences share the launch.
"""
