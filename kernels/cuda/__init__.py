"""CUDA kernels through CuPy: the contract of `kernels.ops` on a card, bit for bit as the host computes it."""
