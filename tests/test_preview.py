"""The preview shows exactly the document: nothing lost, the right parts marked."""

import io
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from test_template import make_tokenizer, talk, template

from eyas.data.preview import STYLES, coloured, heading, of_store, pieces, preview, runs
from eyas.data.template import ChatTemplate


def document(name="llama3", *contents, style="bytes"):
    made = template(name, style)
    ids, spans = made.mask_conversation(talk(*(contents or ("Hi <b>you</b>", "Fine,\nthanks & bye."))))
    return made, {"id": "d1", "category": "talk", "tokens": ids, "spans": spans, "finish": ["stop"]}


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), style=st.sampled_from(["bytes", "spaces"]))
def test_pieces_join_to_the_text(text, style):
    """However a tokenizer splits characters or swallows the first space."""
    tokenizer = make_tokenizer_cached(style)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    made = pieces(tokenizer, ids)
    assert len(made) == len(ids) and "".join(made) == whole


def make_tokenizer_cached(style, made={}):  # noqa: B006
    return made.setdefault(style, None) or made.__setitem__(style, make_tokenizer("llama3", style)) or made[style]


def test_characters_of_several_tokens_are_shown_once():
    tokenizer = make_tokenizer("llama3")
    ids = tokenizer.encode("a鷹b", add_special_tokens=False)
    assert len(ids) == 5 and pieces(tokenizer, ids) == ["a", "", "", "鷹", "b"]


@pytest.mark.parametrize("name", ["llama3", "gemma", "deepseek_v3"])
@pytest.mark.parametrize("style", ["bytes", "spaces"])
def test_runs_are_the_supervised_spans(name, style):
    made, doc = document(name, "Hello there", "Paris is fine.", "And?", "Yes, a quick fox.", style=style)
    parts = list(runs(made.tokenizer, doc))
    supervised = "".join(text for text, s, special in parts if s and not special)
    assert re.sub(" ", "", supervised) == "Parisisfine.Yes,aquickfox."
    ends = [text for text, s, special in parts if s and special]
    assert len(ends) == 2 and len(set(ends)) == 1
    specials = [text for text, _, special in parts if special]
    assert len(specials) == sum(token in made._added for token in doc["tokens"])


def test_colours_of_the_terminal():
    made, doc = document()
    text = coloured(made.tokenizer, doc)
    assert "<|eot_id|>" in text.plain and "Fine,⏎\nthanks & bye." in text.plain
    (green,) = [text.plain[s.start : s.end] for s in text.spans if s.style == STYLES["supervised"]]
    assert green == "Fine,⏎\nthanks & bye."
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system="standard")
    assert preview([doc, doc, doc, doc], made.tokenizer, console, limit=2) == 2
    assert out.getvalue().count("d1 · talk") == 2 and "\x1b[30;42mFine," in out.getvalue()


def test_square_brackets_are_text_not_markup():
    made, doc = document("mistral", "[bold]Hi[/bold]", "[red]x[/red]")
    out = io.StringIO()
    preview([doc | {"id": "[red]id"}], made.tokenizer, Console(file=out, width=200))
    assert "[red]id · " in out.getvalue()
    assert "[INST]" in out.getvalue() and "[red]x[/red]" in out.getvalue()


def test_heading_counts():
    assert heading({"id": "a", "tokens": [1] * 10, "spans": [[2, 4], [6, 9]]}) == "a · 10 tokens · 5 supervised (50%)"


def test_documents_of_a_store(tmp_path):
    from eyas.features.store import Sample, StoreWriter

    made, doc = document()
    length = len(doc["tokens"])
    supervised = np.zeros(length, bool)
    for start, end in doc["spans"]:
        supervised[start:end] = True
    teachers = int((supervised[:-1] & supervised[1:]).sum())
    sample = Sample(
        "d1", np.array(doc["tokens"], np.int32), supervised, np.zeros((length, 2, 4), np.uint16),
        np.zeros((teachers, 4), np.uint16), np.zeros(teachers, np.int32), "talk",
    )  # fmt: skip
    with StoreWriter(tmp_path / "store", **writer_arguments()) as writer:
        writer.append(sample)
        writer.finish()
    (back,) = of_store(tmp_path / "store")
    assert list(runs(made.tokenizer, back)) == list(runs(made.tokenizer, doc))
    assert heading(back) == heading(doc | {"finish": []})


def writer_arguments():
    return {"layers": [1, 2], "hidden_size": 4, "target": {}}


def test_template_and_preview_agree_on_special_tokens():
    made = ChatTemplate(make_tokenizer("phi3"))
    ids, spans = made.mask_conversation(talk("Hi", "Yes."))
    parts = list(runs(made.tokenizer, {"tokens": ids, "spans": spans}))
    assert [text for text, _, special in parts if special] == [
        "<|user|>",
        "<|end|>",
        "<|assistant|>",
        "<|end|>",
        "<|endoftext|>",
    ]
