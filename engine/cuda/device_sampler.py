"""Draws tokens on the device: the host hands over what the draws need, and fetches the tokens when it wants them."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.cuda.device import Device, Event
from engine.cuda.draw_arrays import draw_arrays, edit_arrays, mask_array
from engine.cuda.staging import Staging, num_bytes_of
from engine.logprobs import position_logprobs
from engine.plan import PositionLogprobs, Sampled
from engine.sampler import NOT_FINITE, Draw, why_none
from kernels.sampling import dispatch
from kernels.sampling.draws import Drawn, Draws, Outcome, Support, TokenEdits
from kernels.sampling.support import support


class DeviceSampler:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._staging = Staging(device, 0)
        choice = dispatch.choose(device.torch_device)
        self._kernels = choice.run
        self.choices = {"sampling": choice.reason}

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, draws: list[Draw]) -> PendingDraws:
        """Starts the draws. logits: [L, vocab], fp32, on the device; left as they are, and not needed any more."""
        arrays = {f"draws.{name}": array for name, array in draw_arrays(draws).items()}
        edits = edit_arrays(draws)
        if edits is not None:
            arrays |= {f"edits.{name}": array for name, array in edits.items()}
        mask = mask_array(draws, logits.shape[1])
        if mask is not None:
            arrays["mask"] = mask
        if num_bytes_of(arrays) > self._staging.num_bytes:  # the longest edits so far: rare, and at most doubling
            self._staging = Staging(self._device, 2 * num_bytes_of(arrays))
        on_device = self._staging.upload(arrays)
        fields = Draws(**_part(on_device, "draws."))
        asking = [index for index, draw in enumerate(draws) if draw.sequence.num_logprobs is not None]
        raw = logits[fields.places[torch.tensor(asking, device=logits.device)]] if asking else None
        token_edits = None if edits is None else TokenEdits(**_part(on_device, "edits."))
        return PendingDraws(
            self._device, draws, self._drawn(logits, draws, fields, token_edits, on_device.get("mask")), asking, raw
        )

    def _drawn(
        self,
        logits: torch.Tensor,
        draws: list[Draw],
        fields: Draws,
        edits: TokenEdits | None,
        mask: torch.Tensor | None,
    ) -> Drawn:
        """`mask`: [draws, words], int32: bits of what grammars allow."""
        if not any(_is_filtered(draw) for draw in draws):
            return self._kernels.sample(logits, fields, edits, mask=mask)
        edited = logits[fields.places] if edits is None else self._kernels.edit(logits, fields, edits)
        if mask is not None:  # filters rank what is allowed
            bits = torch.arange(32, device=logits.device, dtype=torch.int32)
            is_allowed = ((mask[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]] != 0
            edited.masked_fill_(~is_allowed & edited.isfinite(), -torch.inf)  # what is not finite is to be found
        placed = replace(fields, places=torch.arange(len(draws), device=logits.device))
        return self._kernels.sample(edited, placed, support=_support(edited, draws))


class PendingDraws:
    """Draws under way. `token_ids` are on the device already, for a step that goes on from them."""

    def __init__(
        self, device: Device, draws: list[Draw], drawn: Drawn, asking: list[int], raw: torch.Tensor | None
    ) -> None:
        """`asking`: the draws that want logprobs; `raw`: their rows of logits."""
        self.token_ids = drawn.token_ids
        self._draws, self._asking, self._raw = draws, asking, raw
        self._landing = device.pinned(2 * 8 * len(draws)).view(torch.int64).view(2, -1)
        device.main.run(lambda: self._land(drawn))
        self._landed: Event = device.main.record()

    def result(self) -> list[Sampled]:
        """Waits for the device. One answer per draw, in order."""
        self._landed.wait()
        token_ids, outcomes = self._landing.tolist()
        logprobs = self._logprobs(token_ids, outcomes)
        return [
            Sampled(token_id, logprobs.get(index))
            if outcome == Outcome.TOKEN
            else Sampled(
                None, error=NOT_FINITE if outcome == Outcome.NOT_FINITE else why_none(self._draws[index].sequence)
            )
            for index, (token_id, outcome) in enumerate(zip(token_ids, outcomes, strict=True))
        ]

    def _land(self, drawn: Drawn) -> None:
        self._landing[0].copy_(drawn.token_ids, non_blocking=True)
        self._landing[1].copy_(drawn.outcomes.long(), non_blocking=True)

    def _logprobs(self, token_ids: list[int], outcomes: list[int]) -> dict[int, PositionLogprobs]:
        if self._raw is None:
            return {}
        counts = [self._draws[index].sequence.num_logprobs or 0 for index in self._asking]
        chosen = [token_ids[index] if outcomes[index] == Outcome.TOKEN else 0 for index in self._asking]
        found = position_logprobs(self._raw, chosen, max(counts))
        return {
            index: PositionLogprobs(each.chosen, each.top[:count])
            for index, count, each in zip(self._asking, counts, found, strict=True)
        }


def _part(arrays: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in arrays.items() if name.startswith(prefix)}


def _is_filtered(draw: Draw) -> bool:
    params = draw.sequence.params
    return not params.is_greedy and (bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0)


def _support(edited: torch.Tensor, draws: list[Draw]) -> Support:
    params = [draw.sequence.params if _is_filtered(draw) else None for draw in draws]
    return support(
        edited,
        temperatures=[each.temperature if each else 1.0 for each in params],
        top_ks=[each.top_k if each else 0 for each in params],
        top_ps=[each.top_p if each else 1.0 for each in params],
        min_ps=[each.min_p if each else 0.0 for each in params],
    )
