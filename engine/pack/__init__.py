"""GGUF files -> Pack: a validated mapping of memory-mapped tensors and the model's geometry."""

from strata.engine.pack.errors import PackError
from strata.engine.pack.pack import DraftPack, Pack, Tensor, open_draft, open_pack
from strata.engine.pack.spec import DraftSpec, ModelSpec, PleSpec

__all__ = ["DraftPack", "DraftSpec", "ModelSpec", "Pack", "PackError", "PleSpec", "Tensor", "open_draft", "open_pack"]
