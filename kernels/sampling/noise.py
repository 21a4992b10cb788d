"""Gumbel noise from Philox4x32-10, a pure function of (seed, choice, output index, token id):

key      = seed, low word and high word
counter  = (token id / 4, output index, choice, 0); the token takes word w = word (token id % 4)
v        = min(w * 2^-32 + 2^-33, 1 - 2^-24), each step rounded to fp32
g        = -log(-log(1 - v)), in fp64, rounded to fp32 at last
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def gumbel_noise(seed: int, choice: int, output_index: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Noise for token ids 0 .. num_tokens - 1: [num_tokens], fp32."""
    x0 = torch.arange((num_tokens + 3) // 4, dtype=torch.int64, device=device)
    x1, x2, x3 = (torch.full_like(x0, value) for value in (output_index, choice, 0))
    low, high = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        left, right = x0 * 0xD2511F53, x2 * 0xCD9E8D57  # modulo 2^64: the bits count, not the sign
        x0, x1, x2, x3 = _high(right) ^ x1 ^ low, right & _LOW, _high(left) ^ x3 ^ high, left & _LOW
        low, high = (low + 0x9E3779B9) & _LOW, (high + 0xBB67AE85) & _LOW
    words = torch.stack((x0, x1, x2, x3), dim=1).flatten()[:num_tokens]
    v = (words.float() * 2**-32 + 2**-33).clamp(max=1 - 2**-24).double()
    return (-(-torch.log1p(-v)).log()).float()


def _high(product: torch.Tensor) -> torch.Tensor:
    return (product >> 32) & _LOW
