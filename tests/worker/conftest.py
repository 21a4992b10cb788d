"""The store of a worker's tests, over each backend in turn."""

from pathlib import Path

import pytest

from infra.blob_folder import FolderBlobs
from infra.jobs import RedisJobs
from infra.memory import MemoryJobs
from infra.store import JobStore
from tests.worker.worker_aids import Backend


@pytest.fixture
def backend(store: JobStore, store_url: str, tmp_path: Path) -> Backend:
    async def another() -> JobStore:
        return store.another() if isinstance(store, MemoryJobs) else await RedisJobs.connect(store_url)

    return Backend(store, another, FolderBlobs(tmp_path / "blobs"))
