"""Reading conversations: every form, every container, and a word for everything that is dropped."""

import bz2
import gzip
import json
import lzma
import os

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_template import make_tokenizer, talk

from eyas.data import conversations as module
from eyas.data.conversations import (
    Malformed,
    Report,
    Seen,
    batched,
    draw,
    parse_row,
    prepare_conversations,
    read_rows,
)
from eyas.data.documents import import_documents, read_documents
from eyas.data.template import ChatTemplate
from eyas.errors import EyasError, UsageError

FORMS = [
    ({"turns": ["Hi", "More"], "system": "Be brief."}, "Be brief.", ["Hi", "More"]),
    ({"prompt": "Hi"}, None, ["Hi"]),
    ({"prompt": [{"role": "user", "content": "Hi"}]}, None, ["Hi"]),
    ({"instruction": "Add.", "input": "1 2", "output": "3"}, None, ["Add.\n\n1 2"]),
    ({"instruction": "Add.", "input": ""}, None, ["Add."]),
    ({"messages": [{"role": "developer", "content": "S"}, *talk("Hi", "Yes", "More")]}, "S", ["Hi", "More"]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, None, ["Hi"]),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}, None, ["Hi"]),
    ({"conversations": [{"from": "system", "value": "S"}, {"from": "user", "value": "Hi"}]}, "S", ["Hi"]),
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(("value", "system", "turns"), FORMS)
def test_forms(value, system, turns):
    row = parse_row(value)
    assert (row["system"], row["turns"]) == (system, turns)
    assert row["id"] == parse_row(dict(value))["id"] and len(row["id"]) == 20
    assert parse_row(value | {"id": 7, "category": "maths"}) | {"form": ""} == {
        "id": "7", "category": "maths", "system": system, "turns": turns, "form": ""
    }  # fmt: skip


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "not an object (a JSON list)"),
        ({"question": "Hi"}, "unknown form (keys ['question']"),
        ({"messages": talk("Hi", "Yes")} | {"images": ["x.png"]}, "images are not supported"),
        (user([{"type": "image_url", "image_url": {}}]), "images are not supported, text only (a part of type 'image_url')"),
        ({"messages": [{"role": "laguna_s", "content": "Hi"}]}, "unknown role ('laguna_s')"),
        ({"messages": [{"content": "Hi"}]}, "unknown role (None)"),
        (user("  \n"), "empty turn (turn 1, user)"),
        (user(None), "empty turn"),
        (user(5), "a turn is no text (a int)"),
        ({"messages": ["Hi"]}, "a turn is no object (a str)"),
        ({"messages": "Hi"}, "'messages' is no list"),
        ({"messages": []}, "no user turn"),
        ({"messages": talk("Hi", "Yes")[1:]}, "assistant turn after start (turn 1)"),
        ({"messages": [*talk("Hi", "Yes"), {"role": "assistant", "content": "No"}]}, "two assistant turns in a row (turn 3)"),
        ({"turns": ["Hi", "More"], "messages": talk("Hi") + talk("Hi")}, "two user turns in a row"),
        ({"messages": [*talk("Hi", "Yes"), {"role": "system", "content": "S"}]}, "system turn after assistant (turn 3)"),
        ({"system": "A", "messages": talk("Hi", system="B")}, "two system turns in a row"),
        ({"messages": [*talk("Hi", "Yes"), {"role": "tool", "content": "42"}]}, "tool results"),
        ({"prompt": "half \ud800"}, "not valid Unicode"),
        ({"prompt": "Hi", "id": [1]}, "unusable id (a list)"),
        ({"prompt": {"a": 1}}, "a turn is no text (a dict)"),
    ],
)  # fmt: skip
def test_malformed_rows_say_what_is_wrong(value, words):
    with pytest.raises(Malformed) as caught:
        parse_row(value)
    assert words in str(caught.value)


def test_answers_are_kept_on_request():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    messages = [*talk("1+2?"), call, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "Three."}]
    row = parse_row({"messages": messages, "tools": [{"type": "function"}]}, answers=True)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][1]["content"] == "" and row["messages"][1]["tool_calls"] and row["tools"]
    assert parse_row({"instruction": "Add.", "output": "3"}, answers=True)["messages"] == talk("Add.", "3")
    with pytest.raises(Malformed, match="no answer"):
        parse_row({"prompt": "Hi"}, answers=True)


ROWS = [{"id": f"r{i}", "turns": [f"Question {i}", 'é ｜ "quoted" [1, {2}]\n']} for i in range(700)]


def containers(folder):
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS).encode()
    made = {"a.jsonl": lines, "b.jsonl.gz": gzip.compress(lines), "c.ndjson.bz2": bz2.compress(lines)}
    made |= {"d.jsonl.xz": lzma.compress(lines), "e.json": json.dumps(ROWS, indent=1).encode()}
    made |= {"f.json.gz": gzip.compress(json.dumps(ROWS, ensure_ascii=False).encode()), "g.json": lines}
    made["h.jsonl"] = b"\xef\xbb\xbf" + lines
    for name, data in made.items():
        (folder / name).write_bytes(data)
    table = pa.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "i.parquet", row_group_size=100)
    for name in ("saved", "dict/train"):
        (folder / name).mkdir(parents=True)
        with pa.ipc.new_stream(folder / name / "data-0.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=300)
        (folder / name / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    (folder / "dict" / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    (folder / "plain").mkdir()
    (folder / "plain" / "1.jsonl").write_bytes(b"".join(lines.splitlines(True)[:800]))
    (folder / "plain" / "2.jsonl.gz").write_bytes(gzip.compress(b"".join(lines.splitlines(True)[800:])))
    return [*made, "i.parquet", "saved", "dict", "plain"]


def test_every_container_gives_the_same_rows(tmp_path):
    for name in containers(tmp_path):
        read = list(read_rows(tmp_path / name))
        assert [value for _, value, _ in read] == ROWS, name
        consumed = [bytes_ for _, _, bytes_ in read]
        assert consumed == sorted(consumed), name


def test_text_lines_are_prompts(tmp_path):
    (tmp_path / "p.txt").write_text("One?\n\n  Two?\n")
    prepare_conversations([tmp_path / "p.txt"], tmp_path / "out.jsonl")
    assert [row["turns"] for row in rows_of(tmp_path / "out.jsonl")] == [["One?"], ["Two?"]]


def test_where_names_the_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        b'{"prompt": "Hi"}\n{"prompt": \n\xff\xfe\n{"messages": 3}\n[]\n{"prompt": "HI "}\n{"prompt": "Bye"}\n'
    )
    report = prepare_conversations([file], tmp_path / "out.jsonl")
    assert (report.read, report.kept) == (7, 2) and sum(report.dropped.values()) == 5
    shown = " ".join(example for examples in report.examples.values() for example in examples)
    for line in (2, 3, 4, 5, 6):
        assert f"{file}:{line}: " in shown
    assert report.dropped["duplicate"] == 1 and report.forms == {"prompt": 2}
    assert "7 read, 2 kept, 5 dropped" in str(report) and json.dumps(report.to_dict())
    with pytest.raises(UsageError, match=r"a\.jsonl:2: not JSON"):
        prepare_conversations([file], tmp_path / "stopped.jsonl", policy="stop")
    assert not (tmp_path / "stopped.jsonl").exists() and len(list(tmp_path.iterdir())) == 2


def test_every_dropped_row_is_counted_though_not_every_one_is_shown(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "Hi"}] + [{"nothing": i} for i in range(50)])
    report = prepare_conversations([file], tmp_path / "out.jsonl")
    assert report.dropped == {"unknown form": 50} and len(report.examples["unknown form"]) == 3


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", b"id,prompt\n1,Hi\n", r"a\.jsonl:1: not JSON .*Expected JSON lines"),
        ("a.jsonl", b"PK\x03\x04\xff\xff" * 30 + b"\n", "not UTF-8"),
        ("a.jsonl", "{}".encode("utf-16"), "not UTF-8"),
        ("a.jsonl", b"word\n" * 50, "not JSON"),
        ("a.json", b'{\n "prompt":\n "Hi"\n}', "not JSON"),
        ("a.json", b'[{"prompt": ', "item 1: not JSON"),
        ("a.jsonl", b"", "no usable conversation"),
        ("a.jsonl", b'{"prompt": ""}\n', "no usable conversation.*1 read, 0 kept"),
        ("a.csv", b"x", "unknown kind of file"),
        ("a.parquet", b"PAR1 nothing", "not a Parquet file"),
        ("missing.jsonl", None, "no such file"),
    ],
)
def test_files_that_are_something_else_give_one_sentence(tmp_path, name, data, words):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=f"(?s){words}"):
        prepare_conversations([tmp_path / name], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_cut_off_archive_and_a_cut_off_array_are_said(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "Hi"}\n' * 5000)[:60])
    with pytest.raises(EyasError, match="damaged or cut off"):
        prepare_conversations([tmp_path / "a.jsonl.gz"], tmp_path / "out.jsonl")
    (tmp_path / "b.json").write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}])[:-6])
    report = prepare_conversations([tmp_path / "b.json"], tmp_path / "out.jsonl")
    assert report.kept == 1 and "item 2" in report.examples["not JSON"][0]


def test_folders_without_data_and_names_that_leave_the_folder_are_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no data set"):
        list(read_rows(tmp_path))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../other.arrow"}]}))
    with pytest.raises(UsageError, match="points outside"):
        list(read_rows(tmp_path))
    pyarrow.parquet.write_table(pa.table({"question": ["Hi"]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"columns \['question'\]"):
        list(read_rows(tmp_path / "a.parquet"))


def test_ids_are_unique_and_duplicates_go(tmp_path):
    rows = [
        {"id": "a", "prompt": "One"},
        {"id": "b", "prompt": " one\n"},
        {"id": "a", "prompt": "Two"},
        {"prompt": "Three"},
    ]
    report = prepare_conversations([write_lines(tmp_path / "a.jsonl", rows)], tmp_path / "out.jsonl")
    assert [row["turns"] for row in rows_of(tmp_path / "out.jsonl")] == [["One"], ["Three"]]
    assert report.dropped == {"duplicate": 1, "id used twice": 1}


def test_weights_and_limits_draw_by_id_not_by_place(tmp_path):
    rows = [{"id": f"x{i}", "category": ("maths", "code")[i % 2], "prompt": f"Question {i}"} for i in range(4000)]
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    write_lines(one, rows), write_lines(two, rows[::-1])
    kept = []
    for file in (one, two):
        weights = {"maths": 0.25, str(file): 0.5}  # the category's weight counts before its source's
        report = prepare_conversations([file], tmp_path / "out.jsonl", weights=weights, limit=300, seed=3)
        assert report.dropped["left out by weight"] + report.dropped["beyond the limit"] == 3700
        assert 2400 < report.dropped["left out by weight"] < 2600 and report.scripts == {"LATIN": 300}
        kept.append([row["id"] for row in rows_of(tmp_path / "out.jsonl")])
    assert kept[0] == kept[1][::-1]
    chosen = [row["id"] for row in rows if draw(row["id"], 3) < (0.25 if row["category"] == "maths" else 0.5)]
    assert set(kept[0]) == set(sorted(chosen, key=lambda name: draw(name, 3))[:300])
    report = prepare_conversations([one], tmp_path / "out.jsonl", weights={"maths": 0})
    assert report.categories == {"code": 2000}
    with pytest.raises(UsageError, match="'maths' is 2, expected a share"):
        prepare_conversations([one], tmp_path / "out.jsonl", weights={"maths": 2})
    with pytest.raises(UsageError, match="'math' is neither a category"):
        prepare_conversations([one], tmp_path / "out.jsonl", weights={"math": 0.5})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", "LATIN"),
        ("你好 OK", "CJK"),
        ("Привет", "CYRILLIC"),
        ("café", "LATIN"),
        ("3 ≤ 4", "none"),
        ("", "LATIN"),
    ],
)
def test_scripts(text, expected):
    assert module.script(text) == expected


def test_what_the_template_refuses_is_dropped(tmp_path):
    template = ChatTemplate(make_tokenizer("gemma"))
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "Short"}, {"prompt": "Hi", "system": "No"}])
    report = prepare_conversations([file], tmp_path / "out.jsonl", template=template)
    assert report.kept == 1 and report.dropped == {"refused by the chat template": 1}
    assert "a.jsonl:2: " in report.examples["refused by the chat template"][0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=400))
def test_seen_is_a_set(numbers):
    seen, model = Seen(), set()
    for n, number in enumerate(numbers):
        assert seen.add(str(number)) == (number not in model)
        model.add(number)
        if n % 37 == 0:  # as if the small set were full
            seen.old = module.np.union1d(seen.old, module.np.fromiter(seen.new, module.np.uint64))
            seen.new.clear()


def imported(*conversations):
    return [{"id": str(i), "category": "c", "messages": messages} for i, messages in enumerate(conversations)]


def test_imported_documents(tmp_path):
    template = ChatTemplate(make_tokenizer("qwen3"), {})
    thinking = "<think>\nHm.\n</think>\n\nYes."
    rows = imported(talk("Hi", "Yes."), talk("Hi", thinking, "More", thinking), talk("Hi", "Yes.", "Again?", "No."))
    out = tmp_path / "answers.jsonl"
    report = import_documents(rows, template, out)
    documents = list(read_documents(out))
    # an answer without thinking as the last one gets an empty thinking block that the target was not asked to begin
    assert [d["id"] for d in documents] == ["1", "2"] and report.dropped == {"boundaries not proved": 1}
    assert report.notes == {"assistant turns": 4, "assistant turns not supervised": 2}
    assert documents[0]["finish"] == ["stop"]
    (start, end) = documents[0]["spans"][0]
    assert template.decode(documents[0]["tokens"][start:end]) == thinking + "<|im_end|>"
    with pytest.raises(UsageError, match="0: assistant turn 1"):
        import_documents(rows, template, out, policy="stop")


def test_long_documents_are_cut_after_a_whole_answer(tmp_path):
    template, out = ChatTemplate(make_tokenizer("llama3")), tmp_path / "answers.jsonl"
    rows = imported(talk("Hi", "Yes.", "And a long question? " * 5, "No."), talk("Hello. " * 40, "Yes."))
    whole, _ = template.mask_conversation(rows[0]["messages"])
    report = import_documents(rows, template, out, max_tokens=len(whole) - 1)
    (document,) = read_documents(out)
    assert template.decode(document["tokens"]).endswith("Yes.<|eot_id|>") and len(document["spans"]) == 1
    assert report.notes["documents cut after a whole answer"] == 1 and report.dropped == {"too long": 1}


def test_a_set_that_supervises_nothing_or_nearly_nothing_is_an_error(tmp_path):
    template, out = ChatTemplate(make_tokenizer("gpt_oss")), tmp_path / "answers.jsonl"
    with pytest.raises(EyasError, match=r"(?s)0 documents with 0\.0%.*chat template begins"):
        import_documents(imported(talk("Hi", "Yes.")), template, out)
    with pytest.raises(EyasError, match=r"(?s)1 documents with 0\..%.*first document begins"):
        import_documents(imported(talk("Hello. " * 900, "Yes.")), ChatTemplate(make_tokenizer("llama3")), out)
    assert not out.exists()


def test_documents_that_are_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(UsageError, match=r"a\.jsonl:1: no object with id, tokens, spans"):
        list(read_documents(tmp_path / "a.jsonl"))


def test_report_starts_empty():
    assert str(Report()) == "0 read, 0 kept, 0 dropped"


def test_many_rows_are_worked_on_by_processes_in_order(monkeypatch):
    monkeypatch.setattr(module, "MANY", 64)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    done = list(batched(iter(range(1000)), lambda part: [(2 * number, os.getpid()) for number in part], 7))
    assert [number for part, _ in done for number in part] == list(range(1000))
    assert [result for _, results in done for result, _ in results] == list(range(0, 2000, 2))
    processes = {process for _, results in done for _, process in results}
    assert len(processes) > 1 and os.getpid() not in processes
    with pytest.raises(ZeroDivisionError):
        list(batched(iter(range(1000)), lambda part: [1 // number for number in part]))
    few = list(batched(iter(range(10)), lambda part: [os.getpid() for _ in part], 4))
    assert [part for part, _ in few] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and few[0][1][0] == os.getpid()


def test_imported_documents_are_the_same_from_one_process_and_from_many(tmp_path, monkeypatch):
    template = ChatTemplate(make_tokenizer("qwen2_5"))
    rows = imported(*(talk(f"Question {i}?", f"Answer {i}.", "And?", "x" * (i % 5)) for i in range(300)))
    files = []
    for many in (10_000, 50):
        monkeypatch.setattr(module, "MANY", many)
        files.append(tmp_path / f"{many}.jsonl")
        report = import_documents(iter(rows), template, files[-1])
        assert report.kept == 300 and report.notes["assistant turns not supervised"] == 60
    assert files[0].read_bytes() == files[1].read_bytes()
