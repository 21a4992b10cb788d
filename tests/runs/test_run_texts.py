"""Documents in, prompts out: nothing is lost between the two, and everything fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.params import SamplingParams
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from infra.blobs import open_blobs
from infra.contracts import JobError, Kind
from infra.runs import DocumentSource, Style, SummaryParams
from tests.models import CHAT_TEMPLATE, write_tiny_tokenizer
from worker.runs.budget import DEFAULT_CHUNK_TOKENS, MARGIN_TOKENS, budget_of
from worker.runs.documents import DocumentRefused, read_document
from worker.runs.prompts import item_tokens, map_prompt, reduce_prompt, sampling
from worker.runs.text_models import TextModel

PARAGRAPH = "The station was built in 1921. It has two platforms.\n\n北京的春天来了。😺😺\n\n# A heading\nand more"
texts = st.lists(st.sampled_from([*PARAGRAPH.split(" "), "\n\n", "e\u0301", "👩‍👩‍👧", "\t", "x" * 50]), min_size=1).map(
    " ".join
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return TextModel("tiny", 512, Tokenizer(folder), ChatTemplate(CHAT_TEMPLATE, {}))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(text=texts, chunk_tokens=st.integers(16, 200), overlap=st.integers(0, 8))
def test_every_byte_of_a_document_is_the_own_byte_of_exactly_one_chunk(
    model: TextModel, text: str, chunk_tokens: int, overlap: int
) -> None:
    data = text.encode()
    chunks = model.chunks(text, chunk_tokens=chunk_tokens, overlap_tokens=overlap)
    if not text.strip():
        assert chunks == []
        return
    assert b"".join(data[chunk.own_start : chunk.end] for chunk in chunks) == data
    for chunk in chunks:
        assert chunk.start <= chunk.own_start < chunk.end
        assert len(model.tokenizer.encode(data[chunk.start : chunk.end].decode())) == chunk.num_tokens <= chunk_tokens


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(
    text=texts,
    context=st.integers(200, 1200),
    target=st.integers(1, 120),
    style=st.sampled_from(Style),
    language=st.sampled_from([None, "German"]),
    template=st.sampled_from([None, "List the risks."]),
    fan_in=st.integers(2, 20),
)
def test_every_prompt_and_its_summary_fit_the_context(
    model: TextModel,
    text: str,
    context: int,
    target: int,
    style: Style,
    language: str | None,
    template: str | None,
    fan_in: int,
) -> None:
    params = SummaryParams(model="tiny", style=style, target_tokens=target, language=language, template=template,
                           fan_in=fan_in)  # fmt: skip
    finals = (True, False)
    asks = [map_prompt(params, "", is_final=final) for final in finals]
    asks += [reduce_prompt(params, [], is_final=final) for final in finals]
    overhead = max(model.count(model.spec(ask)) for ask in asks)
    budget = budget_of(params, context_tokens=context, instruction_tokens=overhead)
    if isinstance(budget, JobError):
        assert "target_tokens" in budget.message and budget.code == "context_length_exceeded"
        return
    for is_final in finals:
        limit = item_tokens(params, is_final=is_final)
        for chunk in model.chunks(text, chunk_tokens=budget.chunk_tokens, overlap_tokens=0):
            part = text.encode()[chunk.start : chunk.end].decode()
            assert model.count(model.spec(map_prompt(params, part, is_final=is_final))) + limit <= context
        longest = ["ab" * (item_tokens(params, is_final=False) // 2)] * budget.fan_in
        assert model.count(model.spec(reduce_prompt(params, longest, is_final=is_final))) + limit <= context


def test_what_is_asked_for_is_lowered_to_what_fits() -> None:
    params = SummaryParams(model="m", target_tokens=100, chunk_tokens=100_000, overlap_tokens=50_000, fan_in=64)
    budget = budget_of(params, context_tokens=2048, instruction_tokens=48)
    assert not isinstance(budget, JobError)
    assert budget.chunk_tokens == 2048 - 48 - 100 - MARGIN_TOKENS
    assert budget.overlap_tokens <= budget.chunk_tokens // 2
    assert budget.fan_in == budget.chunk_tokens // 108
    roomy = budget_of(SummaryParams(model="m"), context_tokens=8192, instruction_tokens=40)
    assert not isinstance(roomy, JobError)
    assert (roomy.chunk_tokens, roomy.fan_in) == (DEFAULT_CHUNK_TOKENS, 8)


def test_prompts_share_their_beginning_and_say_what_is_wanted() -> None:
    params = SummaryParams(model="m", style=Style.BULLETS, language="German")
    one, other = (map_prompt(params, text, is_final=False) for text in ("first text", "second text"))
    assert one.removesuffix("first text") == other.removesuffix("second text")
    assert "bullet points" in one and "German" in one
    own = SummaryParams(model="m", template="List the risks named in the text.")
    assert map_prompt(own, "x", is_final=True).startswith("List the risks")
    assert reduce_prompt(own, ["a", "b"], is_final=True).endswith("a\n\nb")
    assert "List the risks" not in map_prompt(own, "x", is_final=False)  # parts are summarized, the end is as asked


@pytest.mark.parametrize("max_tokens", [1, 16, 64, 128, 4096, 8192])
def test_the_parameters_are_ones_that_the_engine_takes(max_tokens: int) -> None:
    params = SamplingParams.from_mapping(sampling(max_tokens)).validated(vocab_size=320)
    assert params.is_greedy and params.max_tokens == max_tokens and 0 < params.frequency_penalty <= 0.3


def test_a_model_without_a_chat_template_is_asked_plainly(model: TextModel) -> None:
    plain = TextModel("plain", 512, model.tokenizer, None)
    spec = plain.spec("Summarize.\n\ntext")
    assert (spec.kind, spec.messages) == (Kind.GENERATE, None)
    assert spec.prompt is not None and spec.prompt.startswith("Summarize.")
    assert plain.count(spec) == len(model.tokenizer.encode(spec.prompt))
    assert model.spec("x").kind is Kind.CHAT


# --- reading ---


def source(name: str, *, blob: str | None = None, uri: str | None = None) -> DocumentSource:
    return DocumentSource(id="d", name=name, blob=blob, uri=uri)


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"", "empty_document"), (b" \n\t ", "empty_document"), ("\ufeff".encode(), "empty_document"),
     (b"caf\xe9 au lait", "not_utf8"), (b"\xff\xfeh\x00i\x00", "not_utf8")],
)  # fmt: skip
def test_what_cannot_be_summarized_is_told_by_name(tmp_path: Path, data: bytes, code: str) -> None:
    blobs = open_blobs(tmp_path.as_uri())
    blobs.put("x", data)
    with pytest.raises(DocumentRefused) as caught:
        read_document(source("notes.txt", blob="x"), blobs, roots=[])
    assert caught.value.error.code == code and "notes.txt" in caught.value.error.message


def test_files_under_the_roots_are_read_and_no_others(tmp_path: Path) -> None:
    blobs = open_blobs((tmp_path / "blobs").as_uri())
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.md").write_text("\ufeff# Café\n")
        (folder / "b.pdf").write_bytes(b"%PDF")
    roots = [str(inside)]
    assert read_document(source("a.md", uri=(inside / "a.md").as_uri()), blobs, roots=roots) == "# Café\n"
    refused = {
        (outside / "a.md").as_uri(): "invalid_request",
        f"{inside.as_uri()}/../out/a.md": "invalid_request",
        (inside / "missing.txt").as_uri(): None,
        (inside / "b.pdf").as_uri(): "unsupported_type",
        "https://example.com/a.txt": "invalid_request",
        "s3://bucket/a.txt": "invalid_request",
    }
    for uri, code in refused.items():
        with pytest.raises(DocumentRefused) as caught:
            read_document(source("a", uri=uri), blobs, roots=roots)
        assert code in (None, caught.value.error.code)
    with pytest.raises(DocumentRefused, match="MILLSTREAM_FILE_ROOTS"):
        read_document(source("a", uri=(outside / "a.md").as_uri()), blobs, roots=roots)


def test_a_text_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(DocumentRefused):
        read_document(source("a", blob="nowhere"), open_blobs(tmp_path.as_uri()), roots=[])
