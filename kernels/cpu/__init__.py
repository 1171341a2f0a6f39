"""Fast host kernels (numba): the contract of `kernels.ops`, bit for bit."""

from strata.kernels.cpu import cache as cache  # before any kernel is defined: it says where compiled code is kept
