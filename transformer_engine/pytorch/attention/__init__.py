"""Attention: rotary embeddings of our own, the attention product itself PyTorch's."""
