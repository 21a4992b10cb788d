"""What a GPU adds to running a model: graphs, pinned memory, a stream for swapped blocks, a measured pool."""
