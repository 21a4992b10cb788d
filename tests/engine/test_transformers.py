"""transformers and its hub of kernels work beside our folder named `kernels`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import kernels
import transformers
import torch

assert kernels.__file__ is not None and kernels.__file__.startswith(sys.argv[2]), kernels.__file__
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("the king", return_tensors="pt").input_ids
made = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
assert made.shape[1] == ids.shape[1] + 3

from kernels.rms_norm.dispatch import choose
assert choose(torch.device("cpu")).run(torch.ones(1, 4), torch.ones(4), 1e-6).shape == (1, 4)
print("fine")
"""


def test_transformers_loads_and_runs_a_model_beside_our_kernels(tiny_folder: Path) -> None:
    done = run("-c", SCRIPT, str(tiny_folder), str(ROOT / "kernels"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("fine")


def test_serving_a_model_imports_no_transformers(tiny_folder: Path) -> None:
    script = (
        "import sys; from engine.config import EngineConfig; from engine.runner import load_runner; "
        "load_runner(sys.argv[1], EngineConfig(num_kv_blocks=4)); "
        "print([name for name in ('transformers', 'gguf', 'huggingface_hub', 'boto3') if name in sys.modules])"
    )
    done = run("-c", script, str(tiny_folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_text_needs_no_torch(tiny_folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from engine.text.tokenizer import Tokenizer; "
        "from engine.text.detokenizer import Detokenizer; from engine.text.splitter import split_document; "
        "t = Tokenizer(Path(sys.argv[1])); d = Detokenizer(t, stop=['x']); d.push(t.encode('a')[0]); "
        "split_document('one two', t, 16); t.chat_template.render([{'role': 'user', 'content': 'hi'}]); "
        "print('torch' in sys.modules)"
    )
    done = run("-c", script, str(tiny_folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
