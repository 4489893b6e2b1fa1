"""Products of tokens with the state of their chunk, and these states."""

from ttt_kernels.chunk_products.api import chunk_outputs, chunk_states, chunk_summaries

__all__ = ["chunk_outputs", "chunk_states", "chunk_summaries"]
