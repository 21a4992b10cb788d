"""From logits to tokens for a whole batch: edits, mask, noise, the largest."""
