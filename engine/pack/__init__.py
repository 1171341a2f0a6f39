"""GGUF files -> Pack: a validated mapping of memory-mapped tensors and the model's geometry."""

from strata.engine.pack.errors import PackError
from strata.engine.pack.pack import Pack, Tensor, open_pack
from strata.engine.pack.spec import ModelSpec, PleSpec

__all__ = ["ModelSpec", "Pack", "PackError", "PleSpec", "Tensor", "open_pack"]
