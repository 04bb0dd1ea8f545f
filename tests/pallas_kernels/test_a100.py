"""Every kernel as machine code of an A100: what it needs, what it holds, what it moves. Runs on any CPU.

Needs three wheels beside jax (`make test` brings them); without them these tests are skipped and say so.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on

from host_offload.memory import abstract
from pallas_kernels import prefill_attention as prefill_kernel
from pallas_kernels.a100 import cases, target
from pallas_kernels.a100.cases import Case
from pallas_kernels.a100.compiler import CompiledProgram, compile_for_a100, missing_reason
from pallas_kernels.api import get_kernels
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.runner.abstract_programs import AbstractRunner, Program

KERNELS = get_kernels("pallas", "gpu")
EVERY_CASE = [pytest.param(case, id=f"{case.operation} {case.shape}") for case in cases.every_case()]
TRANSFERS = ("flash_h2d", "load_blocks", "save_blocks", "save_pieces")
GIB = 2**30


@pytest.fixture(autouse=True)
def shapes_in_place_of_arrays():
    """Run-time shape checks take arrays only."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


needs_compiler = pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or "")


def compile_case(case: Case) -> CompiledProgram:
    return compile_for_a100(case.function(KERNELS), *case.abstract_arguments())


@needs_compiler
@pytest.mark.parametrize("case", EVERY_CASE)
def test_machine_code(case: Case) -> None:
    program = compile_case(case)
    for kernel in program.kernels.values():
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_memory_bytes <= target.SHARED_MEMORY_OPTIN
        assert kernel.programs_per_sm >= (2 if kernel.name == "decode_attention" else 1), kernel
    check_launches(case, program.launches)
    if "attention" in case.operation:
        assert program.temp_bytes < case.arrays[1].nbytes / 2  # a pool made anew would be there
    updated = sum(case.arrays[index].nbytes for index in case.in_place)
    assert program.alias_bytes + program.host_alias_bytes == updated
    if case.in_place:
        assert program.temp_bytes == program.host_temp_bytes == 0
    in_host_memory = sum(case.arrays[index].nbytes for index in case.in_host_memory)
    assert program.host_argument_bytes == in_host_memory
    for index in case.in_host_memory:
        assert not program.copies_of(case.arrays[index].shape)
    check_instructions(case, program)


def check_launches(case: Case, launches: tuple[str, ...]) -> None:
    """Each operation is one kernel, some with one more that merges; nothing copies or pads in between."""
    if case.operation == "decode_attention":
        assert launches[0] == "decode_attention" and len(launches) <= 2  # XLA merges the splits
    elif case.operation == "score_blocks" and not case.fixed["per_query_head"]:
        assert launches == ("score_blocks", "merge_scores")
    elif case.operation == "select_blocks" and case.arrays[0].shape[-1] > 4096:
        assert launches == ("select_blocks", "select_blocks__1")  # of chunks, then of their best
    else:
        assert launches == (case.operation,)


def check_instructions(case: Case, program: CompiledProgram) -> None:
    """Tensor cores, asynchronous copies and 16-byte accesses where they were designed to be."""
    counts = program.kernels[case.operation].instructions
    if case.operation in ("decode_attention", "prefill_attention", "score_blocks"):
        dtype = case.arrays[1].dtype
        assert (counts.get("mma.sync", 0) > 0) == (dtype != np.float32)
        if case.operation != "score_blocks":
            assert counts.get("cp.async.cg", 0) > 0
    if case.operation in (*TRANSFERS, "append_blocks"):
        assert counts.get("ld.global.v4", 0) > 0
        assert counts["ld.global.v4"] == counts["st.global.v4"]


def bytes_of(case: Case) -> dict[str, int]:
    """By kernel: bytes that loads and stores ask for."""
    return {traffic.name: case.bytes_requested(traffic) for traffic in case.traffic()}


@pytest.mark.parametrize(
    "case",
    [
        cases.decode_attention(num_seqs=1, num_kv_heads=4),
        cases.decode_attention(num_seqs=1, num_kv_heads=4, group=1),
        cases.decode_attention(num_seqs=1, num_kv_heads=2, group=8),
        cases.decode_attention(num_seqs=1, num_kv_heads=3, group=3, head_dim=64),
        cases.decode_attention(num_seqs=1, num_kv_heads=2, dtype="int8"),
    ],
    ids=lambda case: case.shape,
)
def test_decode_attention_moves_the_selected_blocks_and_little_else(case: Case) -> None:
    piece = case.arrays[1][0, 0].nbytes
    blocks = case.arrays[2].size * piece
    moved = bytes_of(case)
    assert blocks <= moved["decode_attention"]
    assert sum(moved.values()) <= 1.05 * blocks


@pytest.mark.parametrize("skipped", ["none", "half"])
def test_decode_attention_does_not_read_what_does_not_count(skipped: str) -> None:
    case = cases.decode_attention(num_seqs=1, num_kv_heads=2)
    num_valid = case.arrays[3].copy()
    if skipped == "half":
        num_valid[:, :, ::2] = 0
    case = dataclasses.replace(case, arrays=(*case.arrays[:3], num_valid, case.arrays[4]))
    blocks = int((num_valid > 0).sum()) * case.arrays[1][0, 0].nbytes
    (traffic,) = case.traffic()
    assert blocks <= traffic.loaded_bytes <= 1.02 * blocks


@pytest.mark.parametrize(
    ("head_dim", "group", "bound"),
    [
        (128, 1, 1.05), (128, 4, 1.05), (256, 4, 1.05),
        # Raw scores, 4 bytes a query head, against small digests: docs/kernels.md.
        (128, 8, 1.08), (64, 3, 1.07), (64, 8, 1.15),
    ],
)  # fmt: skip
def test_scoring_moves_the_digests_and_little_else(head_dim: int, group: int, bound: float) -> None:
    case = cases.score_blocks(num_seqs=1, head_dim=head_dim, group=group)
    digests = case.arrays[1][1:].nbytes
    moved = bytes_of(case)
    assert digests * 0.99 <= moved["score_blocks"] <= bound * digests


@pytest.mark.parametrize("case", list(cases.transfers()), ids=lambda case: f"{case.operation} {case.shape}")
def test_transfers_move_each_piece_once(case: Case) -> None:
    (traffic,) = case.traffic()
    assert traffic.stored_bytes == case.pcie_bytes_minimum
    table = traffic.loaded_bytes - traffic.stored_bytes
    assert table <= 0.01 * traffic.stored_bytes


def test_the_meter_sees_a_second_read() -> None:
    """A kernel that read everything twice would not pass."""
    case = cases.decode_attention(num_seqs=1, num_kv_heads=1)
    blocks = case.arrays[2].size * case.arrays[1][0, 0].nbytes
    ids = np.concatenate([case.arrays[2]] * 2, axis=-1)
    twice = dataclasses.replace(case, arrays=(*case.arrays[:2], ids, np.full_like(ids, 32), None))
    assert sum(bytes_of(twice).values()) >= 2 * blocks


# --- the checks themselves -------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("flat", [False, True])
def test_a_copy_of_a_pool_is_seen(flat: bool) -> None:
    """Of a pool that is updated but not donated, and of one that is flat when it is copied."""
    pool = np.zeros((9, 2, 2, 32, 64), np.float32)

    def update(pool):
        whole = jax.lax.optimization_barrier(pool.reshape(-1, 64)) if flat else pool
        return whole.at[1].set(1.0), whole

    program = compile_for_a100(jax.jit(update), abstract(pool))
    assert program.copies_of(pool.shape)
    assert not program.copies_of((3, *pool.shape[1:]))


@needs_compiler
def test_work_for_the_host_is_seen() -> None:
    def on_host(x):
        with compute_on("device_host"):
            y = x * 2
        return y + 1

    program = compile_for_a100(jax.jit(on_host), abstract(np.ones((8, 128), np.float32)))
    assert program.host_calls()


@needs_compiler
def test_spills_are_seen(monkeypatch) -> None:
    monkeypatch.setitem(prefill_kernel._BF16, 128, dataclasses.replace(prefill_kernel._BF16[128], num_warps=2))
    jax.clear_caches()
    program = compile_case(cases.prefill_attention())
    assert program.kernels["prefill_attention"].spill_bytes > 0
    jax.clear_caches()


# --- whole steps -----------------------------------------------------------------------------------------------------


def llama(num_layers: int, *, num_kv_heads: int = 8, vocab_size: int = 128256, intermediate_size: int = 14336):
    return ModelConfig(
        name="llama", vocab_size=vocab_size, hidden_size=4096, intermediate_size=intermediate_size,
        num_layers=num_layers, num_q_heads=32, num_kv_heads=num_kv_heads, head_dim=128,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=5e5,
    )  # fmt: skip


def lwm(num_layers: int) -> ModelConfig:
    return llama(num_layers, num_kv_heads=32, vocab_size=32000, intermediate_size=11008)


@functools.cache
def runner(model: ModelConfig, tiers: str) -> AbstractRunner:
    config = EngineConfig(
        kv_tiers=tiers, max_model_len=32768, max_num_seqs=8, max_num_batched_tokens=32768, num_dense_layers=1
    )
    return AbstractRunner(model, config, device_bytes=20 * GIB, host_bytes=40 * GIB, platform="gpu")


def compile_step(program: Program) -> CompiledProgram:
    return compile_for_a100(program.function, *program.args, **program.kwargs)


def nbytes(arrays) -> int:
    return sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in arrays)


@needs_compiler
@pytest.mark.parametrize(
    ("model", "tiers"),
    [
        pytest.param(llama(3), "tiered", id="llama-3-8b, 3 layers, tiered"),
        pytest.param(llama(3), "unified", id="llama-3-8b, 3 layers, unified"),
        pytest.param(lwm(3), "tiered", id="lwm-7b, 3 layers, tiered"),
        pytest.param(llama(32), "tiered", id="llama-3-8b, tiered", marks=pytest.mark.slow),
        pytest.param(lwm(32), "tiered", id="lwm-7b, tiered", marks=pytest.mark.slow),
        pytest.param(lwm(32), "unified", id="lwm-7b, unified", marks=pytest.mark.slow),
    ],
)
def test_the_decode_step_of_a_whole_model(model: ModelConfig, tiers: str) -> None:
    """KV is updated in place, nothing copies a pool, the host pool is read where it lies, the host is not called."""
    whole = runner(model, tiers)
    program = compile_step(whole.decode_step(8, 32768))
    state = whole.state
    arrays = (*state.pools, *state.digests, *state.resident, *state.last_selected)
    assert program.alias_bytes >= nbytes(arrays)
    assert program.temp_bytes < 32 * 2**20
    assert program.host_temp_bytes == 0
    for array in (*arrays, *whole.host_pools):
        assert not program.copies_of(array.shape)
    sparse = whole.host_pools[whole.layout.num_dense_layers :]
    assert program.host_argument_bytes == nbytes(sparse)
    assert not program.host_calls()
    ours = [name.split("__")[0] for name in program.launches]
    for name in ("score_blocks", "select_blocks", *(("match_slots", "flash_h2d") if tiers == "tiered" else ())):
        assert ours.count(name) == model.num_layers - 1
    for name in ("append_tokens", "decode_attention"):
        assert ours.count(name) == model.num_layers
    assert all(kernel.spill_bytes == 0 for kernel in program.kernels.values())


@needs_compiler
@pytest.mark.parametrize("model", [llama(2), lwm(2)], ids=["llama-3-8b", "lwm-7b"])
def test_one_layer_of_prefill_at_32k(model: ModelConfig) -> None:
    step = runner(model, "tiered").prefill_layer(32768)
    program = compile_step(step)
    _, hidden, _, staging, (digests,), *_ = step.args
    assert program.alias_bytes >= nbytes((hidden, staging, digests))
    assert not program.copies_of(staging.shape) and not program.copies_of(digests.shape)
    assert not program.host_calls()
    assert program.temp_bytes < 4 * nbytes([hidden])  # queries, keys and values in float32 are the most
    assert [name for name in program.launches if "attention" in name] == ["prefill_attention"]


@needs_compiler
def test_saving_is_in_place_and_needs_no_room() -> None:
    whole = runner(llama(3), "tiered")
    for step, pools in (
        (whole.save_newest(8), whole.host_pools),
        (whole.save_layer(32768), whole.host_pools[-1:]),
    ):
        program = compile_step(step)
        assert program.host_alias_bytes == nbytes(pools)
        assert program.temp_bytes < 2**20 and program.host_temp_bytes == 0
        assert not program.copies_of(pools[0].shape)
