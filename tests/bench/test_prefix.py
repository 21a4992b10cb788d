"""The shared-prefix benchmark counts what it should; its seconds are no test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_all_but_the_first_document_find_the_instruction_in_the_cache(tmp_path: Path) -> None:
    report = tmp_path / "prefix.json"
    command = [sys.executable, "-m", "bench.prefix", "--model", "fake", "--documents", "8", "--runs", "1"]
    done = subprocess.run(
        [*command, "--output", str(report)], env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 1), done.stderr  # 1: the stand-in computes a token in no time, so nothing is gained
    told = json.loads(report.read_text())
    assert told["same_tokens"]
    # 43 whole blocks of 16 lie in 700 tokens; the second document starts in the step that ends the first one's prompt
    assert 6 * 688 < told["num_cached_tokens"] <= 7 * 688
