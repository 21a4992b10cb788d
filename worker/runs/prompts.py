"""What the model is asked: an instruction, then the text. Pure.

The instruction stands first and is the same for all chunks of a run, so that the prefix cache holds it once.
"""

from __future__ import annotations

from collections.abc import Sequence

from infra.runs import Style, SummaryParams

MIN_PART_TOKENS = 64  # of a part's summary, so that a short final one still has something to draw on
MAX_FREQUENCY_PENALTY = 0.3
WORDS_PER_TOKEN = 0.7  # of English; what the model is told is a wish, the token limit is what holds

_ASK = {
    Style.ABSTRACT: "Summarize {what} in one paragraph.",
    Style.BULLETS: "List the main points of {what} as short bullet points.",
    Style.HEADLINE: "Write one headline for {what}.",
}
_TEXT = "the text below"
_PARTS = "the document whose parts are summarized below, in order"


def item_tokens(params: SummaryParams, *, is_final: bool) -> int:
    """Tokens that one item may write at most."""
    return params.target_tokens if is_final else max(params.target_tokens, MIN_PART_TOKENS)


def sampling(max_tokens: int) -> dict[str, float | int]:
    """Parameters of an item's job: greedy, so that the same text gives the same summary.

    Small models fall into loops that way; a mild penalty on what was written already breaks them. It grows with each
    repetition, so longer texts, in which common words must come back, get less of it.
    """
    penalty = round(min(MAX_FREQUENCY_PENALTY, 32 / max_tokens), 3)
    return {"temperature": 0.0, "frequency_penalty": penalty, "max_tokens": max_tokens, "seed": 0}


def map_prompt(params: SummaryParams, text: str, *, is_final: bool) -> str:
    """Asks for the summary of a chunk; `is_final` where the chunk is the whole document."""
    style = params.style if is_final or params.style is Style.BULLETS else Style.ABSTRACT
    return f"{_instruction(params, style, _TEXT, is_final=is_final)}\n\n{text}"


def reduce_prompt(params: SummaryParams, summaries: Sequence[str], *, is_final: bool) -> str:
    """Asks for one summary of the summaries of consecutive parts."""
    style = params.style if is_final or params.style is Style.BULLETS else Style.ABSTRACT
    joined = "\n\n".join(summary.strip() for summary in summaries)
    return f"{_instruction(params, style, _PARTS, is_final=is_final)}\n\n{joined}"


def _instruction(params: SummaryParams, style: Style, what: str, *, is_final: bool) -> str:
    own = params.template if is_final else None
    ask = own or _ASK[style].format(what=what)
    num_words = max(5, round(item_tokens(params, is_final=is_final) * WORDS_PER_TOKEN / 5) * 5)
    length = f" Use at most {num_words} words." if own is None and style is not Style.HEADLINE else ""
    language = f" Write in {params.language}." if params.language else ""
    return f"{ask}{length}{language}"
