"""Products of tokens with the state of their chunk: one public function each way."""

from ttt_kernels.chunk_products.api import chunk_outputs, chunk_summaries

__all__ = ["chunk_outputs", "chunk_summaries"]
