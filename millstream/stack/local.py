"""A stack for one call: the settings of the environment, its data in a folder that is removed after it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from infra.settings import DispatcherSettings, PipelineSettings, QueueSettings, StoreSettings, WorkerSettings
from millstream.flags import from_environment
from millstream.stack.child import LogLine
from millstream.stack.settings import UpSettings
from millstream.stack.stack import Stack


@contextmanager
def local_stack(model: str | None, *, log: LogLine) -> Iterator[Stack]:
    """Everything on a free port, serving `model` (None: the environment's, or the default)."""
    worker = from_environment(WorkerSettings)
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        stack = Stack(
            store=replace(from_environment(StoreSettings), redis_url=None, blob_url=None),
            queue=from_environment(QueueSettings),
            worker=replace(worker, model=model) if model else worker,
            engine=from_environment(EngineConfig),
            dispatcher=from_environment(DispatcherSettings),
            pipelines=from_environment(PipelineSettings),
            up=replace(from_environment(UpSettings), data_dir=Path(folder)),
            log=log,
        )
        with stack:
            yield stack
