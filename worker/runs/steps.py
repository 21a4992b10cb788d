"""The steps of runs: `split` reads a document, `advance` submits what is missing and takes in what has ended.

Both read what is and write only what follows from it, so a step that comes twice, late, or beside another one for the
same run changes nothing. Documents change by compare-and-set; jobs have ids made of run and item.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from infra import keys
from infra.blobs import Blobs
from infra.contracts import JobError, ModelCard, Notice
from infra.errors import MillstreamError, UnknownModel
from infra.runs import Document, DocumentState, DocumentUpdate, RunHeader, RunStore, Written, document_blob, output_blob
from infra.states import Status
from infra.store import JobStore
from worker.runs import progress
from worker.runs.budget import budget_of
from worker.runs.documents import DocumentRefused, read_document
from worker.runs.items import Items
from worker.runs.output import output_lines
from worker.runs.prompts import map_prompt, reduce_prompt
from worker.runs.text_models import TextModel, TextModels

log = logging.getLogger(__name__)

PAGE = 16  # documents looked at together
SPLIT_AHEAD = 4  # documents read before the window needs them
SPLIT_AGAIN_SECONDS = 60.0  # a split that has not come by then was lost
MAX_TRIES = 20  # of one compare-and-set; the next advance goes on


class RunSteps:
    def __init__(self, store: JobStore, runs: RunStore, blobs: Blobs, *, window: int, roots: Sequence[str],
                 ask_split: Callable[[str, int], None]) -> None:  # fmt: skip
        """`ask_split` sends the split step of (run, document); it may block, and raise what sending raises."""
        self._store = store
        self._runs = runs
        self._blobs = blobs
        self._window = window
        self._roots = roots
        self._ask_split = ask_split
        self._models = TextModels(blobs)
        self._items = Items(store, runs, blobs)

    async def advance(self, run_id: str, notices: Sequence[Notice] = ()) -> None:
        """Brings a run as far as it can go now. The notices that asked for it are deleted when that is done."""
        header = await self._runs.header(run_id)
        if header is not None:
            await self._advance(header)
        for notice in notices:
            await self._store.delete_notice(notice)

    async def split(self, run_id: str, number: int) -> None:
        """Reads document `number` of a run and splits it, then advances the run.

        Raises UnknownModel, BlobUnavailable: the clock of runs asks again.
        """
        header = await self._runs.header(run_id)
        if header is None or header.is_finished:
            return
        for document in await self._runs.documents(run_id, [number]):
            if not _is_unsplit(document.state):
                continue
            try:
                await self._split(header, document)
            except MillstreamError:  # the next advance may ask again at once
                await self._change(run_id, document, _unasked)
                raise
        await self.advance(run_id)

    # --- split ---

    async def _split(self, header: RunHeader, document: Document) -> None:
        model = await self._models.of(await self._card(header))
        try:
            text = await asyncio.to_thread(read_document, document.source, self._blobs, roots=self._roots)
            change = await self._chunked(header, document, model, text)
        except DocumentRefused as error:
            refused = error

            def change(state: DocumentState) -> DocumentState:
                return progress.refused(state, refused.error, num_bytes=refused.num_bytes)

        await self._change(header.run.id, document, lambda state: change(state) if _is_unsplit(state) else None)

    async def _chunked(self, header: RunHeader, document: Document, model: TextModel,
                       text: str) -> Callable[[DocumentState], DocumentState]:  # fmt: skip
        params = header.run.params
        prompts = [map_prompt(params, "", is_final=final) for final in (True, False)]
        prompts += [reduce_prompt(params, [], is_final=final) for final in (True, False)]
        instruction_tokens = max(model.count(model.spec(prompt)) for prompt in prompts)
        budget = budget_of(params, context_tokens=model.context_tokens, instruction_tokens=instruction_tokens)
        if isinstance(budget, JobError):
            raise DocumentRefused(budget.code, f"{document.source.name}: {budget.message}")
        chunks = await asyncio.to_thread(
            model.chunks, text, chunk_tokens=budget.chunk_tokens, overlap_tokens=budget.overlap_tokens
        )
        data = text.encode()
        # What was split is what is summarized, whatever becomes of the source meanwhile.
        await asyncio.to_thread(self._blobs.put, document_blob(header.run.id, document.number), data)
        return lambda state: progress.split(state, chunks, num_bytes=len(data), fan_in=budget.fan_in)

    async def _card(self, header: RunHeader) -> ModelCard:
        alias = header.run.params.model
        card = (await self._store.cards()).get(alias)
        if card is None:
            raise UnknownModel(f"run {header.run.id} waits for a worker of model {alias!r}")
        return card

    async def _lanes(self, alias: str) -> list[int]:
        """Lanes for new jobs. Which one an item's job went to, the document's state says, and no other."""
        its = [lane.number for lane in await self._store.lane_states() if lane.alias == alias and lane.is_open]
        return its or [await self._store.open_lane(alias)]

    # --- advance ---

    async def _advance(self, header: RunHeader) -> None:
        run_id = header.run.id
        if header.is_finished:
            return await self._clean_up(run_id)
        deadline_ms = header.run.deadline_ms
        if deadline_ms is not None and await self._runs.now_ms() >= deadline_ms:
            error = JobError(code="deadline", message="the run's deadline passed before it was done")
            await self._runs.finish(run_id, Status.EXPIRED, error=error)
            await self._clean_up(run_id)
            return await self._runs.wake(run_id)
        await self._settle(header)
        await self._feed(header)
        if not await self._runs.open_documents(run_id, limit=1):
            await self._finish(header)
        return None

    async def _settle(self, header: RunHeader) -> None:
        """Takes in the ends of jobs that are under way; a job that was never submitted is submitted now."""
        run_id = header.run.id
        by_document: dict[int, list[str]] = defaultdict(list)
        for number, item in await self._runs.in_flight(run_id):
            by_document[number].append(item)
        for document in await self._runs.documents(run_id, list(by_document)):
            await self._settle_document(header, document)

    async def _settle_document(self, header: RunHeader, document: Document) -> None:
        for _ in range(MAX_TRIES):
            results = await self._items.results(document.state)
            if results.missing:
                model = await self._models.of(await self._card(header))
                results.ended.update(await self._items.submit(header, document, results.missing, model))
            if not results.ended:
                return
            settled = progress.settle(document.state, document.source.id, results.ended)
            update = DocumentUpdate(document.number, settled.state, texts=settled.texts, settled=settled.items)
            written = await self._runs.update(header.run.id, update, window=self._window)
            if written is not Written.STALE:
                return
            (document,) = await self._runs.documents(header.run.id, [document.number])

    async def _feed(self, header: RunHeader) -> None:
        """Feeds what is ready, documents in order, as far as the window has room; has the next documents split.

        It looks at no more documents than that takes, however many the run has.
        """
        run_id = header.run.id
        room = self._window - len(await self._runs.in_flight(run_id))
        num_ahead, num_fed = 0, 0  # ahead: documents with work for the window's next room
        async for document in self._open_documents(run_id):
            if document.state.chunks is None:
                await self._have_split(header, document)
                num_ahead += 1
            else:
                ready = progress.ready_items(document.state)
                taken = await self._feed_document(header, document, ready[: max(0, room)])
                room, num_fed = room - taken, num_fed + taken
                num_ahead += len(ready) > taken
            if num_ahead >= (SPLIT_AHEAD if room <= 0 else max(SPLIT_AHEAD, self._window)):
                break
        if num_fed:
            now = await self._runs.header(run_id)
            if now is not None and now.is_finished:  # it ended while jobs were on their way into the queue
                await self._clean_up(run_id)

    async def _open_documents(self, run_id: str) -> AsyncIterator[Document]:
        """Documents that are not finished, in order, read a page at a time."""
        after = -1
        while numbers := await self._runs.open_documents(run_id, limit=PAGE, after=after):
            for document in await self._runs.documents(run_id, numbers):
                yield document
            after = numbers[-1]

    async def _have_split(self, header: RunHeader, document: Document) -> None:
        now_ms = await self._runs.now_ms()
        asked_ms = document.state.split_asked_ms
        if asked_ms is not None and now_ms - asked_ms < SPLIT_AGAIN_SECONDS * 1000:
            return
        document.state.split_asked_ms = now_ms
        update = DocumentUpdate(document.number, document.state)
        if await self._runs.update(header.run.id, update, window=self._window) is Written.YES:
            await asyncio.to_thread(self._ask_split, header.run.id, document.number)

    async def _feed_document(self, header: RunHeader, document: Document, items: Sequence[str]) -> int:
        """Feeds items of a document that are ready; returns how many."""
        if not items:
            return 0
        run_id = header.run.id
        model = await self._models.of(await self._card(header))
        lanes = await self._lanes(header.run.params.model)
        job_ids = {item: child_id(random.choice(lanes), run_id, document.number, item) for item in items}
        update = DocumentUpdate(document.number, progress.feed(document.state, job_ids), fed=items)
        if await self._runs.update(run_id, update, window=self._window) is not Written.YES:
            return 0  # another step was faster; it feeds, or the next one does
        (document,) = await self._runs.documents(run_id, [document.number])
        if failed := await self._items.submit(header, document, items, model):
            settled = progress.settle(document.state, document.source.id, failed)
            update = DocumentUpdate(document.number, settled.state, settled=settled.items)
            await self._runs.update(run_id, update, window=self._window)
            await self._runs.wake(run_id)  # what joins them may be ready now
        return len(items)

    # --- the end ---

    async def _finish(self, header: RunHeader) -> None:
        run_id = header.run.id
        view = await self._runs.get(run_id)
        if view is None:
            return
        num_succeeded = view.counts.documents_succeeded
        error = None if num_succeeded else JobError(code="no_summary", message="no document could be summarized")
        key = output_blob(run_id)
        lines = [line async for line in output_lines(self._runs, header)]
        await asyncio.to_thread(self._blobs.put_stream, key, lines)
        status = Status.SUCCEEDED if num_succeeded else Status.FAILED
        if await self._runs.finish(run_id, status, error=error, output=key):
            log.info("run %s %s: %d of %d documents", run_id, status, num_succeeded, header.num_documents)
        await self._runs.wake(run_id)  # its end wants to be told

    async def _clean_up(self, run_id: str) -> None:
        """Cancels the jobs of a run that has ended."""
        items = await self._runs.in_flight(run_id)
        documents = await self._runs.documents(run_id, sorted({number for number, _ in items}))
        fed = {document.number: progress.fed_items(document.state) for document in documents}
        for number, item in items:
            if job_id := fed.get(number, {}).get(item):
                await self._store.cancel(job_id)
        if items:
            await self._runs.drop_in_flight(run_id, items)
            await self._runs.wake(run_id)

    async def _change(self, run_id: str, document: Document,
                      change: Callable[[DocumentState], DocumentState | None]) -> None:  # fmt: skip
        """Compare-and-set: `change` is asked again for each newer state, and says None where it has nothing to do."""
        for _ in range(MAX_TRIES):
            state = change(document.state)
            if state is None:
                return
            written = await self._runs.update(run_id, DocumentUpdate(document.number, state), window=self._window)
            if written is not Written.STALE:
                return
            (document,) = await self._runs.documents(run_id, [document.number])


def _is_unsplit(state: DocumentState) -> bool:
    return state.chunks is None and not state.is_finished


def _unasked(state: DocumentState) -> DocumentState | None:
    return msgspec.structs.replace(state, split_asked_ms=None) if _is_unsplit(state) else None


def child_id(lane: int, run_id: str, number: int, item: str) -> str:
    """The id of an item's job: the same however often it is fed."""
    return keys.new_job_id(lane, hashlib.sha256(f"{run_id}/{number}/{item}".encode()).hexdigest()[:32])
