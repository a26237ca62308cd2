"""The weight files of a draft by their headers, without torch: safetensors, and torch's .bin without running its pickle."""

import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.errors import UsageError
from eyas.files import inside

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]

# safetensors dtype -> the numpy dtype its bytes are read as (bf16 and fp8 as bit patterns)
NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "|b1", "F8_E4M3": "<u1", "F8_E5M2": "<u1",
}  # fmt: skip
_BITS = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}  # torch's names
FLOATS = ("F64", "F32", "F16", "BF16")
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk: `offset` is where its bytes begin in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    contiguous: bool = True

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def bytes(self) -> int:
        return self.count * np.dtype(NUMPY[self.dtype]).itemsize

    def read(self, start: int = 0, count: int | None = None) -> Array:
        """`count` elements from flat index `start`, as stored (bf16 as uint16 bits)."""
        dtype = np.dtype(NUMPY[self.dtype])
        count = self.count - start if count is None else min(count, self.count - start)
        return np.fromfile(self.file, dtype, count, offset=self.offset + start * dtype.itemsize)

    def floats(self, start: int = 0, count: int | None = None) -> Array:
        """The same as float32 (float64 where stored so); bf16 is widened exactly."""
        values = self.read(start, count)
        if self.dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values if self.dtype == "F64" else values.astype(np.float32)

    def torch(self) -> "torch.Tensor":
        """The whole of it as a torch tensor in its stored dtype."""
        import torch

        if not self.contiguous:
            raise UsageError(f"{self.file}: {self.name} is stored transposed. Save it contiguous.")
        values = torch.from_numpy(self.read()).reshape(self.shape)
        return values.view(getattr(torch, _BITS[self.dtype])) if self.dtype in _BITS else values

    def sample(self, pieces: int = 16, length: int = 512) -> Array:
        """Up to pieces * length values as float32, evenly spread over the tensor: reading cost is bounded."""
        if self.count <= pieces * length:
            return self.floats()
        starts = np.linspace(0, self.count - length, pieces).astype(np.int64)
        return np.concatenate([self.floats(int(start), length) for start in starts])


def read_folder(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """(tensors by stored name, faults): a fault is a sentence about files that cannot be trusted."""
    index, faults = folder / "model.safetensors.index.json", []
    listed: dict[str, str] = {}
    if index.exists():
        try:
            listed = dict(json.loads(index.read_text("utf-8"))["weight_map"])
            files = sorted({inside(folder, name) for name in listed.values()})
        except UsageError as error:
            return {}, [str(error)]
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}, [f"{index.name} is not a safetensors index"]
    else:
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        sharded = any(folder.glob("*.distcp")) or any(folder.glob("**/.metadata"))
        hint = " It holds a sharded training checkpoint: consolidate it first." if sharded else ""
        return {}, [f"the folder holds neither model.safetensors nor pytorch_model.bin.{hint}"]
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if not file.exists():
            faults.append(f"{file.name} is named by the index and is not there")
            continue
        try:
            found = read_file(file)
        except UsageError as error:
            faults.append(str(error))
            continue
        faults += [f"{name} stands in two files" for name in found.keys() & tensors.keys()]
        tensors |= found
    if lost := sorted(listed.keys() - tensors.keys()) if not faults else []:
        faults.append(f"the index names {', '.join(lost[:3])}, which no file holds")
    return tensors, faults


def read_file(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name. Raises UsageError when its header or its length cannot be trusted."""
    return dict(_safetensors(file) if file.suffix == ".safetensors" else _torch_bin(file))


def _safetensors(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = file.stat().st_size
    with open(file, "rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(100 << 20, size - 8):
            raise UsageError(f"{file.name} is not a safetensors file, or is cut off in its header ({size:,} bytes)")
        try:
            header = {n: e for n, e in json.loads(handle.read(length)).items() if n != "__metadata__"}
            entries = [(n, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for n, e in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{file.name}: its header is not valid") from None
    end = max((stop for *_, stop in entries), default=0)
    if 8 + length + end != size:
        kind = "cut off" if 8 + length + end > size else "followed by foreign bytes"
        raise UsageError(f"{file.name} is {kind}: {size:,} bytes, its header tells of {8 + length + end:,}")
    for name, dtype, shape, start, stop in entries:
        if dtype not in NUMPY:
            raise UsageError(f"{file.name}: {name} has the unknown dtype {dtype}")
        tensor = StoredTensor(name, dtype, shape, file, 8 + length + start)
        if tensor.bytes != stop - start or start < 0:
            needs = f"{dtype} {list(shape)} needs {tensor.bytes}"
            raise UsageError(f"{file.name}: {name} takes {stop - start} bytes, {needs}")
        yield name, tensor


class _Reader(pickle.Unpickler):
    """Reads the structure of a torch .bin and nothing else: no class outside this short list is ever looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, stride, *_: (storage, offset, shape, stride)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise UsageError(f"its pickle asks for {module}.{name}; only plain tensors are read")

    def persistent_load(self, pid: Any) -> Any:
        return pid[1], pid[2]  # ("storage", dtype, key, location, count)


def _torch_bin(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = {info.filename: info for info in archive.infolist()}
            root = next(name for name in members if name.endswith("data.pkl")).removesuffix("data.pkl")
            with archive.open(root + "data.pkl") as handle:
                content = _Reader(handle).load()
    except (zipfile.BadZipFile, StopIteration, OSError):
        raise UsageError(f"{file.name} is not a torch file of the zip format, or is cut off") from None
    except UsageError as error:
        raise UsageError(f"{file.name}: {error}") from None
    except Exception as error:  # a damaged pickle fails in many ways
        raise UsageError(f"{file.name}: its pickle cannot be read ({type(error).__name__})") from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise UsageError(f"{file.name} holds {type(content).__name__}, expected tensors by name")
    with open(file, "rb") as handle:
        for name, value in content.items():
            if not (isinstance(value, tuple) and len(value) == 4):
                continue
            (dtype, key), offset, shape, stride = value
            info = members.get(f"{root}data/{key}")
            if info is None or info.compress_type != zipfile.ZIP_STORED:
                raise UsageError(f"{file.name}: the bytes of {name} are not in the file")
            handle.seek(info.header_offset + 26)  # local header: lengths of file name and extra field
            name_length, extra_length = struct.unpack("<HH", handle.read(4))
            begin = info.header_offset + 30 + name_length + extra_length
            steps, dense = 1, True
            for extent, step in zip(reversed(shape), reversed(stride), strict=True):
                dense, steps = dense and (extent == 1 or step == steps), steps * extent
            size = np.dtype(NUMPY[dtype]).itemsize
            tensor = StoredTensor(str(name), dtype, tuple(shape), file, begin + offset * size, dense)
            if offset * size + tensor.bytes > info.file_size:
                raise UsageError(f"{file.name}: the bytes of {name} are not all in the file")
            yield str(name), tensor


def write_file(file: Path, tensors: dict[str, "StoredTensor | Array"]) -> None:
    """A safetensors file of stored tensors (copied byte by byte, a piece at a time) and int64 or bool arrays."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in tensors.items():
        stored = isinstance(tensor, StoredTensor)
        size = tensor.bytes if isinstance(tensor, StoredTensor) else tensor.nbytes
        dtype = tensor.dtype if stored else {"int64": "I64", "bool": "BOOL"}[str(tensor.dtype)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            if isinstance(tensor, StoredTensor):
                for start in range(0, tensor.count, 1 << 24):
                    handle.write(tensor.read(start, 1 << 24).tobytes())
            else:
                handle.write(tensor.tobytes())
