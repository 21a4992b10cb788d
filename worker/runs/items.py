"""Between items of a document and jobs of the queue: makes the jobs, reads their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from engine.errors import InvalidRequest
from infra.blobs import Blobs
from infra.contracts import Job, JobError, JobSpec, NewJob, Result, RunItem, pack
from infra.errors import UnknownBlob
from infra.runs import Document, DocumentState, RunHeader, RunStore, SummaryParams, document_blob
from infra.states import TERMINAL, Status
from infra.store import JobStore
from worker.runs import progress
from worker.runs.progress import ItemResult
from worker.runs.prompts import item_tokens, map_prompt, reduce_prompt, sampling
from worker.runs.text_models import TextModel

MAX_INLINE_BYTES = 256 * 1024  # a larger spec goes to the blob store


@dataclass(slots=True)
class Results:
    """Of a document's items that are under way."""

    ended: dict[str, ItemResult] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # fed, but their jobs are not in the store


class Items:
    def __init__(self, store: JobStore, runs: RunStore, blobs: Blobs) -> None:
        self._store = store
        self._runs = runs
        self._blobs = blobs

    async def results(self, state: DocumentState) -> Results:
        """What became of the jobs under way."""
        results = Results()
        fed = progress.fed_items(state)
        jobs = await asyncio.gather(*(self._store.get(job_id) for job_id in fed.values()))
        for item, job in zip(fed, jobs, strict=True):
            if job is None:
                results.missing.append(item)
            elif job.status in TERMINAL:
                results.ended[item] = await self._result(job)
        return results

    async def submit(self, header: RunHeader, document: Document, items: Sequence[str],
                     model: TextModel) -> dict[str, ItemResult]:  # fmt: skip
        """Submits the jobs of fed items; submitting one twice is harmless. Returns the items that cannot be asked."""
        failed: dict[str, ItemResult] = {}
        job_ids = progress.fed_items(document.state)
        for item in items:
            try:
                spec, cost_tokens = await self._ask(header, document, item, model)
            except _Unaskable as error:
                failed[item] = ItemResult(error=error.error)
                continue
            job = NewJob(
                id=job_ids[item],
                spec=await self._inline_or_blob(spec, job_ids[item]),
                tier=header.run.tier,
                priority=header.run.priority,
                tenant=header.run.tenant,
                cost_tokens=cost_tokens,
                deadline_ms=header.run.deadline_ms,
                traceparent=header.run.traceparent,
            )
            await self._store.submit(job)
        return failed

    async def _ask(self, header: RunHeader, document: Document, item: str, model: TextModel) -> tuple[JobSpec, int]:
        """The spec of an item's job and the tokens it may come to hold."""
        params = header.run.params
        is_final = item == document.state.final_item
        spec = model.spec(await self._prompt(header.run.id, params, document, item, is_final=is_final))
        max_tokens = item_tokens(params, is_final=is_final)
        try:
            cost_tokens = model.count(spec) + max_tokens
        except InvalidRequest as error:
            raise _Unaskable("invalid_request", str(error)) from error
        if cost_tokens > model.context_tokens:
            raise _Unaskable(
                "context_length_exceeded",
                f"the prompt and a summary of {max_tokens} take {cost_tokens} tokens; "
                f"the model holds {model.context_tokens}",
            )
        spec.params = sampling(max_tokens)
        spec.run_item = RunItem(run_id=header.run.id, item_id=f"{document.number}:{item}")
        spec.salt = header.run.salt
        return spec, cost_tokens

    async def _prompt(self, run_id: str, params: SummaryParams, document: Document, item: str, *,
                      is_final: bool) -> str:  # fmt: skip
        joined = progress.tree_for(document.state).children[item]
        if not joined:
            return map_prompt(params, await self._chunk_text(run_id, document, item), is_final=is_final)
        wanted = progress.done_children(document.state, item)
        texts = await self._runs.texts(run_id, document.number, wanted)
        if len(texts) < len(wanted):
            raise _Unaskable("summary_gone", "a summary that it joins is no longer kept")
        return reduce_prompt(params, [texts[child] for child in wanted], is_final=is_final)

    async def _chunk_text(self, run_id: str, document: Document, item: str) -> str:
        (number,) = progress.tree_for(document.state).spans[item]
        chunk = (document.state.chunks or [])[number]
        try:
            data = await asyncio.to_thread(self._read_range, document_blob(run_id, document.number), chunk.start,
                                           chunk.end)  # fmt: skip
        except UnknownBlob as error:
            raise _Unaskable(error.code, "the document's text is no longer kept") from error
        return data.decode()

    def _read_range(self, key: str, start: int, end: int) -> bytes:
        with self._blobs.open_read(key) as text:
            if text.seekable():
                text.seek(start)
            else:
                text.read(start)
            return text.read(end - start)

    async def _inline_or_blob(self, spec: JobSpec, job_id: str) -> JobSpec:
        data = pack(spec)
        if len(data) <= MAX_INLINE_BYTES:
            return spec
        key = f"specs/{job_id}"
        await asyncio.to_thread(self._blobs.put, key, data)
        return msgspec.structs.replace(spec, messages=None, prompt=None, blob=key)

    async def _result(self, job: Job) -> ItemResult:
        outcome = job.outcome
        if outcome is None or job.status is not Status.SUCCEEDED:
            error = outcome.error if outcome is not None else None
            usage = outcome.usage if outcome is not None else ItemResult().usage
            return ItemResult(error=error or JobError(code=job.status, message=f"its job {job.status}"), usage=usage)
        result = outcome.result or Result()
        if result.blob is not None:
            try:
                data = await asyncio.to_thread(self._blobs.get, result.blob)
            except UnknownBlob as error:
                lost = JobError(code=error.code, message="its job's result is no longer kept")
                return ItemResult(error=lost, usage=outcome.usage)
            result = msgspec.msgpack.decode(data, type=Result)
        text = result.choices[0].text.strip() if result.choices else ""
        if not text:
            empty = JobError(code="empty_summary", message="the model wrote nothing")
            return ItemResult(error=empty, usage=outcome.usage)
        return ItemResult(text=text, usage=outcome.usage, cut=result.choices[0].finish_reason == "length")


class _Unaskable(Exception):
    """This item cannot be put to the model."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = JobError(code=code, message=message)
