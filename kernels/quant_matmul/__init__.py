"""y = x W^T with weights of 8 or 4 bits."""
