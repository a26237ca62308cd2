"""The store under everything that goes wrong: kills, full disks, flipped bytes, lost files, two writers."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from store_parts import LAYERS, STORE, make_sample, same

from eyas.errors import EyasError, UsageError
from eyas.features import health
from eyas.features.record import mask_of, spans_of, teacher_positions
from eyas.features.store import Store, StoreWriter

TESTS = Path(__file__).parent


def fill(path: Path, count: int = 12, step: int = 3, finish: bool = True, **options: object) -> None:
    with StoreWriter(path, **{**STORE, "shard_bytes": 60_000, **options}) as store:
        for number in range(count):
            if make_sample(number).id not in store.committed:
                store.append(make_sample(number))
                if number % step == step - 1:
                    store.commit()
        store.commit()
        if finish:
            store.finish()


def holds(path: Path, count: int) -> bool:
    store = Store(path)
    return len(store) == count and all(same(store.read(make_sample(i).id), make_sample(i)) for i in range(count))


@given(mask=hnp.arrays(bool, st.integers(0, 40)))
def test_masks_and_spans_say_the_same(mask: np.ndarray) -> None:
    assert np.array_equal(mask_of(spans_of(mask), len(mask)), mask)
    slow = [t for t in range(len(mask) - 1) if mask[t] and mask[t + 1]]
    assert teacher_positions(mask).tolist() == slow


@pytest.mark.parametrize("codec", ["bf16", "bf16z"])
def test_reads_back_what_was_written(tmp_path: Path, codec: str) -> None:
    fill(tmp_path / "s", codec=codec)
    store = Store(tmp_path / "s")
    assert store.ids == sorted(make_sample(i).id for i in range(12)) and holds(tmp_path / "s", 12)
    for i in random.Random(0).sample(range(12), 12):
        sample = make_sample(i)
        assert np.array_equal(store.tokens(sample.id), sample.tokens)
        assert store.lengths[store.ids.index(sample.id)] == len(sample.tokens)
    assert same(store.read(3), make_sample(3)) and len(list((tmp_path / "s").glob("shard-*"))) > 2
    assert health.verify(tmp_path / "s", deep=True)["bad"] == []
    found = health.info(tmp_path / "s")
    assert found["samples"] == 12 and found["complete"] and found["layers"] == LAYERS and found["codec"] == codec
    assert found["tokens"] == sum(len(make_sample(i).tokens) for i in range(12))
    assert found["bytes"] == sum(file.stat().st_size for file in (tmp_path / "s").iterdir())


@pytest.mark.parametrize(("codec", "most"), [("int8o", 0.015), ("fp8", 0.04)])
def test_lossy_codecs_record_their_error(tmp_path: Path, codec: str, most: float) -> None:
    fill(tmp_path, codec=codec)
    assert 0.003 < health.info(tmp_path)["codec_error"] < most
    sample = Store(tmp_path).read("c004")
    assert np.array_equal(sample.argmax, make_sample(4).argmax) and not same(sample, make_sample(4))


def test_a_bf16_record_is_a_safetensors_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load

    fill(tmp_path)
    entry, sample = Store(tmp_path).entry("c005"), make_sample(5)
    data = (tmp_path / entry.shard).read_bytes()[entry.offset : entry.offset + entry.length]
    tensors = load(data)
    assert tensors["aux"].dtype == torch.bfloat16
    assert np.array_equal(tensors["aux"].view(torch.int16).numpy().view(np.uint16), sample.aux)
    assert tensors["tokens"].tolist() == sample.tokens.tolist()


def test_writing_to_what_was_read_changes_no_file(tmp_path: Path) -> None:
    fill(tmp_path)
    sample = Store(tmp_path).read("c001")
    sample.aux[:] = 0
    assert holds(tmp_path, 12)


def test_uncommitted_samples_do_not_count_and_leave_no_trace(tmp_path: Path) -> None:
    fill(tmp_path / "whole", 8, finish=False)
    writer = StoreWriter(tmp_path / "s", **STORE, shard_bytes=60_000)
    for i in range(3):
        writer.append(make_sample(i))
    writer.commit()
    writer.append(make_sample(3))
    writer.close()
    assert len(Store(tmp_path / "s")) == 3
    fill(tmp_path / "s", 8, finish=False)
    for file in (tmp_path / "whole").glob("shard-*"):
        assert (tmp_path / "s" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": [1, 3, 7]}, "layers"),
        ({"codec": "bf16z"}, "codec"),
        ({"target": {"weights": "other", "chat_template": "c"}}, "target's weights"),
        ({"target": {"weights": "w", "chat_template": "other"}}, "target's chat_template"),
        ({"extra": {"dtype": "float32"}}, "dtype"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path: Path, change: dict, named: str) -> None:
    fill(tmp_path)
    with pytest.raises(UsageError, match=named):
        StoreWriter(tmp_path, **{**STORE, **change})
    assert holds(tmp_path, 12)


def test_wrong_samples_are_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, **STORE) as store:
        store.append(make_sample(0))
        with pytest.raises(UsageError, match="already in the store"):
            store.append(make_sample(0))
        bad = make_sample(1)
        bad.aux = bad.aux.swapaxes(0, 1)
        with pytest.raises(UsageError, match="aux is"):
            store.append(bad)
        bad = make_sample(1)
        bad.argmax = bad.argmax[:-1]
        with pytest.raises(UsageError, match="argmax is"):
            store.append(bad)


def test_reading_nothing_or_an_unknown_sample(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no feature store"):
        Store(tmp_path / "nowhere")
    fill(tmp_path)
    with pytest.raises(UsageError, match="no sample 'x' among its 12"):
        Store(tmp_path).read("x")


# Faults


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("codec", ["bf16", "bf16z"])
def test_every_flipped_byte_of_a_record_is_found(tmp_path: Path, codec: str) -> None:
    fill(tmp_path / "good", codec=codec)
    entry = Store(tmp_path / "good").entry("c004")
    places = [0, 3, 8, 30, 400, *random.Random(1).sample(range(entry.length), 12), entry.length - 1]
    for place in places:
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "s")
        flip(tmp_path / "s" / entry.shard, entry.offset + place)
        report = health.verify(tmp_path / "s")
        assert [bad["sample"] for bad in report["bad"]] == ["c004"] and report["ok"] == 11, place
        with pytest.raises(EyasError, match=r"c004.*damaged.*eyas store repair"):
            Store(tmp_path / "s").read("c004")
        assert same(Store(tmp_path / "s").read("c005"), make_sample(5))


def test_repair_drops_the_bad_keeps_the_good_and_extraction_fills_the_gap(tmp_path: Path) -> None:
    fill(tmp_path)
    store = Store(tmp_path)
    for name in ("c002", "c011"):
        flip(tmp_path / store.entry(name).shard, store.entry(name).offset + store.entry(name).length - 7)
    before = {file: file.read_bytes() for file in tmp_path.glob("shard-*")}
    result = health.repair(tmp_path)
    assert sorted(bad["sample"] for bad in result["dropped"]) == ["c002", "c011"] and result["kept"] == 10
    assert {file: file.read_bytes() for file in tmp_path.glob("shard-*")} == before
    assert "c002" not in Store(tmp_path).ids and not health.info(tmp_path)["complete"]
    assert {bad["sample"] for bad in health.verify(tmp_path)["bad"]} == {"c002", "c011"}
    fill(tmp_path)
    assert holds(tmp_path, 12) and health.verify(tmp_path, deep=True)["bad"] == []


@pytest.mark.parametrize("codec", ["bf16", "bf16z"])
def test_a_reader_follows_a_sample_that_was_extracted_again(tmp_path: Path, codec: str) -> None:
    """Where its old record lay, and how, is forgotten."""
    with StoreWriter(tmp_path, **STORE, codec=codec) as store:
        store.append(make_sample(1, length=40))
        store.append(make_sample(2))
        store.finish()
    reader = Store(tmp_path)
    assert same(reader.read("c001"), make_sample(1, length=40)) and same(reader.read("c002"), make_sample(2))
    entry = reader.entry("c001")
    flip(tmp_path / entry.shard, entry.offset + entry.length - 1)
    assert [bad["sample"] for bad in health.repair(tmp_path)["dropped"]] == ["c001"]
    again = replace(make_sample(3, length=70), id="c001")
    with StoreWriter(tmp_path, **STORE, codec=codec) as store:
        store.append(again)
        store.finish()
    reader.refresh()
    assert same(reader.read("c001"), again) and same(reader.read("c002"), make_sample(2))


def test_a_deleted_shard(tmp_path: Path) -> None:
    fill(tmp_path)
    store = Store(tmp_path)
    gone = store.entry("c006").shard
    lost = {entry.id for entry in store.entries.values() if entry.shard == gone}
    (tmp_path / gone).unlink()
    report = health.verify(tmp_path)
    assert {bad["sample"] for bad in report["bad"]} == lost and report["ok"] == 12 - len(lost)
    with pytest.raises(EyasError, match="missing"):
        Store(tmp_path).read("c006")
    health.repair(tmp_path)
    fill(tmp_path)
    assert holds(tmp_path, 12) and health.verify(tmp_path)["bad"] == []


def test_a_deleted_last_shard_and_a_writer_that_is_killed_again(tmp_path: Path) -> None:
    """Rows that point into a lost shard must not come back to life when new records grow past their place."""
    fill(tmp_path)
    last = sorted(tmp_path.glob("shard-*"))[-1]
    lost = {entry.id for entry in Store(tmp_path).entries.values() if entry.shard == last.name}
    last.unlink()
    fill(tmp_path, 12 + 1, step=1, finish=False)
    with StoreWriter(tmp_path, **STORE) as store:
        assert lost <= store.committed
    assert holds(tmp_path, 13)


def test_a_shard_that_shrank_under_an_open_reader(tmp_path: Path) -> None:
    fill(tmp_path)
    store = Store(tmp_path)
    entry = store.entry("c000")
    store.read("c000")
    os.truncate(tmp_path / entry.shard, entry.offset + 100)
    with pytest.raises(EyasError, match="cut off"):
        store.read("c000")


@pytest.mark.parametrize("harm", ["cut", "flip", "delete"])
def test_a_lost_index_is_rebuilt_from_the_shards(tmp_path: Path, harm: str) -> None:
    fill(tmp_path)
    index = tmp_path / "index.parquet"
    if harm == "cut":
        os.truncate(index, index.stat().st_size // 2)
    elif harm == "delete":
        index.unlink()
    else:
        flip(index, 40)
    assert "index.parquet" in {bad["sample"] for bad in health.verify(tmp_path)["bad"]}
    with pytest.raises(EyasError, match="repair"):
        Store(tmp_path)
    with pytest.raises(EyasError, match="repair"):  # a writer must not take the shards for empty
        StoreWriter(tmp_path, **STORE)
    assert health.repair(tmp_path)["recovered"] == 12
    assert holds(tmp_path, 12) and health.verify(tmp_path, deep=True)["bad"] == []


def test_every_flipped_byte_of_the_index_is_found_or_harmless(tmp_path: Path) -> None:
    fill(tmp_path)
    good, size = Store(tmp_path).entries, (tmp_path / "index.parquet").stat().st_size
    for place in random.Random(2).sample(range(size), 60):
        flip(tmp_path / "index.parquet", place)
        with contextlib.suppress(EyasError):
            assert Store(tmp_path).entries == good
        flip(tmp_path / "index.parquet", place)


def test_a_damaged_journal(tmp_path: Path) -> None:
    fill(tmp_path, finish=False)
    journal = tmp_path / "journal-0.jsonl"
    flip(journal, journal.stat().st_size // 2)
    with pytest.raises(EyasError, match=r"journal-0\.jsonl: a line does not have its checksum"):
        Store(tmp_path)
    assert health.repair(tmp_path)["recovered"] == 1
    assert holds(tmp_path, 12)


def test_a_damaged_description(tmp_path: Path) -> None:
    fill(tmp_path)
    flip(tmp_path / "store.json", 60)
    assert "store.json" in {bad["sample"] for bad in health.verify(tmp_path)["bad"]}
    with pytest.raises(EyasError, match=r"store\.json"):
        Store(tmp_path)
    health.repair(tmp_path)
    assert holds(tmp_path, 12) and health.verify(tmp_path)["bad"] == []


def test_deep_verify_sees_what_checksums_cannot(tmp_path: Path) -> None:
    def change(name: str, sample: object) -> None:
        if name == "c001":
            sample.aux[3, 1, 7] = 0x7F80  # infinity
        elif name == "c002":
            sample.aux[4, 2] = 0  # never written
        elif name == "c003":
            sample.tokens[0] = 400
        elif name == "c004":
            sample.final[2, 2] = 0x7000  # 1.6e29
        elif name == "c005":
            sample.argmax[:] = 299 - sample.tokens[teacher_positions(sample.supervised) + 1]

    with StoreWriter(tmp_path, **STORE, extra={"vocab_size": 300}) as store:
        for i in range(12):
            sample = make_sample(i, length=80)
            change(sample.id, sample)
            store.append(sample)
        store.finish()
    assert health.verify(tmp_path)["bad"] == []
    bad = {row["sample"]: row["reason"] for row in health.verify(tmp_path, deep=True, threshold=0.5)["bad"]}
    wanted = {"c001": "NaN", "c002": "zeros", "c003": "vocabulary", "c004": "beyond", "c005": "another conversation"}
    assert bad.keys() == wanted.keys() and all(wanted[name] in bad[name] for name in wanted)
    assert any(
        "self" in row["reason"] or "next token" in row["reason"] for row in health.verify(tmp_path, deep=True)["bad"]
    )


def test_verify_against_the_work_list(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    rows = [
        {"id": s.id, "tokens": s.tokens.tolist(), "spans": spans_of(s.supervised).tolist()}
        for s in map(make_sample, range(4))
    ]
    rows[1]["tokens"][0] += 1
    bad = {row["sample"]: row["reason"] for row in health.verify(tmp_path, documents=rows)["bad"]}
    assert bad.keys() == {"c001", "c003"} and "differ" in bad["c001"] and "not in the store" in bad["c003"]


# Real processes

WRITE = """
import sys
sys.path.insert(0, {tests!r})
from store_parts import STORE, make_sample
from eyas.features.store import StoreWriter
with StoreWriter({path!r}, **STORE, shard_bytes=60_000, codec="bf16z", writer={writer!r}) as store:
    for i in range({first}, {last}):
        if make_sample(i).id in store.committed:
            continue
        store.append(make_sample(i))
        if i % 2:
            store.commit()
            print(len(store.committed), flush=True)
    {end}
"""


def start(path: Path, first: int, last: int, writer: str = "0", end: str = "store.finish()") -> subprocess.Popen:
    code = WRITE.format(tests=str(TESTS), path=str(path), first=first, last=last, writer=writer, end=end)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_sigkill_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    count, chance, committed, kills = 60, random.Random(3), 0, 0
    while kills < 10:
        process = start(tmp_path / "s", 0, count)
        seen = 0
        for line in process.stdout:  # let it commit a little, then kill it somewhere in between
            seen, committed = seen + 1, int(line)
            if seen == 1 + kills % 3 and committed < count:
                time.sleep(chance.random() * 0.004)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
        committed = max([committed, *map(int, process.stdout.read().split())])
        process.wait()
        process.stdout.close()
        process.stderr.close()
        store = Store(tmp_path / "s")
        assert len(store) >= committed
        assert all(same(store.read(name), make_sample(int(name[1:]))) for name in store.ids)
        if process.returncode == 0:
            break
    assert kills >= 5
    process = start(tmp_path / "s", 0, count)
    assert process.communicate()[1] == "" and process.returncode == 0
    fill(tmp_path / "whole", count, codec="bf16z")
    assert holds(tmp_path / "s", count)
    left, right = ([entry.checksum for entry in Store(tmp_path / name).entries.values()] for name in ("s", "whole"))
    assert left == right and health.verify(tmp_path / "s", deep=True)["bad"] == []


def test_two_writers_on_one_shard_series(tmp_path: Path) -> None:
    process = start(tmp_path, 0, 6, end="import time; time.sleep(60)")
    try:
        assert [process.stdout.readline() for _ in range(3)] == ["2\n", "4\n", "6\n"]
        with pytest.raises(UsageError, match="another process is writing here"):
            StoreWriter(tmp_path, **STORE, codec="bf16z")
        with pytest.raises(UsageError, match="writer is alive"):
            health.repair(tmp_path)
        with StoreWriter(tmp_path, **STORE, codec="bf16z", writer="1") as other:  # its own series is fine
            other.append(make_sample(7))
            assert not other.finish()  # the other one is alive, so the store is not complete
        assert len(Store(tmp_path)) == 7 and not health.info(tmp_path)["complete"]
    finally:
        process.kill()
        process.communicate()
    with StoreWriter(tmp_path, **STORE, codec="bf16z") as store:
        assert store.finish()
    assert len(Store(tmp_path)) == 7 and health.info(tmp_path)["complete"]


def test_many_writers_and_a_reader_meanwhile(tmp_path: Path) -> None:
    writers = [start(tmp_path, 20 * i, 20 * i + 20, f"w{i}") for i in range(3)]
    seen = 0
    while any(process.poll() is None for process in writers):
        with contextlib.suppress(UsageError):  # not there yet
            store = Store(tmp_path)
            assert len(store) >= seen
            seen = len(store)
            for name in store.ids[-3:]:
                assert same(store.read(name), make_sample(int(name[1:])))
    for process in writers:
        assert process.communicate()[1] == "" and process.returncode == 0
    assert holds(tmp_path, 60) and health.info(tmp_path)["complete"] and health.verify(tmp_path)["bad"] == []
    assert not list(tmp_path.glob("journal-*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_says_so_and_keeps_what_was_committed(small_disk: Path) -> None:
    with StoreWriter(small_disk / "s", **STORE, shard_bytes=200_000) as store:
        with pytest.raises(EyasError, match="the disk is full"):
            for i in range(200):
                store.append(make_sample(i))
                if i % 2:
                    store.commit()
        committed = len(store.committed)
    assert 10 < committed < 200 and len(Store(small_disk / "s")) == committed
    assert holds(small_disk / "s", committed) and health.verify(small_disk / "s")["bad"] == []
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    fill(small_disk / "s", committed + 10, shard_bytes=200_000)
    assert holds(small_disk / "s", committed + 10)


def test_a_disk_that_fills_on_the_journal(small_disk: Path) -> None:
    with StoreWriter(small_disk / "s", **STORE) as store:
        store.append(make_sample(0))
        store.commit()
        for i in range(1, 13):  # a dozen lines do not fit where the first one lies
            store.append(make_sample(i, length=20))
        ballast = os.open(small_disk / "ballast", os.O_CREAT | os.O_WRONLY)
        with contextlib.suppress(OSError):
            while os.write(ballast, bytes(512)):
                pass
        os.close(ballast)
        with pytest.raises(EyasError, match="the disk is full"):
            store.commit()
        assert store.committed == {"c000"} and holds(small_disk / "s", 1)
        (small_disk / "ballast").unlink()
        for i in range(1, 5):  # the writer goes on where it was
            store.append(make_sample(i))
        store.finish()
    assert holds(small_disk / "s", 5) and health.verify(small_disk / "s")["bad"] == []


# Beyond one disk


def test_a_store_behind_fsspec(tmp_path: Path) -> None:
    address = f"memory://store-{os.getpid()}-{tmp_path.name}"
    with StoreWriter(address, **STORE, writer="a") as store:
        for i in range(4):
            store.append(make_sample(i))
        store.commit()
        store.append(make_sample(4))  # never committed
    assert len(Store(address)) == 4
    with StoreWriter(address, **STORE, writer="a") as store:
        assert len(store.committed) == 4
        store.append(make_sample(5))
        store.finish()
    store = Store(address)
    assert store.ids == [make_sample(i).id for i in (0, 1, 2, 3, 5)]
    assert all(same(store.read(name), make_sample(int(name[1:]))) for name in store.ids)
    assert np.array_equal(store.tokens("c005"), make_sample(5).tokens)
    report = health.verify(address, deep=True)
    assert report["bad"] == [] and report["samples"] == 5 and health.info(address)["complete"]


def test_verify_and_reading_need_no_torch(tmp_path: Path) -> None:
    fill(tmp_path)
    code = (
        "import sys, json; from eyas.features import health, store\n"
        f"report = health.verify({str(tmp_path)!r}, deep=True); store.Store({str(tmp_path)!r}).read(0)\n"
        "print(json.dumps([report['ok'], 'torch' in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == [12, False]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket on an S3 server of our own, spoken to over HTTP."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "none")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "none")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("FSSPEC_S3_ENDPOINT_URL", f"http://{host}:{port}")
        import fsspec

        fsspec.config.set_conf_env(fsspec.config.conf)
        fsspec.filesystem("s3").mkdir("eyas")
        yield "s3://eyas"
        fsspec.config.conf.pop("s3", None)
    server.stop()


@pytest.mark.parametrize("codec", ["bf16", "bf16z"])
def test_a_store_on_s3(bucket: str, codec: str) -> None:
    address = f"{bucket}/runs/{codec}"
    with StoreWriter(address, **STORE, codec=codec, writer="a") as store, pytest.raises(ZeroDivisionError):
        for i in range(6):
            store.append(make_sample(i))
            if i % 2:
                store.commit()
        store.append(make_sample(6))
        raise ZeroDivisionError  # the process dies here, with one sample in flight
    reader = Store(address)
    assert len(reader) == 6 and not health.info(address)["complete"]
    with StoreWriter(address, **STORE, codec=codec, writer="b") as store:  # another machine goes on
        assert len(store.committed) == 6
        for i in range(6, 9):
            store.append(make_sample(i))
        store.finish()
    reader.refresh()
    assert len(reader) == 9
    for i in random.Random(0).sample(range(9), 9):
        assert same(reader.read(make_sample(i).id), make_sample(i))
        assert np.array_equal(Store(address).tokens(make_sample(i).id), make_sample(i).tokens)
    assert health.verify(address, deep=True)["bad"] == [] and health.info(address)["samples"] == 9
    with pytest.raises(UsageError, match="layers"):
        StoreWriter(address, **{**STORE, "layers": [1, 3, 7]}, codec=codec)

    entry = reader.entry("c004")
    data = bytearray(reader.place.read(entry.shard))
    data[entry.offset + entry.length - 3] ^= 4
    reader.place.write(entry.shard, bytes(data))
    assert [row["sample"] for row in health.verify(address)["bad"]] == ["c004"]
    assert [row["sample"] for row in health.repair(address)["dropped"]] == ["c004"]
    with StoreWriter(address, **STORE, codec=codec, writer="b") as store:
        store.append(make_sample(4))
        store.finish()
    assert all(same(Store(address).read(make_sample(i).id), make_sample(i)) for i in range(9))


def test_a_whole_run_whose_store_is_on_s3(bucket: str, tiny_target: Path, tmp_path: Path) -> None:
    """The recipe's `extract.store`: extracted, trained and replayed from there; the verbs take the address too."""
    from test_run import recipe

    def eyas(*arguments: object) -> dict:
        command = [sys.executable, "-m", "eyas", *map(str, arguments), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    address = f"{bucket}/whole/store"
    path = recipe(tmp_path, tiny_target, extract={"token_budget": 512, "codec": "bf16z", "store": address})
    stages = eyas("run", path)["stages"]
    assert stages["replay"]["tau"] >= 1 and not list((tmp_path / "run" / "store").glob("shard-*"))
    assert eyas("store", "info", address)["samples"] == stages["store"]["samples"] == 24
    assert eyas("store", "verify", address, "--deep")["bad"] == []
    again = eyas("replay", tmp_path / "run" / "draft", "--store", address, "--target", tiny_target, "--split", "all")
    assert again["protocol"]["prompts"] == 24
    assert eyas("run", path, "--redo", "store", "--until", "store")["stages"]["store"]["samples"] == 24
