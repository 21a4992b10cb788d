"""One model on several devices: each rank holds a share of every layer; rank 0 plans and tells the others."""
