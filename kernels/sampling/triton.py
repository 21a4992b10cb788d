"""Token = argmax of logit + T * g over the tokens that may be drawn, ties to the lower id; g as in noise.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling.draws import Drawn, Draws, Outcome, Support, TokenEdits

_CHUNK = 2048  # tokens that one program looks at
_EDITS = 128  # edits that one program takes at once
_NO_ID = tl.constexpr((1 << 31) - 1)
_TOKEN = tl.constexpr(int(Outcome.TOKEN))
_NOT_FINITE = tl.constexpr(int(Outcome.NOT_FINITE))
_EMPTY = tl.constexpr(int(Outcome.EMPTY))
_WORD_UNIT = tl.constexpr(2**-32)
_HALF_WORD_UNIT = tl.constexpr(2**-33)
_LARGEST = tl.constexpr(1 - 2**-24)


def sample(
    logits: torch.Tensor,
    draws: Draws,
    edits: TokenEdits | None = None,
    support: Support | None = None,
    mask: torch.Tensor | None = None,
) -> Drawn:
    """logits: [rows, vocab], fp32, rows contiguous, left as they are; mask: [draws, ceil(vocab / 32)], int32, bit
    (id % 32) of word (id // 32) set where the token may be drawn (a grammar's).
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 with contiguous rows; they are {logits.dtype}, {logits.stride()}")
    num_draws, num_tokens, device = len(draws), logits.shape[1], logits.device
    drawn = Drawn(
        torch.empty(num_draws, dtype=torch.int64, device=device),
        torch.empty(num_draws, dtype=torch.int32, device=device),
    )
    if num_draws == 0:
        return drawn
    places = draws.places
    if edits is not None:
        logits = edit(logits, draws, edits)
        places = torch.arange(num_draws, device=device)
    num_chunks = triton.cdiv(num_tokens, _CHUNK)
    best = torch.empty((num_draws, num_chunks), dtype=torch.float32, device=device)
    best_ids, is_bad = (torch.empty((num_draws, num_chunks), dtype=torch.int32, device=device) for _ in range(2))
    _draw_chunk[(num_draws, num_chunks)](
        logits,
        places,
        draws.temperatures,
        draws.seeds,
        draws.choices,
        draws.output_indices,
        best if support is None else support.floors,
        best_ids if support is None else support.last_ids,
        best_ids if mask is None else mask,
        best,
        best_ids,
        is_bad,
        num_tokens,
        num_chunks,
        logits.stride(0),
        0 if mask is None else mask.stride(0),
        CHUNK=_CHUNK,
        HAS_SUPPORT=support is not None,
        HAS_MASK=mask is not None,
        num_warps=8,
        enable_fp_fusion=False,  # T * g is rounded before it is added, as everywhere else
    )
    _join_chunks[(num_draws,)](
        best, best_ids, is_bad, drawn.token_ids, drawn.outcomes, num_chunks, CHUNKS=128, num_warps=1
    )
    return drawn


def edit(logits: torch.Tensor, draws: Draws, edits: TokenEdits) -> torch.Tensor:
    """[draws, vocab]: each draw's own copy of its row, edited."""
    edited = logits.index_select(0, draws.places)
    _edit[(len(draws),)](
        edited,
        edits.starts,
        edits.token_ids,
        edits.biases,
        edits.is_seen,
        edits.output_counts,
        draws.repetition_penalties,
        draws.frequency_penalties,
        draws.presence_penalties,
        edited.stride(0),
        EDITS=_EDITS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return edited


@triton.jit
def _edit(
    logits_ptr,
    starts_ptr,
    token_ids_ptr,
    biases_ptr,
    is_seen_ptr,
    output_counts_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    row_stride,
    EDITS: tl.constexpr,
):
    """logit += bias; if seen: logit /= or *= repetition; if in the output: logit -= frequency * count + presence.

    One program: one draw.
    """
    draw = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + draw * row_stride
    repetition = tl.load(repetition_ptr + draw)
    frequency, presence = tl.load(frequency_ptr + draw), tl.load(presence_ptr + draw)
    start, end = tl.load(starts_ptr + draw), tl.load(starts_ptr + draw + 1)
    for first in range(start, end, EDITS):
        place = first + tl.arange(0, EDITS)
        inside = place < end
        token_id = tl.load(token_ids_ptr + place, mask=inside, other=0)
        count = tl.load(output_counts_ptr + place, mask=inside, other=0)
        is_seen = tl.load(is_seen_ptr + place, mask=inside, other=0) != 0
        value = tl.load(row_ptr + token_id, mask=inside, other=0.0)
        value += tl.load(biases_ptr + place, mask=inside, other=0.0)
        factor = tl.where(inside, repetition, 1.0)
        value = tl.where(is_seen, tl.where(value > 0, tl.div_rn(value, factor), value * factor), value)
        value = tl.where(count > 0, value - (frequency * count.to(tl.float32) + presence), value)
        tl.store(row_ptr + token_id, value, mask=inside)


@triton.jit
def gumbel_noise(seed, choice, output_index, first_id, CHUNK: tl.constexpr):
    """g of token ids first_id .. first_id + CHUNK: [CHUNK], fp32. first_id: a multiple of 4."""
    group = first_id // 4 + tl.arange(0, CHUNK // 4)
    same = tl.zeros_like(group)
    w0, w1, w2, w3 = tl.philox(seed, group, same + output_index, same + choice, same)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    v = tl.minimum(word.to(tl.float32) * _WORD_UNIT + _HALF_WORD_UNIT, _LARGEST).to(tl.float64)
    rest = 1.0 - v
    exponential = -tl.log(rest) * (v / (1.0 - rest))  # -log1p(-v): the quotient mends what 1 - v has rounded away
    return (-tl.log(exponential)).to(tl.float32)


@triton.jit
def _draw_chunk(
    logits_ptr,
    places_ptr,
    temperatures_ptr,
    seeds_ptr,
    choices_ptr,
    output_indices_ptr,
    floors_ptr,
    last_ids_ptr,
    mask_ptr,
    best_ptr,
    best_ids_ptr,
    is_bad_ptr,
    num_tokens,
    num_chunks,
    row_stride,
    mask_stride,
    CHUNK: tl.constexpr,
    HAS_SUPPORT: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """(largest logit + T * g, its lowest id, whether a logit is NaN or +inf). One program: CHUNK tokens of one draw.

    HAS_SUPPORT: some draw has top_k, top_p or min_p. HAS_MASK: some draw follows a grammar.
    """
    draw = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token_id < num_tokens
    row_ptr = logits_ptr + tl.load(places_ptr + draw) * row_stride
    value = tl.load(row_ptr + token_id, mask=inside, other=float("-inf"))
    is_bad = (value != value) | (value == float("inf"))
    may_be_drawn = inside & (value == value)
    if HAS_SUPPORT:
        floor = tl.load(floors_ptr + draw)
        last_id = tl.load(last_ids_ptr + draw)
        may_be_drawn &= (value > floor) | ((value == floor) & (token_id <= last_id))
    if HAS_MASK:
        word = tl.load(mask_ptr + draw * mask_stride + token_id // 32, mask=inside, other=0)
        may_be_drawn &= ((word >> (token_id % 32)) & 1) != 0
    value = tl.where(may_be_drawn, value, float("-inf"))
    temperature = tl.load(temperatures_ptr + draw)
    if temperature > 0:  # a greedy draw pays for no noise
        seed = tl.load(seeds_ptr + draw)
        choice, output_index = tl.load(choices_ptr + draw), tl.load(output_indices_ptr + draw)
        value += temperature * gumbel_noise(seed, choice, output_index, chunk * CHUNK, CHUNK)
    best = tl.max(value)
    place = draw * num_chunks + chunk
    tl.store(best_ptr + place, best)
    tl.store(best_ids_ptr + place, tl.min(tl.where(value == best, token_id, _NO_ID)))
    tl.store(is_bad_ptr + place, tl.max(is_bad.to(tl.int32)))


@triton.jit
def _join_chunks(best_ptr, best_ids_ptr, is_bad_ptr, token_ids_ptr, outcomes_ptr, num_chunks, CHUNKS: tl.constexpr):
    """token id = the lowest id among the chunks with the largest value. One program: one draw."""
    draw = tl.program_id(0).to(tl.int64)
    largest = tl.full([CHUNKS], float("-inf"), dtype=tl.float32)
    lowest_id = tl.full([CHUNKS], _NO_ID, dtype=tl.int32)
    is_bad = tl.zeros([CHUNKS], dtype=tl.int32)
    for first in range(0, num_chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        inside = chunk < num_chunks
        place = draw * num_chunks + chunk
        best = tl.load(best_ptr + place, mask=inside, other=float("-inf"))
        best_id = tl.load(best_ids_ptr + place, mask=inside, other=_NO_ID)
        is_bad |= tl.load(is_bad_ptr + place, mask=inside, other=0)
        lowest_id = tl.where(best > largest, best_id, lowest_id)  # chunks ascend, so an equal one comes too late
        largest = tl.maximum(largest, best)
    winner = tl.max(largest)
    outcome = tl.where(winner == float("-inf"), _EMPTY, _TOKEN)
    outcome = tl.where(tl.max(is_bad) > 0, _NOT_FINITE, outcome)
    token_id = tl.where(outcome == _TOKEN, tl.min(tl.where(largest == winner, lowest_id, _NO_ID)), 0)
    tl.store(token_ids_ptr + draw, token_id.to(tl.int64))
    tl.store(outcomes_ptr + draw, outcome)
