"""The forward pass over rows: weights bound to blocks, blocks to layers, layers to stages."""

from strata.engine.model.model import Model
from strata.engine.model.rows import MAX_ROWS, Rows

__all__ = ["MAX_ROWS", "Model", "Rows"]
