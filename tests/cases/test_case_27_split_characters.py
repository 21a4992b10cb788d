"""vLLM #48853: a prompt of token ids that ends in part of an emoji: the first delta repeats the prompt's bytes.

Kind: text whose bytes belong to two owners. Siblings: every cut of every character length; the output continues the
character or does not; a prompt that ends in stray bytes; special tokens at the border; stop strings and n across it;
going on behind emitted tokens that end inside a character.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from tests.cases.scripted_model import writing

CHARACTERS = ["é", "漢", "😀", "👩‍👩‍👧", "🇩🇪"]


@pytest.mark.parametrize("character", CHARACTERS)
def test_the_first_delta_holds_only_what_is_new(character: str) -> None:
    data = character.encode()
    for cut in range(1, len(data)):
        prompt = [*b"say: ", *data[:cut]]
        rest = data[cut:] + b"!"
        expected = (data + b"!").decode()[len(data[:cut].decode(errors="ignore")) :]
        [output] = writing(rest).generate([prompt], SamplingParams(max_tokens=len(rest), n=2))
        assert [choice.text for choice in output.choices] == [expected] * 2
        llm = writing(rest)
        llm.add_request("r", prompt, SamplingParams(max_tokens=len(rest)))
        texts = []
        while llm.has_unfinished():
            texts += [each.text for delta in llm.step() for each in delta.deltas]
        assert "".join(texts) == expected
        assert texts[0] in ("", expected[:1]), "the first delta says more than the first character"


@pytest.mark.parametrize("prompt", [b"x\xf0\x9f", b"x\xf0\x9f\x98", b"x\xe6", b"x\x80", b"x\xff\xfe", b"\xf0"])
def test_a_prompts_stray_bytes_stay_the_prompts(prompt: bytes) -> None:
    [output] = writing("ab").generate([list(prompt)], SamplingParams(max_tokens=4))
    assert output.choices[0].text == "abab"


def test_a_stop_string_may_end_in_the_shared_character() -> None:
    data = "😀".encode()
    params = SamplingParams(max_tokens=20, stop=["😀"])
    [output] = writing(data[2:] + b"x").generate([list(data[:2])], params)
    choice = output.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", "😀")


def test_going_on_inside_a_character_says_it_once() -> None:
    script = "ab😀cé".encode()
    params = SamplingParams(max_tokens=2 * len(script))
    whole = writing(script).generate("x", params)[0].choices[0]
    for num_emitted in range(2 * len(script)):
        before = whole.token_ids[:num_emitted]
        told = "".join(_run(writing(script), "x", SamplingParams(max_tokens=2 * len(script)))[:num_emitted])
        after = "".join(_run(writing(script), "x", params, emitted=[before]))
        assert told + after == whole.text


def _run(llm: Any, prompt: Any, params: SamplingParams, **own: Any) -> list[str]:
    llm.add_request("r", prompt, params, **own)
    texts = []
    while llm.has_unfinished():
        texts += [each.text for delta in llm.step() for each in delta.deltas]
    return texts


@given(text=st.text(min_size=1, max_size=12), data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_text_cut_anywhere_by_the_real_tokenizer(text: str, data: st.DataObject) -> None:
    """What the prompt's whole characters leave of all the bytes is what is said: no more, no less."""
    tokenizer = _real_tokenizer()
    ids = tokenizer.encode(text + " 👩‍👧", add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids) - 1))
    detokenizer = Detokenizer(tokenizer, ids[:cut])
    said = "".join([*(detokenizer.push(token_id) for token_id in ids[cut:]), detokenizer.flush()])
    prompt = b"".join(
        tokenizer.token_bytes(token_id) for token_id in ids[:cut] if token_id not in tokenizer.special_ids
    )
    whole = b"".join(tokenizer.token_bytes(token_id) for token_id in ids if token_id not in tokenizer.special_ids)
    assume(is_text(whole))  # some vocabularies lack bytes that no script in use needs
    assert said == whole.decode()[len(prompt.decode(errors="ignore")) :]


def is_text(data: bytes) -> bool:
    return "\ufffd" not in data.decode(errors="replace")


def _real_tokenizer() -> Tokenizer:
    from engine.errors import ModelLoadError
    from engine.weights import resolve
    from tests.conftest import skip_or_fail

    if not _tokenizers:
        try:
            _tokenizers.append(Tokenizer(resolve("smollm2-135m")))
        except ModelLoadError as error:
            skip_or_fail(str(error))
    return _tokenizers[0]


_tokenizers: list[Tokenizer] = []


async def test_over_http_both_ways(service: Callable[..., Any]) -> None:
    data = "😀".encode()
    served = await service(lambda: writing(data[2:] + b"."))
    body = {"prompt": [*b"hi ", *data[:2]], "max_tokens": 3}
    _, answer = await served.post("completions", body)
    chunks = await served.chunks("completions", body)
    assert answer["choices"][0]["text"] == "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == "😀."
