"""Vectors: the verbs that the mathematics is written in, where tensors lie in flat buffers, and stores of them."""
