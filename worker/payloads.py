"""Requests and results too large for the store: they lie among the blobs, and the record names them."""

from __future__ import annotations

import asyncio

import msgspec

from infra.blobs import Blobs
from infra.contracts import Hold, Job, JobSpec, Outcome, Result, pack

LARGE_BYTES = 256 * 1024  # a larger result goes to the blobs

_SPEC = msgspec.msgpack.Decoder(JobSpec)


class Payloads:
    """Every method raises BlobUnavailable, or UnknownBlob for a blob that is gone."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def spec_of(self, job: Job) -> JobSpec:
        """The whole of what was asked for."""
        if job.spec.blob is None:
            return job.spec
        return _SPEC.decode(await asyncio.to_thread(self._blobs.get, job.spec.blob))

    async def check_in(self, hold: Hold, outcome: Outcome, packed_result: bytes) -> Outcome:
        """Puts a large result away; returns the outcome that names it instead.

        The attempt is part of the key: a worker that has lost the job never writes over another's result.
        """
        key = f"results/{hold.job_id}/{hold.attempt}"
        await asyncio.to_thread(self._blobs.put, key, packed_result)
        return msgspec.structs.replace(outcome, result=Result(blob=key))


def large_result(outcome: Outcome) -> bytes | None:
    """The packed result, if it is too large for the store."""
    if outcome.result is None:
        return None
    packed = pack(outcome.result)
    return packed if len(packed) > LARGE_BYTES else None
