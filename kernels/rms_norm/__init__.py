"""RMS norm: y = x / sqrt(mean(x^2) + eps) * weight."""
