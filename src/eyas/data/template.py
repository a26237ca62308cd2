"""The target's own chat template: prompts, the glue between turns, and masks that are right by construction.

Boundaries come from rendering, never from regular expressions: what the target writes begins exactly where the
rendering with a generation prompt ends. Token ids of an answer are never made again from its text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jinja2

from eyas.data.words import Text, Words, fit
from eyas.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
Masked = tuple[list[int], list[tuple[int, int]]]
WHITE_SPACE = re.compile(r"\s*")
SENTINEL = "\u2042Answer\u2042"
REWRITTEN = "the template rewrites this answer (removes or adds thinking, for example)."
RENDER_FAILURES = (TypeError, ValueError, KeyError, AttributeError, IndexError)  # beside jinja2's own errors


class TemplateRefusal(UsageError):
    """The chat template raised on one conversation; the message says why."""


@dataclass
class Ids:
    """What a tokenizer gives that does not tell where its tokens stand in the text."""

    ids: list[int]


Coded: TypeAlias = "Text | Encoding | Ids"


@dataclass
class Rendered:
    """One imported conversation: its text, the prompt before each assistant turn, the text that follows each
    sentinel answer up to the next one (empty when the template did not show them all), {% generation %} marks."""

    full: str
    prefixes: list[str]
    after: list[str]
    marks: list[tuple[int, int]] | None


def _find_answer(full: str, prefix: str, content: str, after: str) -> tuple[int, int] | str:
    """Where `content` stands behind the prompt, [start, end) in characters, white space at its edges trimmed or not."""
    core = content.strip()
    if not core:
        return "the answer holds no text."
    start = full.find(core, len(prefix))
    end = start + len(core)
    kept = content[len(content.rstrip()) :]
    end += len(kept) if full.startswith(kept, end) else 0
    closed = full.startswith(after, end) if after else end == len(full)
    return (start, end) if start >= 0 and closed else REWRITTEN


class ChatTemplate:
    """A tokenizer's chat template. `template_options` go to it as they are (enable_thinking, reasoning_effort, ...).

    Raises UsageError when the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template_options: dict[str, Any] | None = None) -> None:
        self.tokenizer, self.options = tokenizer, dict(template_options or {})
        try:
            self.text = tokenizer.get_chat_template(self.options.get("chat_template"))
        except ValueError:
            folder = Path(str(tokenizer.name_or_path))
            raise UsageError(
                f"{folder}: neither chat_template.jinja nor a 'chat_template' in tokenizer_config.json. Expected a "
                "chat (instruct) target; take one, or add the chat_template.jinja it was trained with."
            ) from None
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # a tokenizer.json may ask for either; documents are neither cut nor padded
            self._backend.no_truncation()
            self._backend.no_padding()
        self._added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
        self._words = Words(tokenizer) if fit(tokenizer) else None
        self._encode_tail = lru_cache(4096)(self.encode)  # the text of a generation prompt hardly ever changes
        self._encode_whole = lru_cache(1)(self._offsets)
        self.end_ids: set[int] = self._find_end_ids()
        self._end_texts = [str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(self.end_ids)]

    # rendering

    def render(self, messages: Messages, generation_prompt: bool = True, tools: list[dict] | None = None) -> str:
        """The template's text. Raises TemplateRefusal when the template raises."""
        return self._render([messages], generation_prompt, tools)[0]

    def _render(self, batch: Sequence[Messages], generation_prompt: bool, tools: list[dict] | None = None) -> list[str]:
        options: dict[str, Any] = {"tools": tools} | self.options

        def render(chats: Any) -> Any:
            return self.tokenizer.apply_chat_template(
                chats, tokenize=False, add_generation_prompt=generation_prompt, **options
            )

        try:
            if len(batch) > 1 and self._compiled is not None and all(len(m) == 2 for talk in batch for m in talk):
                given = dict(self._compiled.globals) | self.tokenizer.special_tokens_map | {"documents": None} | options
                given["add_generation_prompt"] = generation_prompt
                texts = [self._fill(self._compiled, given | {"messages": messages}) for messages in batch]
                if texts[0] == render(batch[0]):
                    return texts
            return render(list(batch))
        except (jinja2.TemplateError, *RENDER_FAILURES) as error:
            raise TemplateRefusal(f"the chat template refuses this conversation ({error}).") from None

    @staticmethod
    def _fill(template: "jinja2.Template", variables: dict[str, Any]) -> str:
        """As `template.render`, which would gather the template's globals anew for each conversation."""
        return "".join(template.root_render_func(template.new_context(variables, shared=True)))

    @cached_property
    def _compiled(self) -> "jinja2.Template | None":
        """The template as Transformers compiles it. It does more, which messages of role and content alone do not need."""
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template

            return _compile_jinja_template(self.text)
        except (ImportError, jinja2.TemplateError):
            return None

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; the template wrote the special tokens already, so none are added."""
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _offsets(self, text: str) -> "Encoding":
        assert self._backend is not None
        return self._backend.encode(text, add_special_tokens=False)

    def _encode_all(self, texts: list[str]) -> "Sequence[Coded]":
        if self._words is not None:
            return [Text(text, self._words) for text in texts]
        if self._backend is not None:
            return self._backend.encode_batch(texts, add_special_tokens=False)
        return [Ids(self.encode(text)) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """The exact text of ids, special tokens visible."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def prompt_ids(self, messages: Messages, tools: list[dict] | None = None) -> list[int]:
        """Ids that the target continues with its next answer. Raises TemplateRefusal when the template raises."""
        return self.encode(self.render(messages, tools=tools))

    def renderings(self, batch: Sequence[Messages]) -> list[str | TemplateRefusal]:
        """The prompts of many as text; the refusal where the template raises."""
        try:
            return list(self._render(batch, True))
        except TemplateRefusal as refusal:
            return [refusal] if len(batch) == 1 else [self.renderings([messages])[0] for messages in batch]

    # generated conversations

    def next_turn_ids(self, messages: Messages, user: str, answer_ids: list[int]) -> list[int] | None:
        """Ids to append after `answer_ids` so that the document goes on with `user` and the generation prompt.

        `messages` is the history up to and with the answer's text; `answer_ids` are the ids that the target wrote
        for it, end token included (or not, when it was cut off). None when the document must end here because the
        template would show this answer otherwise than the target wrote it (earlier thinking removed, another end
        token), or shows its prompt otherwise. White space that a template trims around an answer does not count.
        """
        history = messages[:-1]
        following = {"role": "user", "content": user}
        real = self.render([*messages, following])
        sentinel = self._sentinel(real)
        probe = self.render([*history, {"role": "assistant", "content": sentinel}, following])
        if probe.count(sentinel) != 1:
            return None
        prefix, glue = self.render(history), probe.partition(sentinel)[2]
        ended = bool(answer_ids) and answer_ids[-1] in self.end_ids
        written = self.decode(answer_ids[:-1] if ended else answer_ids)
        shown = real[len(prefix) : len(real) - len(glue)]
        if not (real.startswith(prefix) and real.endswith(glue) and shown.strip() == written.strip()):
            return None
        glue_ids = self._encode_after(sentinel, glue)
        if not ended:
            return glue_ids
        return glue_ids[1:] if glue_ids[:1] == answer_ids[-1:] else None

    def turn_end(self) -> int:
        """The token that the template writes after an answer."""
        talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
        glue = self.next_turn_ids(talk, "Hello", self.encode("Hello")) or []
        return next((token for token in glue[:1] if token in self.end_ids), min(self.end_ids))

    @staticmethod
    def _sentinel(*texts: str) -> str:
        sentinel = "Answer"
        while any(sentinel in text for text in texts):
            sentinel += "Answer"
        return sentinel

    def _encode_after(self, before: str, text: str) -> list[int]:
        """Ids of `text` as it stands after `before` (some tokenizers treat the start of a text differently)."""
        if self._backend is not None:
            encoding = self._backend.encode(before + text, add_special_tokens=False)
            first = next((i for i, (start, _) in enumerate(encoding.offsets) if start >= len(before)), len(encoding))
            if first and encoding.offsets[first - 1][1] <= len(before):
                return encoding.ids[first:]
        return self.encode(text)

    # special tokens

    def _find_end_ids(self) -> set[int]:
        """The tokenizer's and the generation config's end tokens, and the special token written after an answer.

        What follows the last answer counts; only where the template writes nothing there (the next role's token
        ends the turn, as in GLM-4) what follows an earlier one does.
        """
        from eyas.target import read_target

        ids = {self.tokenizer.eos_token_id} - {None}
        folder = Path(str(self.tokenizer.name_or_path))
        if (folder / "config.json").is_file():
            ids.update(read_target(folder).eos_ids)
        talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "SentinelAnswer"}]
        for messages, generation_prompt in ((talk, False), ([*talk, talk[0]], True)):
            try:
                after = self.render(messages, generation_prompt).partition("SentinelAnswer")[2]
            except TemplateRefusal:
                continue
            if after.strip():
                first = self._encode_after("SentinelAnswer", after)[:1]
                ids.update(self._added.intersection(first))
                break
        return ids

    def special_ids(self) -> set[int]:
        """Every special token that the template can emit: those it names, those seen in renderings, the end tokens."""
        ids = set(self.end_ids)
        if self.tokenizer.bos_token_id is not None:
            ids.add(self.tokenizer.bos_token_id)
        ids.update(token for token, added in self.tokenizer.added_tokens_decoder.items() if added.content in self.text)
        talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
        for messages in (talk[:1], [*talk, talk[0]], [{"role": "system", "content": "Hello"}, *talk]):
            for generation_prompt in (False, True):
                try:
                    ids.update(self._added.intersection(self.encode(self.render(messages, generation_prompt))))
                except TemplateRefusal:
                    continue
        return ids

    # imported conversations

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template itself says, with {% generation %}, what the assistant writes."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None

    def mask_conversation(self, messages: Messages, tools: list[dict] | None = None) -> Masked | str:
        """Ids and supervised spans [start, end) of a conversation that is not generated anew, or a reason why not.

        A turn is supervised when it is proved that the target would have been asked exactly so: the rendering with
        a generation prompt is a prefix of the whole rendering, in text and in tokens, the answer follows it
        unchanged, and after it comes what the template writes after any answer. Its end token is supervised too.
        Turns that are not proved stay in the document as context; a conversation without one proved turn gives the
        reason of its first failure.
        """
        return self.mask_conversations([messages], tools)[0]

    def mask_conversations(self, batch: Sequence[Messages], tools: list[dict] | None = None) -> list[Masked | str]:
        """`mask_conversation` of many, with batched rendering and tokenisation."""
        if not batch:
            return []
        try:
            rendered = self._render_marked(batch, tools)
        except TemplateRefusal as refusal:
            if len(batch) == 1:
                return [str(refusal)]
            return [self.mask_conversation(messages, tools) for messages in batch]
        coded = self._encode_all([texts.full for texts in rendered])
        return list(map(self._mask, batch, rendered, coded))

    def _render_marked(self, batch: Sequence[Messages], tools: list[dict] | None) -> list["Rendered"]:
        turns = [[i for i, m in enumerate(messages) if m["role"] == "assistant"] for messages in batch]
        histories = [messages[:i] for messages, at in zip(batch, turns, strict=True) for i in at]
        marks: list[Any] = [None] * len(batch)
        if self.marks_generation:
            from transformers.utils.chat_template_utils import render_jinja_template

            options: dict[str, Any] = {"tools": tools} | self.tokenizer.special_tokens_map | self.options
            options |= {"chat_template": self.text, "add_generation_prompt": False}
            try:
                rendered: Any = render_jinja_template(list(batch), return_assistant_tokens_mask=True, **options)
            except (jinja2.TemplateError, *RENDER_FAILURES) as error:
                raise TemplateRefusal(f"the chat template refuses this conversation ({error}).") from None
            fulls, marks = rendered
        else:
            fulls = self._render(batch, False, tools)
        prefixes = iter(self._render(histories, True, tools) if histories else [])
        hollow = [[m | {"content": SENTINEL} if m["role"] == "assistant" else m for m in talk] for talk in batch]
        around = [text.split(SENTINEL) for text in self._render(hollow, False, tools)]
        return [
            Rendered(full, [next(prefixes) for _ in at], parts[1:] if len(parts) == len(at) + 1 else [], mark)
            for full, at, parts, mark in zip(fulls, turns, around, marks, strict=True)
        ]

    def _mask(self, messages: Messages, texts: "Rendered", encoding: "Coded") -> Masked | str:
        full, marks = texts.full, texts.marks
        ids = encoding.ids
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return "no assistant turn."
        if marks is not None and len(marks) != len(turns):
            return f"the template marks {len(marks)} generations in {len(turns)} assistant turns."
        spans: list[tuple[int, int]] = []
        reason = ""
        for number, (turn, prefix) in enumerate(zip(turns, texts.prefixes, strict=True)):
            if marks is not None:
                where = self._locate(full, prefix, marks[number])
            else:
                after = texts.after[number] if texts.after else ""
                if turn + 1 < len(messages):  # as far as the next turn's own words
                    after = after[: max(after.find(str(messages[turn + 1].get("content") or "").strip()), 0)]
                answer = _find_answer(full, prefix, str(messages[turn].get("content") or ""), after)
                where = self._locate(full, prefix, answer) if not isinstance(answer, str) else answer
            if not isinstance(where, str):
                where = self._tokens(ids, full, *where, encoding)
                if not isinstance(where, str) and not self.end_ids.isdisjoint(ids[where[0] : where[1] - 1]):
                    where = "the answer holds an end token before its end."
            if isinstance(where, str):
                reason = reason or f"assistant turn {number + 1}: {where}"
            else:
                spans.append(where)
        return (ids, spans) if spans else reason

    def _locate(self, full: str, prefix: str, answer: tuple[int, int]) -> tuple[int, int] | str:
        """What is supervised, [start, end) in characters: from the prompt's end to the answer's end token."""
        start, end = answer
        if not full.startswith(prefix):
            return "the template shows its prompt otherwise once the conversation goes on."
        if start < len(prefix) or full[len(prefix) : start].strip():
            return REWRITTEN
        start = len(prefix)
        ending = WHITE_SPACE.match(full, end).end()  # type: ignore[union-attr]
        for text in self._end_texts:
            if full.startswith(text, ending):
                return start, ending + len(text)
        return start, end

    def _tokens(self, ids: list[int], full: str, start: int, end: int, encoding: "Coded") -> tuple[int, int] | str:
        """The same span in tokens, with the proof that the prompt before it is tokenised as it would be alone."""
        if isinstance(encoding, Ids):
            before, upto = self.encode(full[:start]), self.encode(full[:end])
            if ids[: len(before)] != before or ids[: len(upto)] != upto:
                return "its boundaries fall inside a token."
            return len(before), len(upto)
        if isinstance(encoding, Text):
            found = self._tokens_by_words(encoding, full, start, end)
            return found or self._tokens(ids, full, start, end, self._encode_whole(full))
        chars: Any = encoding.token_to_chars
        first = next((t for c in range(start, end) if (t := encoding.char_to_token(c)) is not None), None)
        final = next((t for c in reversed(range(start, end)) if (t := encoding.char_to_token(c)) is not None), None)
        if first is None or final is None:
            return "its text gives no token."
        if ids[first] in self._added and chars(first)[0] < start:
            first += 1  # a special token that swallows the white space after it
        while final + 1 < len(ids) and (chars(final + 1) or (end, end))[0] < end:
            final += 1  # a character of several byte tokens
        # text between special tokens is tokenised by itself, so the proof may start at the last one
        anchor = first - 1
        while anchor > 0 and ids[anchor] not in self._added:
            anchor -= 1
        origin = chars(anchor)[0] if anchor > 0 else 0
        if ids[max(anchor, 0) : first] != self._encode_tail(full[origin:start]):
            return "its prompt ends inside a token."
        if ids[final] not in self.end_ids and chars(final)[1] > end:
            return "it ends inside a token."
        return first, final + 1

    def _tokens_by_words(self, text: Text, full: str, start: int, end: int) -> tuple[int, int] | None:
        """`_tokens` where both ends are plainly those of tokens; None where a closer look is needed, or gives a reason."""
        if start >= end or full[start].isspace() or full[end - 1].isspace():
            return None
        first, last = text.token_at(start), text.token_at(end)
        if first is None or last is None or first >= last:
            return None
        char, anchor = text.marker_before(start)
        return (first, last) if text.ids[anchor:first] == self._encode_tail(full[char:start]) else None
