"""Ids by remembered words against the tokenizer itself, for every kind of expression that pre-tokenizers use."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_template import make_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eyas.data import words as module
from eyas.data.words import Text, Words, fit

ADDED = ("<|im_start|>", "<|im_end|>", "<think>")


def bytes_after(*steps):
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


BUILT_IN = pre_tokenizers.ByteLevel(add_prefix_space=False)
KINDS = [BUILT_IN, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BUILT_IN])]
KINDS += [bytes_after(pre_tokenizers.Split(Regex(text), "isolated")) for text in sorted(module.EXPRESSIONS)]


def tokenizer_with(pre_tokenizer, normalizer=None):
    """With an NFC normaliser also the step that takes spaces out of the tokens' places, as Llama 3 has it."""
    made = Tokenizer.from_str(make_tokenizer("qwen3").backend_tokenizer.to_str())
    made.pre_tokenizer = pre_tokenizer
    if normalizer:
        made.normalizer = normalizer
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZERS = [tokenizer_with(kind, normalizer) for kind in KINDS for normalizer in (None, normalizers.NFC())]
PIECES = st.sampled_from([*ADDED, " the", "fox", "\n", "\n\n", " ", "  ", "\t", "\r\n", "1.", "23", "'s", "don't", "é", "e\u0301", "\u0301",
                          "\xa0", "\u2003", "\x85", "\x1c", "｜", "你好", ".", "...", "/", "</", "A", "_x"])  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=6), max_size=14).map("".join)


@settings(max_examples=600, deadline=None)
@given(number=st.integers(0, len(TOKENIZERS) - 1), text=TEXTS)
def test_ids_and_places_are_the_tokenizer_s(number, text):
    """Twice: the second time every word is remembered."""
    tokenizer = TOKENIZERS[number]
    words, whole = Words(tokenizer), tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    for _ in range(2):
        coded = Text(text, words)
        assert coded.ids == whole.ids
    starts = [start for start, _ in whole.offsets]
    for char in range(len(text)):
        found = coded.token_at(char)
        if found is not None and text[char].strip() and starts.count(char) == 1:
            assert starts[found] == char
        marked, token = coded.marker_before(char)
        assert marked == 0 or (text.startswith(ADDED, marked) and starts[token] == marked and marked < char)
    assert coded.token_at(len(text)) == len(whole.ids)


def test_every_kind_is_taken_and_others_are_not():
    assert all(fit(tokenizer) for tokenizer in TOKENIZERS)
    others = [
        pre_tokenizers.Whitespace(),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        bytes_after(pre_tokenizers.Split(Regex(r"\p{L}+ ?"), "isolated")),
        bytes_after(pre_tokenizers.Split(Regex(min(module.EXPRESSIONS)), "removed")),
        bytes_after(pre_tokenizers.Split(Regex(min(module.EXPRESSIONS)), "isolated", invert=True)),
    ]
    assert not any(fit(tokenizer_with(other)) for other in others)
    assert not fit(tokenizer_with(BUILT_IN, normalizers.Lowercase()))


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<x>", rstrip=True),
        AddedToken("<x>", lstrip=True),
        AddedToken("x", single_word=True),
        AddedToken("New York"),
        AddedToken("a\nb"),
    ],
)
def test_added_tokens_that_could_be_cut_are_refused(token):
    tokenizer = tokenizer_with(BUILT_IN)
    tokenizer.add_tokens([token])
    assert not fit(tokenizer)


def test_an_added_token_that_is_matched_after_normalising_is_found():
    tokenizer = tokenizer_with(BUILT_IN, normalizers.NFC())
    tokenizer.add_tokens([AddedToken("é!", normalized=True)])
    text = "Oh e\u0301! and é! <think>é!"
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert fit(tokenizer) and Text(text, Words(tokenizer)).ids == ids
    assert ids.count(tokenizer.convert_tokens_to_ids("é!")) == 3


def test_memory_is_bounded_and_a_text_outlives_it(monkeypatch):
    monkeypatch.setattr(module, "MOST", 200)
    words = Words(TOKENIZERS[0])
    texts = [" ".join(f"word{batch * 10 + i}" for i in range(10)) for batch in range(20)]
    coded = [Text(text, words) for text in texts]
    assert 0 < sum(map(len, words)) <= 200 + len(" word199")
    for text, each in zip(texts, coded, strict=True):
        assert each.ids[each.token_at(len(text)) - 1 :] == each.ids[-1:] and each.token_at(text.index(" ")) > 0


def test_expressions_stand_in_tokenizer_files_as_they_are_written_here():
    """Llama 3's, with the escapes of JSON."""
    text = json.loads(
        r'"(?i:\u0027s|\u0027t|\u0027re|\u0027ve|\u0027m|\u0027ll|\u0027d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}'
        r'| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"'
    )
    assert text in module.EXPRESSIONS
