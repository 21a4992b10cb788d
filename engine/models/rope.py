"""Rotary frequencies and the tables of their cosines and sines, for every stretching of the context that we know.

    frequency[i] = theta^(-2i / rotary_dim),   stretched by kind:
    linear     frequency / factor
    dynamic    theta grown so that the longest context turns as far as the trained one (NTK-aware)
    llama3     long waves divided by factor, short ones kept, those between blended
    yarn       the same idea by number of turns within the trained context; cos and sin scaled
    longrope   one given divisor per frequency, another set beyond the trained context; cos and sin scaled

Where the answer depends on the length of the context (dynamic, longrope), it is fixed once from `max_model_len`:
a token must not change because a later one made its sequence longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.models.config import RopeConfig

Frequencies = tuple[torch.Tensor, float]  # [rotary_dim / 2] fp32, and the factor on cos and sin


def rope_table(config: RopeConfig, max_model_len: int) -> torch.Tensor:
    """[max_model_len, 2, rotary_dim / 2], fp32: cosines and sines of every position.

    In float64 by numpy, of angles in float32 as transformers has them. torch's own, where MKL computes them on several
    threads, were wrong by 1e-4 in some processes: those that it computed first.
    """
    frequency, scale = frequencies(config, max_model_len)
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angle = (positions[:, None] * frequency[None, :]).double().numpy()
    table = np.stack((np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)), axis=1)
    return torch.from_numpy(table) * scale


def frequencies(config: RopeConfig, max_model_len: int) -> Frequencies:
    return _KINDS[config.kind](config, max_model_len)


def _plain(theta: float, rotary_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _default(config: RopeConfig, max_model_len: int) -> Frequencies:
    return _plain(config.theta, config.rotary_dim), 1.0


def _linear(config: RopeConfig, max_model_len: int) -> Frequencies:
    return _plain(config.theta, config.rotary_dim) / config.parameters["factor"], 1.0


def _dynamic(config: RopeConfig, max_model_len: int) -> Frequencies:
    factor = config.parameters["factor"]
    trained = config.parameters["max_position_embeddings"]
    longest = max(max_model_len, trained)
    growth = (factor * longest / trained - (factor - 1)) ** (config.rotary_dim / (config.rotary_dim - 2))
    return _plain(config.theta * growth, config.rotary_dim), 1.0


def _llama3(config: RopeConfig, max_model_len: int) -> Frequencies:
    parameters = config.parameters
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequency = _plain(config.theta, config.rotary_dim)
    num_turns = parameters["original_max_position_embeddings"] * frequency / (2 * math.pi)
    kept = ((num_turns - low) / (high - low)).clamp(0, 1)  # share of the frequency that stays as it was
    return (1 - kept) * frequency / factor + kept * frequency, 1.0


def _yarn(config: RopeConfig, max_model_len: int) -> Frequencies:
    parameters = config.parameters
    trained = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / trained

    def index_of(num_turns: float) -> float:
        """The frequency index that makes so many turns within the trained context."""
        return config.rotary_dim * math.log(trained / (num_turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = index_of(parameters.get("beta_fast") or 32), index_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    index = torch.arange(config.rotary_dim // 2, dtype=torch.float32)
    stretched = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    frequency = _plain(config.theta, config.rotary_dim)
    return frequency / factor * stretched + frequency * (1 - stretched), _yarn_scale(parameters, factor)


def _yarn_scale(parameters: dict[str, Any], factor: float) -> float:
    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return grown(parameters["mscale"]) / grown(parameters["mscale_all_dim"])
    return grown(1.0)


def _longrope(config: RopeConfig, max_model_len: int) -> Frequencies:
    parameters = config.parameters
    trained = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / trained
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    divisors = torch.tensor(parameters["long_factor" if max_model_len > trained else "short_factor"])
    return _plain(config.theta, config.rotary_dim) / divisors.float(), float(scale)


_KINDS: dict[str, Callable[[RopeConfig, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
