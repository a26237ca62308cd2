"""The chat template against plain incremental generation, for the templates of real families."""

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eyas.data.template import ChatTemplate, TemplateRefusal
from eyas.errors import UsageError

TEMPLATES = Path(__file__).parent / "fixtures" / "templates"
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it asks: what is two plus two?",
    "user assistant system model developer analysis final channel Instructions Reasoning medium valid",
    "Hello there. How are you today? I am fine, thank you. Paris is the capital of France.",
] * 4


@dataclass
class Family:
    """How a family's tokenizer and template behave; `end` closes an answer."""

    end: str
    special: list[str]
    bos: str | None = None
    rstrip: bool = False
    options: dict = field(default_factory=dict)
    template: str = ""
    stable: bool = True  # earlier turns are shown as they were generated
    plain: list[str] = field(default_factory=list)  # added tokens that are not special (thinking)
    end_tokens: list[str] = field(default_factory=list)  # eos_token_id of the generation config, where it matters


CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
THINK = ["<think>", "</think>"]
FAMILIES = {
    "llama3": Family(
        "<|eot_id|>",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        bos="<|begin_of_text|>",
    ),
    "qwen2_5": Family("<|im_end|>", CHATML),
    "qwen3": Family("<|im_end|>", CHATML, plain=THINK),
    "qwen3_no_thinking": Family(
        "<|im_end|>", CHATML, plain=THINK, template="qwen3", options={"enable_thinking": False}, stable=False
    ),
    "mistral": Family("</s>", ["<s>", "</s>", "[INST]", "[/INST]"], bos="<s>"),
    "gemma": Family("<end_of_turn>", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], bos="<bos>"),
    "phi3": Family("<|end|>", ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"], rstrip=True),
    "deepseek_v3": Family(DEEPSEEK[1], DEEPSEEK, bos=DEEPSEEK[0]),
    "deepseek_r1": Family(DEEPSEEK[1], DEEPSEEK, bos=DEEPSEEK[0], plain=THINK, stable=False),
    "kimi_k2": Family(
        "<|im_end|>", ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "[EOS]"]
    ),
    "gpt_oss": Family("<|return|>", ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"], stable=False),
    "glm4": Family(
        "<|user|>",
        ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|endoftext|>"],
        end_tokens=["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "chatml_default": Family("<|im_end|>", CHATML),
    "chatml_generation": Family("<|im_end|>", CHATML),
}
STABLE = [name for name, family in FAMILIES.items() if family.stable]


def make_tokenizer(name: str, style: str = "bytes") -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE(byte_fallback=style == "spaces", unk_token=None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if style == "bytes":  # as Llama 3, Qwen
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:  # as Llama 2, Mistral, Gemma: a space before the first word
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(c) for c in range(32, 127)] + ["\n", "\t", "▁", "é", "｜"]
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, rstrip=family.rstrip, normalized=False) for t in family.special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in family.plain])
    eos = next((t for t in family.special if t in ("<|endoftext|>", "<eos>", "<|end_of_text|>")), family.end)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=family.bos, eos_token=eos)
    made.chat_template = (TEMPLATES / f"{family.template or name}.jinja").read_text("utf-8")
    return made


@lru_cache
def template(name: str, style: str = "bytes") -> ChatTemplate:
    tokenizer, family = make_tokenizer(name, style), FAMILIES[name]
    made = ChatTemplate(tokenizer, family.options)
    if family.end_tokens:  # what a generation config adds, see test_end_ids_from_the_generation_config
        made.end_ids |= set(tokenizer.convert_tokens_to_ids(family.end_tokens))
        made._end_texts = tokenizer.convert_ids_to_tokens(sorted(made.end_ids))
    return made


def talk(*contents: str, system: str | None = None) -> list[dict]:
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def slow_prefix(made: ChatTemplate, messages: list[dict]) -> list[int]:
    """The prompt as Transformers itself makes it."""
    return made.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **made.options
    )


TURNS = ["What is 2 + 2?", "It is four.", "And the capital of France?", "Paris, of course!\nYes.", "Thanks"]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_is_the_template_s_own_rendering(name):
    made = template(name)
    for upto in (1, 3):
        assert made.prompt_ids(talk(*TURNS[:upto])) == slow_prefix(made, talk(*TURNS[:upto]))


@pytest.mark.parametrize("style", ["bytes", "spaces"])
@pytest.mark.parametrize("name", STABLE)
def test_generated_document_equals_the_rendering(name, style):
    """Prompt, answer, glue, answer, glue: the ids that an engine would be sent for the last turn."""
    made = template(name, style)
    end = made.tokenizer.convert_tokens_to_ids(FAMILIES[name].end)
    assert end in made.end_ids
    document = made.prompt_ids(talk(TURNS[0]))
    for turn in (1, 3):
        after = made.encode(made.render(talk(*TURNS[:turn])) + TURNS[turn])
        answer = [*after[len(document) :], end]  # the same words in the place where they are generated
        if style == "bytes" and not name.startswith("mistral"):
            assert after[: len(document)] == document
        glue = made.next_turn_ids(talk(*TURNS[: turn + 1]), TURNS[turn + 1], answer)
        assert glue is not None
        document = document + answer + glue
    if name == "mistral":  # its template writes " answer" where the target was left after [/INST]: white space only
        assert made.decode(document).replace("] ", "]") == made.render(talk(*TURNS)).replace("] ", "]")
    else:
        assert document == slow_prefix(made, talk(*TURNS))


@pytest.mark.parametrize("name", STABLE)
def test_answer_cut_by_length_goes_on_with_the_end_token(name):
    made = template(name)
    end = made.tokenizer.convert_tokens_to_ids(FAMILIES[name].end)
    answer = made.encode(TURNS[1])
    whole = made.next_turn_ids(talk(*TURNS[:2]), TURNS[2], [*answer, end])
    assert made.next_turn_ids(talk(*TURNS[:2]), TURNS[2], answer) == [end, *whole]


@pytest.mark.parametrize(
    ("name", "text", "system"),
    [
        ("qwen3", "<think>\nTwo and two.\n</think>\n\nIt is four.", None),  # earlier thinking is removed
        ("qwen3_no_thinking", "It is four.", None),  # the empty thinking block is not shown again
        ("deepseek_r1", "Two and two.\n</think>\n\nIt is four.", None),
        ("gpt_oss", "<|channel|>final<|message|>It is four.", None),  # <|return|> is shown as <|end|>
        ("mistral", "It is four.", "Be brief."),  # the system prompt moves to the last user turn
    ],
)
def test_document_ends_where_the_template_rewrites(name, text, system):
    made = template(name)
    end = made.tokenizer.convert_tokens_to_ids(FAMILIES[name].end)
    messages = talk(TURNS[0], text.split("<|message|>")[-1], system=system)
    assert made.next_turn_ids(messages, TURNS[2], [*made.encode(text), end]) is None


def test_document_ends_after_an_end_token_that_the_template_does_not_write():
    made = template("qwen2_5")
    other = made.tokenizer.eos_token_id
    assert made.decode([other]) == "<|endoftext|>" and other in made.end_ids
    assert made.next_turn_ids(talk(*TURNS[:2]), TURNS[2], [*made.encode(TURNS[1]), other]) is None


def test_glue_never_retokenises_the_answer():
    """An answer in single bytes, which no tokenizer would write, keeps its ids."""
    made = template("llama3")
    odd = [made.tokenizer.convert_tokens_to_ids(c) for c in "Paris"]
    assert odd != made.encode("Paris") and made.decode(odd) == "Paris"
    end = made.tokenizer.convert_tokens_to_ids("<|eot_id|>")
    glue = made.next_turn_ids(talk(TURNS[0], "Paris"), TURNS[2], [*odd, end])
    assert glue == made.next_turn_ids(talk(TURNS[0], "Paris"), TURNS[2], [*made.encode("Paris"), end])


PROVED = {  # assistant turns proved of two, without and with a thinking block in the answers
    "qwen3": ([0], [1]),  # before the last answer the template adds an empty block, earlier it removes any block
    "qwen3_no_thinking": ([1], []),
    "deepseek_r1": ([], []),  # the prompt opens <think>, the history shows none
    "gpt_oss": ([], []),  # a channel header stands between prompt and answer
}


@pytest.mark.parametrize("style", ["bytes", "spaces"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("thinking", [False, True])
def test_mask_equals_incremental_generation(name, style, thinking):
    made = template(name, style)
    block = "<think>\nHmm.\n</think>\n\n" if thinking else ""
    messages = talk(TURNS[0], block + TURNS[1], TURNS[2], block + TURNS[3])
    masked = made.mask_conversation(messages)
    expected = PROVED.get(name, ([0, 1], [0, 1]))[thinking]
    if not expected:
        assert isinstance(masked, str) and "assistant turn 1" in masked
        return
    assert not isinstance(masked, str), masked
    ids, spans = masked
    assert ids == made.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **made.options)
    assert len(spans) == len(expected)
    for (start, end), turn in zip(spans, expected, strict=True):
        at = 2 * turn + 1
        assert ids[:start] == slow_prefix(made, messages[:at])
        if not (name == "glm4" and turn == 1):  # GLM-4 writes nothing after the last answer
            end -= 1
            assert ids[end] == made.tokenizer.convert_tokens_to_ids(FAMILIES[name].end)
        assert made.decode(ids[start:end]).strip() == messages[at]["content"]
        assert not made.end_ids & set(ids[start:end])


WORDS = st.text(st.sampled_from("ab .,\n\té｜<>?[|A"), max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    texts=st.lists(WORDS, min_size=2, max_size=6),
    style=st.sampled_from(["bytes", "spaces"]),
)
def test_whatever_is_supervised_is_proved(name, texts, style):
    """Odd edges (white space, nothing at all, half tokens): either a reason or exactly the target's own context."""
    made = template(name, style)
    messages = talk(*texts[: len(texts) // 2 * 2])
    masked = made.mask_conversation(messages)
    if isinstance(masked, str):
        assert masked
        return
    ids, spans = masked
    prompts = [slow_prefix(made, messages[:i]) for i in range(1, len(messages), 2)]
    by_length = {len(prompt): (prompt, messages[2 * i + 1]["content"]) for i, prompt in enumerate(prompts)}
    assert spans
    for start, end in spans:
        prompt, answer = by_length[start]
        assert ids[:start] == prompt and end > start
        stop = end - 1 if ids[end - 1] in made.end_ids else end
        if made.marks_generation:
            answer = answer.replace("\t", "    ")  # this template's own habit
        written = made.decode(ids[start:stop])
        if style == "spaces":  # its decoder drops a space at the start
            written, answer = written.replace(" ", ""), answer.replace(" ", "")
        assert written.strip() == answer.strip()


@pytest.mark.parametrize("name", ["llama3", "mistral", "phi3", "qwen3"])
def test_without_offsets_the_mask_is_the_same(name):
    """A tokenizer that gives no offsets (plain Python) is served by tokenising prefixes: same answer."""
    made, slow = template(name), ChatTemplate(make_tokenizer(name), FAMILIES[name].options)
    slow._backend = slow._words = None
    for messages in (talk(*TURNS[:4]), talk("Hi", "  Padded \n"), talk("Hi", "<think>\nHm.\n</think>\n\nYes.")):
        assert made.mask_conversation(messages) == slow.mask_conversation(messages)


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    texts=st.lists(WORDS | st.text(max_size=8) | st.sampled_from(TURNS), min_size=2, max_size=6),
    trim=st.booleans(),
)
def test_remembered_words_change_no_mask(name, texts, trim):
    """The words' short cut against the tokenizer's own offsets, which may leave out spaces (`trim`)."""
    made, slow = by_words(name, True, trim), by_words(name, False, trim)
    messages = talk(*texts[: len(texts) // 2 * 2])
    assert made.mask_conversations([messages]) == slow.mask_conversations([messages])


@lru_cache
def by_words(name: str, words: bool, trim: bool) -> ChatTemplate:
    tokenizer = make_tokenizer(name)
    if trim:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    made = ChatTemplate(tokenizer, FAMILIES[name].options)
    made.end_ids, made._end_texts = template(name).end_ids, template(name)._end_texts
    if not words:
        made._words = None
    return made


def test_which_tokenizers_are_cut_into_words():
    assert [name for name in FAMILIES if template(name)._words is None] == ["phi3"]  # its end token takes spaces along
    assert all(template(name, "spaces")._words is None for name in FAMILIES)


def test_batches_equal_single_conversations_and_one_refusal_costs_one_row():
    made = template("mistral")
    batch = [talk(*TURNS[:4]), [{"role": "assistant", "content": "I begin."}], talk(*TURNS[:2]), talk("Hi")]
    masked = made.mask_conversations(batch)
    assert masked == [made.mask_conversation(messages) for messages in batch]
    assert "roles must alternate" in masked[1] and masked[3] == "no assistant turn."
    assert not isinstance(masked[0], str) and not isinstance(masked[2], str)


def test_an_end_token_inside_an_answer_is_not_supervised():
    made = template("qwen2_5")
    assert "end token before its end" in made.mask_conversation(talk("Hi", "Yes.<|im_end|>\nNo."))


@pytest.mark.parametrize("answer", ["<", "<|channel|>", "<|channel|>final", "final"])
def test_words_of_the_template_itself_are_not_taken_for_the_answer(answer):
    assert isinstance(template("gpt_oss").mask_conversation(talk("Hi", answer)), str)
    assert isinstance(template("gpt_oss").mask_conversation(talk("Hi", answer, "More", "Yes")), str)


@pytest.mark.parametrize("answer", ["<think>", "<think>\n\n</think>", "<"])
def test_an_added_thinking_block_is_not_taken_for_the_answer(answer):
    assert isinstance(template("qwen3").mask_conversation(talk("Hi", answer)), str)


def test_generation_marks_lead_where_the_template_has_them():
    made = template("chatml_generation")
    assert made.marks_generation and not template("qwen2_5").marks_generation
    ids, spans = made.mask_conversation(talk("Hi", "a\tb", "More", "c"))  # the template rewrites tabs, yet marks it
    assert [made.decode(ids[a:b]) for a, b in spans] == ["a    b<|im_end|>", "c<|im_end|>"]
    with_marks = made.tokenizer.apply_chat_template(
        talk("Hi", "a\tb", "More", "c"), return_dict=True, return_assistant_tokens_mask=True
    )
    assert [i for a, b in spans for i in range(a, b)] == [i for i, m in enumerate(with_marks["assistant_masks"]) if m]


@pytest.mark.parametrize("name", FAMILIES)
def test_special_ids_hold_every_special_token_of_a_rendering(name):
    made = template(name)
    rendered = set(made.encode(made.render(talk(*TURNS))) + made.encode(made.render(talk(*TURNS[:4]), False)))
    special = set(made.tokenizer.convert_tokens_to_ids(FAMILIES[name].special + FAMILIES[name].plain))
    assert rendered & special <= made.special_ids()
    assert made.end_ids <= made.special_ids() and made.special_ids() <= special
    assert made.tokenizer.convert_tokens_to_ids(FAMILIES[name].end) in made.special_ids()


def test_an_end_of_a_message_within_a_turn_does_not_end_the_turn():
    made = template("gpt_oss")
    assert {made.decode([token]) for token in made.end_ids} == {"<|return|>"}


def test_end_ids_from_the_generation_config(tmp_path):
    tokenizer = make_tokenizer("glm4")
    assert {tokenizer.decode([t]) for t in ChatTemplate(tokenizer).end_ids} == {"<|endoftext|>", "<|user|>"}
    tokenizer.name_or_path = str(tmp_path)
    ends = tokenizer.convert_tokens_to_ids(FAMILIES["glm4"].end_tokens)
    config = {"num_hidden_layers": 6, "hidden_size": 8, "vocab_size": 700, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert ChatTemplate(tokenizer).end_ids == set(ends)


def test_a_target_without_a_template_is_refused_by_name():
    tokenizer = make_tokenizer("llama3")
    tokenizer.chat_template, tokenizer.name_or_path = None, "/models/base"
    with pytest.raises(UsageError, match=r"/models/base: neither chat_template\.jinja nor .*tokenizer_config\.json"):
        ChatTemplate(tokenizer)


def test_a_template_that_raises_gives_one_sentence():
    with pytest.raises(TemplateRefusal, match="system role not supported"):
        template("gemma").prompt_ids(talk("Hi", system="Be brief."))
    with pytest.raises(TemplateRefusal, match="refuses this conversation"):
        template("qwen2_5").prompt_ids([{"role": "user", "content": None}])


def test_a_tokenizer_that_truncates_or_pads_does_not_cut_documents():
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=4096)
    made = ChatTemplate(tokenizer)
    assert made.mask_conversation(talk(*TURNS[:4])) == template("qwen2_5").mask_conversation(talk(*TURNS[:4]))
