"""Token ids by remembered words: exactly what the tokenizer gives, at a fraction of its time.

A byte-level BPE tokenizer cuts text at its added tokens and then by a regular expression, and tokenises each piece by
itself. In none of the expressions below does a piece hold white space behind another character, but for line ends
behind punctuation. So text may be cut before any space that follows a visible character, and before and after a single
line end that follows a letter or digit; what stands between is looked up, and only what is new is tokenised.
"""

import json
import re
from bisect import bisect_right
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD = re.compile(
    r" ?[!-~]+(?= |\Z)| ?[!-~]*[A-Za-z0-9](?=\n)|(?<=[A-Za-z0-9])\n(?=[!-~])"
    r"|.+?(?:(?<=[!-~])(?= )|(?<=[A-Za-z0-9])(?=\n)|\Z)",
    re.DOTALL,
)
INSIDE = re.compile(r"[!-~] |[A-Za-z0-9]\n|\n[!-~]")  # an added token with such a place in it could be cut in two
AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
EXPRESSIONS = {  # beside GPT-2's, which ByteLevel has built in
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + AFTER_WORDS,  # Llama 3
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + AFTER_WORDS,  # Qwen
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    + r"|\p{N}{1,3}"
    + AFTER_WORDS.replace(r"[\r\n]*", r"[\r\n/]*"),  # gpt-oss
}
MOST = 1 << 21  # characters of remembered words


class Words(dict[str, tuple[int, ...]]):
    """The ids of words, each tokenised when it is first asked for. Use it where `fit` says so."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._backend = tokenizer.backend_tokenizer
        markers = [str(token) for token in tokenizer.added_tokens_decoder.values() if not token.normalized]
        longest_first = map(re.escape, sorted(markers, key=len, reverse=True))
        self.marker = re.compile("(" + ("|".join(longest_first) or r"(?!)") + ")")
        self._size = 0

    def __missing__(self, word: str) -> tuple[int, ...]:
        if self._size > MOST:
            self.clear()
            self._size = 0
        ids = self[word] = tuple(self._backend.encode(word, add_special_tokens=False).ids)
        self._size += len(word)
        return ids

    def starts(self, word: str) -> list[int]:
        """Where the tokens of a word begin in it."""
        return [start for start, _ in self._backend.encode(word, add_special_tokens=False).offsets]


class Text:
    """A text in words: `ids`, none added, and where in them a character stands."""

    def __init__(self, text: str, words: Words) -> None:
        parts = words.marker.split(text)  # every second one is an added token
        self._known = words
        self._words = [[part] if number % 2 else WORD.findall(part) for number, part in enumerate(parts)]
        coded = [list(chain.from_iterable(map(words.__getitem__, part))) for part in self._words]
        self.ids = list(chain.from_iterable(coded))
        self._chars = list(accumulate(map(len, parts), initial=0))  # where each part begins, and the end,
        self._tokens = list(accumulate(map(len, coded), initial=0))  # in characters and in tokens

    def token_at(self, char: int) -> int | None:
        """The place in `ids` of the token that begins with this character; None where none does, or it is not sure."""
        part = bisect_right(self._chars, char) - 1
        at, token = self._chars[part], self._tokens[part]
        for word in self._words[part] if at < char else ():
            if at + len(word) > char > at:
                starts = self._known.starts(word)
                return token + starts.index(char - at) if starts.count(char - at) == 1 else None
            if at == char:
                break
            at, token = at + len(word), token + len(self._known[word])
        return token

    def marker_before(self, char: int) -> tuple[int, int]:
        """Character and token where the last added token before this character begins; the text's own start if none."""
        part = bisect_right(self._chars, char - 1) - 1
        part -= part % 2 == 0
        return (self._chars[part], self._tokens[part]) if part > 0 else (0, 0)


def fit(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether this tokenizer is of the kind that `Words` is right for."""
    from tokenizers.models import BPE

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    model, added = backend.model, tokenizer.added_tokens_decoder.values()
    return (
        isinstance(model, BPE)
        and not model.dropout
        and _settings(backend.normalizer).get("type", "NFC") == "NFC"
        and _pieces_end_before_spaces(_settings(backend.pre_tokenizer))
        and not any(token.single_word or token.lstrip or token.rstrip or INSIDE.search(str(token)) for token in added)
    )


def _settings(part: Any) -> dict[str, Any]:
    """A normaliser or pre-tokenizer as tokenizer.json has it; empty where there is none."""
    return json.loads(part.__getstate__()) if part is not None else {}


def _pieces_end_before_spaces(settings: dict[str, Any]) -> bool:
    known = False
    for step in settings.get("pretokenizers", [settings] if settings else []):
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            if step["pattern"].get("Regex") not in EXPRESSIONS:
                return False
            known = True
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            known |= step["use_regex"]
        elif step["type"] != "Digits":
            return False
    return known
