"""Passes of networks on Triton kernels of our own."""
