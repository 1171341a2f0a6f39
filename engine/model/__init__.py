"""The forward pass over rows: weights bound to blocks, blocks to layers, layers to stages."""

from strata.engine.device.base import MAX_ROWS
from strata.engine.model.model import Model
from strata.engine.model.rows import Rows

__all__ = ["MAX_ROWS", "Model", "Rows"]
