"""What is encoded comes back; what is not an encoding is refused, and never harms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfs.engine.codec import (
    AutoCodec,
    Codec,
    CodecChoice,
    Layout,
    Share,
    decode,
    encode,
    layout_of,
    resolve,
)
from kvfs.engine.format import BLOCK, EXTENT_SIZE_MAX, FormatError, round_up

CODECS = st.sampled_from([Codec.ZSTD, Codec.PLANES])
ITEM_SIZES = st.sampled_from([1, 2, 3, 4, 8, 255])
ROW_ITEMS = st.sampled_from([1, 2, 7, 384, 100_000])
LENGTHS = st.one_of(
    st.integers(0, 64),
    st.integers(0, 3 * BLOCK),
    st.integers(-3, 3).map(lambda tail: 128 * 1024 + tail),
)


def bf16_gaussian(count: int, seed: int = 0) -> bytes:
    """`count` bfloat16 elements as a KV cache has them."""
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def sample(kind: str, length: int) -> bytes:
    random = np.random.default_rng(length)
    match kind:
        case "zeros":
            return bytes(length)
        case "random":
            return random.bytes(length)
        case "text":
            return (b"the quick brown fox " * (length // 20 + 1))[:length]
        case _:
            return bf16_gaussian(length // 2 + 1, length)[:length]


KINDS = st.sampled_from(["zeros", "random", "text", "bf16"])


@settings(max_examples=150, deadline=None)
@given(CODECS, ITEM_SIZES, ROW_ITEMS, KINDS, LENGTHS)
@example(Codec.PLANES, 2, 384, "bf16", 0)
@example(Codec.PLANES, 8, 3, "zeros", 2 * BLOCK + 5)
@example(Codec.PLANES, 255, 1, "text", EXTENT_SIZE_MAX)
def test_what_is_encoded_comes_back(
    codec: Codec, item_size: int, row_items: int, kind: str, length: int
) -> None:
    data = sample(kind, length)
    encoded = encode(codec, Layout(item_size, row_items), memoryview(data))
    if encoded is None:
        return
    out = bytearray(b"\xaa" * length)
    decode(codec, item_size, memoryview(encoded), memoryview(out))
    assert bytes(out) == data


@settings(deadline=None)
@given(CODECS, ITEM_SIZES, KINDS, LENGTHS)
def test_what_saves_no_block_is_stored_as_it_is(
    codec: Codec, item_size: int, kind: str, length: int
) -> None:
    encoded = encode(codec, Layout(item_size, 384), memoryview(sample(kind, length)))
    if encoded is not None:
        assert round_up(len(encoded)) < round_up(length)


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.PLANES])
@pytest.mark.parametrize("length", [BLOCK + 1, 128 * 1024, EXTENT_SIZE_MAX])
def test_incompressible_data_is_stored_as_it_is(codec: Codec, length: int) -> None:
    assert encode(codec, Layout(2), memoryview(sample("random", length))) is None


@pytest.mark.parametrize("length", [0, 1, BLOCK])
def test_one_block_is_never_compressed(length: int) -> None:
    assert encode(Codec.ZSTD, Layout(1), memoryview(bytes(length))) is None


def test_raw_data_comes_back() -> None:
    data = sample("random", 5000)
    out = bytearray(5000)
    decode(Codec.NONE, 1, memoryview(data), memoryview(out))
    assert bytes(out) == data


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 255),
    st.integers(0, 255),
    st.binary(max_size=200),
    st.integers(0, 3 * BLOCK),
)
@example(Codec.PLANES, 2, b"", 0)
@example(Codec.PLANES, 2, b"", 1)
@example(Codec.PLANES, 2, b"\0" * 8, 0)
@example(Codec.ZSTD, 1, b"", 0)
@example(Codec.ZSTD, 1, b"\x28\xb5\x2f\xfd\x00\x58\x01\x00\x00", 0)
@example(Codec.PLANES, 4, b"\xff\xff\xff\xff", 400)
def test_garbage_is_a_format_error(codec: int, item_size: int, stored: bytes, size: int) -> None:
    out = bytearray(size)
    try:
        decode(codec, item_size, memoryview(stored), memoryview(out))
    except FormatError:
        return
    assert codec in (Codec.NONE, Codec.ZSTD, Codec.PLANES)


@settings(max_examples=200, deadline=None)
@given(CODECS, st.sampled_from([2, 4]), st.data())
def test_cut_or_changed_bytes_never_raise_anything_else(
    codec: Codec, item_size: int, data: st.DataObject
) -> None:
    original = sample("bf16", 16 * BLOCK + 3)
    encoded = bytearray(encode(codec, Layout(item_size, 384), memoryview(original)) or b"")
    assert encoded
    at = data.draw(st.integers(0, len(encoded) - 1))
    if data.draw(st.booleans()):
        del encoded[at:]
    else:
        encoded[at] ^= data.draw(st.integers(1, 255))
    out = bytearray(len(original))
    # The checksum of what is stored finds changed bytes; here they must only not harm.
    try:
        decode(codec, item_size, memoryview(encoded), memoryview(out))
    except FormatError:
        return


@settings(deadline=None)
@given(CODECS, st.sampled_from([2, 4]), st.sampled_from([-1, 1, BLOCK]))
def test_another_size_than_was_encoded_is_a_format_error(
    codec: Codec, item_size: int, off: int
) -> None:
    encoded = encode(codec, Layout(item_size, 384), memoryview(sample("bf16", 32 * BLOCK)))
    assert encoded is not None
    with pytest.raises(FormatError):
        decode(codec, item_size, memoryview(encoded), memoryview(bytearray(32 * BLOCK + off)))


def test_a_size_that_lies_allocates_nothing() -> None:
    # A zstd frame that claims 2^40 bytes.
    lying = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(FormatError):
        decode(Codec.ZSTD, 1, memoryview(lying), memoryview(bytearray(10)))


def test_an_unknown_codec_is_a_format_error() -> None:
    with pytest.raises(FormatError, match="unknown"):
        decode(77, 1, memoryview(b"x"), memoryview(bytearray(1)))


@pytest.mark.parametrize("seed", range(3))
def test_byte_planes_shrink_bf16_well_and_plain_zstd_less(seed: int) -> None:
    data = bf16_gaussian(512 * 1024, seed)
    planes = encode(Codec.PLANES, Layout(2), memoryview(data))
    plain = encode(Codec.ZSTD, Layout(1), memoryview(data))
    assert planes is not None
    assert len(data) / len(planes) > 1.3
    assert len(planes) < len(plain or data)


def test_auto_compresses_while_the_device_is_slower_and_data_shrinks() -> None:
    auto = AutoCodec()
    assert auto.next_batch() is Share.LARGEST, "the first batch is a probe"
    assert auto.next_batch() is Share.NONE, "nothing is known yet"
    auto.saw_write(1000, 1.0)
    auto.saw_encode(3000, 2000, 1.0)
    assert auto.next_batch() is Share.ALL
    for _ in range(50):
        auto.saw_write(1_000_000, 1.0)
    assert auto.next_batch() is Share.NONE, "now the device is faster than the encoder"
    auto.space_is_short = True
    assert auto.next_batch() is Share.ALL
    for _ in range(50):
        auto.saw_encode(1000, 1000, 1.0)
    assert auto.next_batch() is Share.NONE, "it would save nothing"
    shares = [auto.next_batch() for _ in range(2 * AutoCodec.PROBE_INTERVAL)]
    assert shares.count(Share.LARGEST) == 2, "one batch in so many finds out if that is still so"
    assert Share.ALL not in shares


@pytest.mark.parametrize(
    ("choice", "item_size", "compresses", "expected"),
    [
        (CodecChoice.NONE, 2, True, Codec.NONE),
        (CodecChoice.AUTO, 2, False, Codec.NONE),
        (CodecChoice.AUTO, 2, True, Codec.PLANES),
        (CodecChoice.AUTO, 1, True, Codec.ZSTD),
        (CodecChoice.ZSTD, 2, False, Codec.ZSTD),
        (CodecChoice.PLANES, 2, False, Codec.PLANES),
        (CodecChoice.PLANES, 1, False, Codec.ZSTD),
    ],
)
def test_the_codec_follows_choice_and_element_size(
    choice: CodecChoice, item_size: int, compresses: bool, expected: Codec
) -> None:
    assert resolve(choice, Layout(item_size), auto_compresses=compresses) == expected


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        (None, None, Layout(1, 1)),
        (b"bfloat16", b"2,3,64", Layout(2, 384)),
        (b"float32", None, Layout(4, 1)),
        (b"nonsense", b"2,x", Layout(1, 1)),
        (b"\xff", b"0", Layout(1, 1)),
        (b"float16", b"99999999,99999999", Layout(2, 1)),
    ],
)
def test_the_layout_is_what_the_attributes_say_and_single_bytes_otherwise(
    dtype: bytes | None, shape: bytes | None, expected: Layout
) -> None:
    assert layout_of(dtype, shape) == expected
