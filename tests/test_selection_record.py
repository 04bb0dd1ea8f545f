from __future__ import annotations

import numpy as np
import pytest

from sparseserve_jax.request import RequestMetrics, RequestOutput
from sparseserve_jax.selection_record import SelectionRecord


def output(request_id: str, num_tokens: int, widths: list[int], highest: int = 50) -> RequestOutput:
    """A step for each width, of 3 layers and 2 heads."""
    rng = np.random.default_rng(len(widths))
    steps: list[object] = [np.sort(rng.integers(0, highest, (3, 2, width)).astype(np.int32), -1) for width in widths]
    metrics = RequestMetrics(selected_block_ids=steps)
    return RequestOutput(request_id=request_id, prompt_token_ids=[0] * num_tokens, metrics=metrics)


@pytest.mark.parametrize(("highest", "dtype"), [(50, np.int16), (100_000, np.int32)])
def test_what_is_saved_is_loaded(tmp_path, highest, dtype):
    outputs = [output("a", 70, [4, 4, 6], highest), output("none", 9, []), output("b", 3, [6], highest)]
    record = SelectionRecord.of_outputs(outputs, block_size=32, layers=(2, 3), names=["qasper", "x", "qmsum"])
    record.save(tmp_path / "file.npz")
    again = SelectionRecord.load(tmp_path / "file.npz")
    assert (again.block_size, again.layers) == (32, (2, 3))
    assert [(r.name, r.prompt_tokens) for r in again.requests] == [("qasper", 70), ("qmsum", 3)]
    first = again.requests[0].selected
    assert (first.dtype, first.shape) == (dtype, (3, 3, 2, 6))
    for step, given in enumerate(outputs[0].metrics.selected_block_ids):
        ids = np.asarray(given)
        np.testing.assert_array_equal(first[step, ..., : ids.shape[-1]], ids)
        assert (first[step, ..., ids.shape[-1] :] == -1).all()
    assert again.requests[1].selected.shape == (1, 3, 2, 6)


def test_nothing_recorded():
    with pytest.raises(ValueError, match="none of 1 outputs has a selection; use record_selection=True"):
        SelectionRecord.of_outputs([output("a", 3, [])], block_size=32, layers=(2, 3))


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x05\x06" + bytes(18)])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="file is no record of selections"):
        SelectionRecord.load(tmp_path / "file")


def test_another_format_is_refused(tmp_path):
    np.savez(tmp_path / "new.npz", format=3)
    with pytest.raises(ValueError, match="format 3, this version reads 2"):
        SelectionRecord.load(tmp_path / "new.npz")
