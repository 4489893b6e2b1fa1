"""Text for training and evaluation: sources, tokenizers, packing, a checkpointable iterator.

`text` holds what a training run calls; `tokenizers` what turns text into ids and back.
"""
