"""Vectors: the verbs that the mathematics is written in, the layout of tensors in flat buffers, and stores."""
