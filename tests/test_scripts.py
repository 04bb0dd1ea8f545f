"""The scripts run: small settings, figures in range."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.a100 import cases
from pallas_kernels.a100.compiler import missing_reason
from pallas_kernels.api import get_kernels
from sparseserve_jax.models.config import ModelConfig

SCRIPTS = Path(__file__).parent.parent / "scripts"
SHAPE = ModelConfig(
    name="tiny", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_q_heads=6, num_kv_heads=2,
    head_dim=32, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["selection_quality.py"])
    return runpy.run_path(str(SCRIPTS / "selection_quality.py"))["_quality"]


@pytest.mark.slow
def test_selection_quality_measures_what_it_says(quality):
    """With a few hot blocks the digests find them; the newest blocks alone do not; a covering budget keeps all."""
    rng = np.random.default_rng(0)
    num_blocks, block_size = 64, 16
    q = rng.standard_normal((4, 6, 32)).astype(np.float32)
    pool = rng.standard_normal((num_blocks + 1, 2, 2, block_size, 32)).astype(np.float32)
    for head in range(2):
        for block in (7, 20, 33):
            pool[block + 1, head, 0] += 2.0 * q[:, head * 3 : head * 3 + 3].mean((0, 1))
    positions = jnp.asarray(num_blocks * block_size - 4 + np.arange(4))
    result = quality(
        SHAPE, get_kernels("reference", "cpu"), jnp.asarray(q), jnp.asarray(pool), positions, (128, 1024), 32**-0.5
    )
    values = {key: np.asarray(value) for key, value in result.items()}
    assert values[128, "cuboid-mean"][0] > values[128, "newest"][0] + 0.05
    assert values[128, "oracle"][0] >= values[128, "cuboid-mean"][0] - 1e-6
    assert values[128, "cuboid-mean, per query head"][0] >= values[128, "cuboid-mean"][0] - 0.01
    for method in ("cuboid-mean", "quest", "mean", "newest", "oracle"):
        np.testing.assert_allclose(values[1024, method], [1.0, 0.0], atol=1e-5)


def run_main(script: str, monkeypatch, changed: dict[str, object] | None = None, **options) -> None:
    """The script's main with its options; `changed` replaces names of the module first."""
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.syspath_prepend(str(SCRIPTS))  # where a script's own modules are
    module = runpy.run_path(str(SCRIPTS / script))
    module["main"].__globals__.update(changed or {})
    module["main"](**options)


@pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or "")
def test_compile_report_writes_what_others_read(monkeypatch, tmp_path):
    small = [
        cases.decode_attention(num_seqs=1, num_kv_heads=1, num_selected=16),
        *cases.transfers(num_seqs=1, num_kv_heads=1, num_selected=2),
    ]
    options = {"json_file": tmp_path / "report.json", "png_file": tmp_path / "roofline.png"}
    run_main(
        "compile_report.py", monkeypatch, {"reported_cases": lambda: iter(small)},
        layers=0, kernels_only=True, **options,
    )  # fmt: skip
    report = json.loads(options["json_file"].read_text())
    assert "sm_80" in report["target"]
    rows = {row["name"]: row for row in report["kernels"]}
    assert set(rows) == {"decode_attention", "flash_h2d", "load_blocks", "save_blocks", "save_pieces"}
    wanted = {
        "name", "shape", "registers", "spill_bytes", "shared_memory_bytes", "programs_per_sm", "mma", "async_copies",
        "bytes_moved", "bytes_minimum", "roofline_s",
    }  # fmt: skip
    for row in rows.values():
        assert wanted <= row.keys()
        assert row["bytes_moved"] >= row["bytes_minimum"] > 0
        assert row["spill_bytes"] == 0 and row["roofline_s"] > 0
    assert rows["flash_h2d"]["pcie_bytes"] == rows["flash_h2d"]["pcie_bytes_minimum"] == 2 * 2 * 32 * 128 // 2 * 2
    assert rows["flash_h2d"]["bound_by"] == "PCIe"
    assert rows["decode_attention"]["mma"] > 0
    assert options["png_file"].read_bytes().startswith(b"\x89PNG")


def test_bench_kernels_measures_limits_beside_kernels(monkeypatch, tmp_path):
    """Small: the read rate is that of caches here, so the shares say nothing; that they are there does."""
    file = tmp_path / "kernels.json"
    run_main(
        "bench_kernels.py", monkeypatch, names="select_blocks,append_tokens,score_blocks", seconds=0.01,
        read_megabytes=4, compare_reference=True, json_file=file,
    )  # fmt: skip
    report = json.loads(file.read_text())
    least, most = report["read_gbps_between"]
    assert 0 < least <= most == report["read_gbps"]
    assert report["bf16_peak_tflops"] > 0.001
    assert {row["name"] for row in report["kernels"]} == {"select_blocks", "append_tokens", "score_blocks"}
    assert len(report["kernels"]) == 9
    for row in report["kernels"]:
        assert row["seconds"] > 0 and row["reference_seconds"] > 0 and row["share_of_limit"] > 0 and row["shape"]


def test_bench_kernels_names_a_kernel_that_is_not_there(monkeypatch):
    with pytest.raises(SystemExit, match="--names attention_of_none: no kernel is called so"):
        run_main(
            "bench_kernels.py", monkeypatch, names="attention_of_none", seconds=0.01, read_megabytes=4,
            compare_reference=False, json_file=None,
        )  # fmt: skip


@pytest.mark.slow
def test_profile_serving_names_the_native_operations_of_every_layer(monkeypatch, tmp_path):
    """Dense layers and sparse ones, in dense and in sparse prefill, are programs of their own."""
    file = tmp_path / "profile.json"
    run_main(
        "profile_serving.py", monkeypatch, batch=1, context=4096, steps=1, budget=1024, prefill_sparsity=0.9,
        kv_dtype=None, model=None, json_file=file,
    )  # fmt: skip
    prefill = json.loads(file.read_text())["ms"]["prefill"]
    named = {name.removeprefix("prefill_layer: ") for name in prefill if name.startswith("prefill_layer: ")}
    assert named - {"other"} == {
        "linear", "prefill_attention", "select_key_tiles", "rms_norm", "split_and_rotate", "make_blocks",
        "append_blocks",
    }  # fmt: skip
    assert prefill["prefill_layer: rms_norm"] < prefill["prefill_layer: linear"]


@pytest.mark.slow
def test_gpu_check_dry_run(monkeypatch, tmp_path):
    """Every part but the conformance suite, which runs here anyway."""
    file = tmp_path / "check.json"
    parts = "kernels,transfers,serving"
    run_main("gpu_check.py", monkeypatch, json_file=file, dry_run=True, budget_s=600.0, only=parts)
    report = json.loads(file.read_text())
    assert report["dry_run"] and not report["skipped"]
    assert {row["operation"] for row in report["kernels"]} >= {"decode_attention", "score_blocks", "flash_h2d"}
    assert all(row["seconds"] > 0 and row["roofline_s"] > 0 for row in report["kernels"])
    assert report["transfers"]["flash_h2d_gbps"] > 0
    assert report["serving"]["tiered"]["kernels"].startswith("pallas, interpreted")
    assert report["serving"]["tiered"]["blocks_loaded"] > 0
    assert report["serving"]["unified"]["same_tokens_as_tiered"] == 1.0


def test_gpu_check_without_a_gpu_says_so(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="no GPU: jax runs on cpu"):
        run_main(
            "gpu_check.py", monkeypatch, json_file=tmp_path / "x.json", dry_run=False, budget_s=1.0, only="kernels"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "kernel"}, "--only kernel: no such part; there are conformance, kernels"),
        ({"only": "kernels", "budget_s": 0.0}, "no time for: \\['kernels'\\]"),
        (
            {"only": "kernels", "json_file": Path("/nowhere/x.json")},
            "--json /nowhere/x.json: No such file or directory",
        ),
    ],
)
def test_gpu_check_that_checks_nothing_fails(monkeypatch, tmp_path, options, message):
    given = {"json_file": tmp_path / "x.json", "dry_run": True, "budget_s": 60.0} | options
    with pytest.raises(SystemExit, match=message):
        run_main("gpu_check.py", monkeypatch, **given)


@pytest.mark.gpu
def test_gpu_check(monkeypatch, tmp_path):
    options = {"dry_run": False, "budget_s": 350.0, "only": "conformance,kernels,transfers,serving"}
    run_main("gpu_check.py", monkeypatch, json_file=tmp_path / "check.json", **options)


@pytest.mark.slow
def test_sparse_prefill_keeps_real_attention(monkeypatch, tmp_path):
    """At the threshold that docs/performance.md recommends."""
    table = tmp_path / "quality.json"
    run_main(
        "prefill_quality.py", monkeypatch, text=None, num_tokens=4096, thresholds="0.9,0.98,1", dense_tokens=0,
        layer_step=9, json_file=table,
    )  # fmt: skip
    rows = {row["threshold"]: row for row in json.loads(table.read_text())["rows"]}
    assert rows["1"]["mass"] == rows["1"]["density"] == 1.0
    assert rows["0.98"]["mass"] >= 0.98
    assert rows["0.9"]["mass"] < rows["0.98"]["mass"]
    assert rows["0.9"]["density"] < rows["0.98"]["density"] < 0.9
    assert rows["best"]["mass"] >= 0.98
    assert rows["best"]["density"] < rows["0.98"]["density"]
