"""A worker as a process of its own: `python worker_process.py URL BLOBS SETTINGS ENGINE`, the last two in JSON."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

if __name__ == "__main__":
    from engine import EngineConfig
    from infra.settings import StoreSettings, WorkerSettings
    from millstream.tether import tether
    from worker.main import run

    tether(os.environ)
    url, blob_url, settings, engine = sys.argv[1:]
    store = StoreSettings(redis_url=url, blob_url=blob_url)
    sys.exit(run(store, WorkerSettings(**json.loads(settings)), EngineConfig(**json.loads(engine))))
