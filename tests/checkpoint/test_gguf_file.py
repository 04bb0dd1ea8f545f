"""The GGUF container against the reader of the gguf package, and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseserve_jax.checkpoint.embedded import find_embedded
from sparseserve_jax.checkpoint.gguf_file import GGUFFile, read_gguf
from tests.checkpoint.test_gguf_source import write_gguf


def assert_same_as_package(found: GGUFFile, path: Path) -> None:
    reader = gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert found.fields == expected
    assert list(found.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = found.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.quantization == tensor.tensor_type
        np.testing.assert_array_equal(mine.data, tensor.data)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_same_as_the_package(tmp_path: Path, kind: str) -> None:
    fields = {"a.text": "é", "a.flag": True, "a.real": 0.5}
    write_gguf(tmp_path / "a.gguf", quantization=gguf.GGMLQuantizationType[kind], fields=fields, alignment=64)
    assert_same_as_package(read_gguf(tmp_path / "a.gguf"), tmp_path / "a.gguf")


def test_same_as_the_package_on_the_default_model() -> None:
    try:
        path = find_embedded()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert_same_as_package(read_gguf(path), path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    write_gguf(path)
    return path.with_name("damaged.gguf"), path.read_bytes()


@settings(deadline=None)
@given(data=st.data())
def test_truncated_anywhere(whole: tuple[Path, bytes], data: st.DataObject) -> None:
    path, content = whole
    path.write_bytes(content[: data.draw(st.integers(1, len(content) - 33))])  # the end may be padding
    with pytest.raises(ValueError, match=r"damaged\.gguf is truncated or no GGUF file"):
        read_gguf(path)


@settings(deadline=None)
@given(data=st.data())
def test_damaged_headers_raise_nothing_but_value_errors(whole: tuple[Path, bytes], data: st.DataObject) -> None:
    path, content = whole
    position = data.draw(st.integers(0, 8000))
    damaged = bytearray(content)
    damaged[position : position + 8] = data.draw(st.binary(min_size=8, max_size=8) | st.just(b"\xff" * 8))
    path.write_bytes(damaged)
    try:
        read_gguf(path)
    except ValueError as error:
        assert "damaged.gguf" in str(error)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions_are_refused(whole: tuple[Path, bytes], version: int) -> None:
    path, content = whole
    path.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
    with pytest.raises(ValueError, match=f"version {version} is not supported"):
        read_gguf(path)
