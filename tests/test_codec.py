"""Codecs against what they promise: the same bits, or an error bounded by their step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from store_parts import make_sample

from eyas.errors import UsageError
from eyas.features.codec import CODECS, _e4m3, codec, to_bits, to_float

shapes = st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 40))
any_bits = hnp.arrays(np.uint16, shapes)
finite_bits = any_bits.map(lambda bits: np.where(bits & 0x7F80 == 0x7F80, bits & 0xBFFF, bits).astype(np.uint16))


@pytest.mark.parametrize("name", ["bf16", "bf16z"])
@settings(max_examples=60, deadline=None)
@given(bits=any_bits)
def test_lossless_gives_every_bit_back(name: str, bits: np.ndarray) -> None:
    method = codec(name)
    back = method.decode(memoryview(method.encode(bits)), bits.shape)
    assert back.dtype == np.uint16 and np.array_equal(back, bits)


def test_lossless_over_many_blocks_and_strides() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (300, 3, 500), dtype=np.uint16)
    for view in (bits, bits[::2], bits[:, ::-1], bits[:, :, ::3]):
        for name in ("bf16", "bf16z"):
            method = codec(name)
            assert np.array_equal(method.decode(memoryview(method.encode(view)), view.shape), view)


@settings(max_examples=60, deadline=None)
@given(bits=finite_bits)
def test_int8_keeps_the_largest_channels_and_bounds_the_rest(bits: np.ndarray) -> None:
    method = codec("int8o")
    back = method.decode(memoryview(method.encode(bits)), bits.shape)
    assert back.shape == bits.shape
    for layer in range(bits.shape[1]):  # the slow version: one layer, one token at a time
        values, decoded = to_float(bits[:, layer]).astype(np.float64), to_float(back[:, layer]).astype(np.float64)
        if not len(values):
            continue
        order = np.argsort(-np.abs(values).max(0), kind="stable")
        kept, rest = order[:8], order[8:]
        assert np.array_equal(bits[:, layer][:, kept], back[:, layer][:, kept])
        for row, got in zip(values[:, rest], decoded[:, rest], strict=True):
            top = np.abs(row).max(initial=0)
            # half a step of int8, then the rounding of a bf16; below the smallest normal scale only the magnitude counts
            assert np.all(np.abs(row - got) <= top / 254 * 1.01 + np.abs(row) / 200 + 1e-38)


def test_fp8_is_the_nearest_e4m3() -> None:
    torch = pytest.importorskip("torch")
    values, codes = _e4m3()
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(values, expected, equal_nan=True)
    bits = np.arange(1 << 16, dtype=np.uint16)
    inside = np.abs(to_float(bits)) <= 448
    wanted = torch.from_numpy(to_float(bits[inside])).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(codes[bits[inside]], wanted)


@settings(max_examples=200, deadline=None)
@given(value=hnp.arrays(np.float32, 8, elements=st.floats(width=32, allow_nan=True)))
def test_rounding_to_bf16_is_torchs(value: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    wanted = torch.from_numpy(value).bfloat16().float().numpy()
    assert np.array_equal(to_float(to_bits(value)), wanted, equal_nan=True)


def test_sizes_and_errors_on_states_with_massive_channels() -> None:
    bits = np.concatenate([make_sample(i, 200).aux for i in range(3)])
    from eyas.features.record import relative_error

    size, error = {}, {}
    for name, method in CODECS.items():
        data = method.encode(bits)
        size[name] = len(data) / bits.nbytes
        error[name] = relative_error([bits], [method.decode(memoryview(data), bits.shape)])
    assert error["bf16"] == error["bf16z"] == 0 and size["bf16"] == 1
    assert size["bf16z"] < 0.75
    assert 0 < error["int8o"] < 0.015 < error["fp8"] < 0.04


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(UsageError, match=r"'zip'.*bf16, bf16z, int8o, fp8"):
        codec("zip")
