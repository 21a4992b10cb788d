"""From what a caller gives as a prompt to token ids that the model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer


def prompt_token_ids(prompt: object, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Raises InvalidRequest (`prompt`) for anything but text or a list of the vocabulary's ids, and for nothing."""
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise InvalidRequest("prompt", 'a mapping holds either "prompt" or "prompt_token_ids", and nothing else')
        prompt = next(iter(prompt.values()))
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("prompt", "holds half of a surrogate pair; send valid Unicode") from None
        token_ids = tokenizer.encode(prompt)
        if max(token_ids, default=0) >= vocab_size:  # some tokenizers know more tokens than their model has rows for
            foreign = tokenizer.decode([max(token_ids)], skip_special_tokens=False)
            raise InvalidRequest("prompt", f"holds {foreign!r}, which is no token of the model's {vocab_size}")
    else:
        token_ids = checked_token_ids("prompt", prompt, vocab_size)
    if not token_ids:
        raise InvalidRequest("prompt", "is empty; send at least one token")
    return token_ids


def checked_token_ids(param: str, token_ids: object, vocab_size: int) -> list[int]:
    """A copy of a list of token ids; raises InvalidRequest naming what in it is none of the vocabulary's."""
    if isinstance(token_ids, str | bytes) or not hasattr(token_ids, "__iter__"):
        raise InvalidRequest(param, f"is {type(token_ids).__name__}; send text or a list of token ids")
    checked = list(token_ids)
    for token_id in checked:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequest(param, f"holds {token_id!r}; token ids are whole numbers")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(param, f"holds token {token_id}; the vocabulary has 0 to {vocab_size - 1}")
    return checked


def bad_word_ids(words: list[str], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Token sequences that write each word: at the start of a text, and after a space where that differs.

    As in vLLM, the spaced form counts only if it is as long and starts otherwise. What takes tokens that the model does
    not have cannot be written and is left out.
    """
    found = []
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if bare:
            found.append(bare)
        if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return [token_ids for token_ids in found if max(token_ids) < vocab_size]
