"""Memory, batch mates and prefill order must not show in the output (float32, a model with sharp attention)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sparseserve_jax import Engine, EngineConfig, Request, RequestOutput, SamplingParams
from tests.tiny_model import random_prompt, write_sharp_model

NEW_TOKENS = 24
BASE = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, record_selection=True,
    max_num_batched_tokens=512, max_model_len=1024, max_num_seqs=16, deterministic=True,
)  # fmt: skip
TIGHT_BYTES = 3_500_000
"""Device room for the dense layer's blocks of one sequence and about four selections of eight slots."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def requests():
    lengths = np.random.default_rng(5).integers(20, 900, 16)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [Request(prompt=random_prompt(int(n), i), sampling=params) for i, n in enumerate(lengths)]


@dataclasses.dataclass
class Run:
    outputs: list[RequestOutput]
    checksums: list[list[np.ndarray]]
    num_parks: int
    num_loads: int


def run(engine: Engine, requests: list[Request], at_once: int = 16) -> Run:
    """Serves and, just before each request ends, takes the checksums of its full blocks in the whole-sequence tier."""
    outputs: list[RequestOutput] = []
    checksums: list[list[np.ndarray]] = []
    for start in range(0, len(requests), at_once):
        ids = [engine.add_request(r) for r in requests[start : start + at_once]]
        last: dict[str, RequestOutput] = {}
        sums: dict[str, list[np.ndarray]] = {}
        names = {child: request_id for request_id in ids for child in engine._children[request_id]}
        while engine.has_unfinished():
            for output in engine.step():
                last[output.request_id] = output
            for child, request_id in names.items():
                if (
                    len(last.get(request_id, RequestOutput(request_id="", prompt_token_ids=[])).token_ids)
                    == NEW_TOKENS - 1
                ):
                    sums[request_id] = engine.runner.block_checksums(child)
                    check_resident_blocks(engine, child)
        outputs += [last[request_id] for request_id in ids]
        checksums += [sums[request_id] for request_id in ids]
    usage = engine.scheduler.pool_usage()
    assert all(pool.used == 0 for pool in usage.values())
    assert not engine.runner._sequences
    return Run(
        outputs, checksums, sum(o.metrics.num_parks for o in outputs), sum(o.metrics.blocks_loaded for o in outputs)
    )


def check_resident_blocks(engine: Engine, child: str) -> None:
    """What came back from the host is, bit for bit, what the host has."""
    runner, layout = engine.runner, engine.layout
    if not layout.tiered:
        return
    sequence = runner._sequences[child]
    num_full = sequence.num_computed // layout.block_size
    num_slots = runner._tables.num_slots[sequence.row]
    for index, table in enumerate(runner._state.resident):
        layer = layout.sparse_layers[index]
        host, device = np.asarray(runner._host_pools[layer]), np.asarray(runner._state.pools[layer])
        for head, held in enumerate(np.asarray(table)[sequence.row]):
            for slot, logical in enumerate(held[:num_slots]):
                if 0 <= logical < num_full:
                    here = device[runner._tables.slots[sequence.row, slot], head]
                    assert np.array_equal(here, host[sequence.block_ids[logical], head])


def assert_same(one: Run, other: Run, *, selection: bool = True) -> None:
    for a, b in zip(one.outputs, other.outputs, strict=True):
        assert a.token_ids == b.token_ids
        if selection:
            for x, y in zip(a.metrics.selected_block_ids, b.metrics.selected_block_ids, strict=True):
                np.testing.assert_array_equal(x, y)
    for x, y in zip(one.checksums, other.checksums, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def all_resident(model, requests):
    engine = Engine(model, BASE)
    return engine, run(engine, requests)


@pytest.mark.parametrize("at_once", [1, 8])
def test_batch_size_does_not_show(all_resident, requests, at_once):
    engine, expected = all_resident
    assert_same(run(engine, requests, at_once), expected)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="fits-all"),
        pytest.param({"device_kv_bytes": TIGHT_BYTES}, id="working-sets"),
        pytest.param({"device_kv_bytes": TIGHT_BYTES, "batch_control": "none"}, id="no-control"),
    ],
)
def test_device_budget_does_not_show(model, all_resident, requests, changes):
    engine = Engine(model, dataclasses.replace(BASE, kv_tiers="tiered", **changes))
    got = run(engine, requests)
    assert got.num_loads > 0
    if changes:
        assert engine.runner.device_kv_bytes() <= TIGHT_BYTES
        assert got.num_parks > 0
        assert_same(run(engine, requests, 1), all_resident[1])
    assert_same(got, all_resident[1])


def test_one_working_set_is_enough(model, all_resident, requests):
    """The smallest budget that is accepted serves everybody, one at a time."""
    config = dataclasses.replace(BASE, kv_tiers="tiered", host_kv_bytes=6_000_000, device_kv_bytes=1)
    with pytest.raises(ValueError, match="device_kv_bytes=1 is smaller than one working set") as e:
        Engine(model, config)
    smallest = int(str(e.value).split("device_kv_bytes to at least ")[1].split(",")[0])
    engine = Engine(model, dataclasses.replace(config, device_kv_bytes=smallest))
    assert engine.layout.num_slots == engine.layout.min_grant_slots == 8
    assert_same(run(engine, requests), all_resident[1])


def test_dense_layers_anywhere(model, requests):
    """The first and the last layer sparse, one in the middle dense; requests are parked and come back."""
    config = dataclasses.replace(BASE, num_dense_layers=None, dense_layers=(2,))
    few = requests[:8]
    engine = Engine(model, config)
    assert any("; dense layers: 2 of 4" in line for line in engine.info.lines())
    expected = run(engine, few)
    got = run(Engine(model, dataclasses.replace(config, kv_tiers="tiered", device_kv_bytes=TIGHT_BYTES)), few)
    assert got.num_loads > 0 and got.num_parks > 0
    assert_same(got, expected)


def test_selection_per_query_head(model, requests):
    config = dataclasses.replace(BASE, selection_granularity="query_head", max_num_seqs=4)
    few = requests[:4]
    expected = run(Engine(model, config), few, 4)
    tiered = dataclasses.replace(config, kv_tiers="tiered")
    assert_same(run(Engine(model, tiered), few, 4), expected)


def test_budget_over_the_context_is_dense(model, requests):
    few = requests[:6]
    dense = run(Engine(model, dataclasses.replace(BASE, sparse_budget_tokens=None)), few)
    covering = run(Engine(model, dataclasses.replace(BASE, sparse_budget_tokens=1024, kv_tiers="tiered")), few)
    assert [o.token_ids for o in dense.outputs] == [o.token_ids for o in covering.outputs]
    sparse = run(Engine(model, dataclasses.replace(BASE, sparse_budget_tokens=64)), few)
    assert [o.token_ids for o in dense.outputs] != [o.token_ids for o in sparse.outputs], "the budget has no effect"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"prefill": "chunked"}, id="chunked"),
        pytest.param(
            {"prefill": "chunked", "max_inject_tokens": 4 * 128, "kv_tiers": "tiered"}, id="chunked-tiered-128"
        ),
        pytest.param({"max_inject_tokens": 700}, id="layer-inside-chunks"),
        pytest.param({"max_inject_tokens": 700, "kv_tiers": "tiered"}, id="layer-inside-chunks-tiered"),
        pytest.param({"max_num_batched_tokens": 1024, "deterministic": False}, id="whole-and-packed"),
    ],
)
def test_prefill_order_does_not_show(model, all_resident, requests, changes: dict[str, Any]):
    few = requests[:8]
    engine = Engine(model, dataclasses.replace(BASE, **changes))
    got = run(engine, few, 8)
    for a, b in zip(got.outputs, all_resident[1].outputs, strict=False):
        assert a.token_ids == b.token_ids


def test_prefill_orders_give_equal_kv(model, requests):
    """Keys and values of every layer, read from the pools, to float rounding."""
    request = max(requests, key=lambda r: len(r.prompt))
    caches = []
    for changes in ({}, {"prefill": "chunked", "max_inject_tokens": 4 * 128}, {"max_inject_tokens": 700},
                    {"kv_tiers": "tiered"}):  # fmt: skip
        engine = Engine(model, dataclasses.replace(BASE, max_num_seqs=2, **changes))
        engine.add_request(request)
        while not any(output.token_ids for output in engine.step()):
            pass
        sequence = next(iter(engine.runner._sequences.values()))
        pools = engine.runner._host_pools or engine.runner._state.pools
        num_full = len(request.prompt) // engine.layout.block_size
        caches.append(np.stack([np.asarray(pool)[sequence.block_ids[:num_full]] for pool in pools]))
    for cache in caches[1:]:
        np.testing.assert_allclose(cache, caches[0], atol=2e-4, rtol=1e-4)
    np.testing.assert_array_equal(caches[3], caches[0])


def test_sampling_does_not_depend_on_batch_mates(all_resident, requests):
    engine, _ = all_resident
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    alone = engine.generate([dataclasses.replace(requests[3], sampling=params)])[0]
    mates = [dataclasses.replace(r, sampling=dataclasses.replace(params, seed=None, n=2)) for r in requests[4:8]]
    among = engine.generate([*mates, dataclasses.replace(requests[3], sampling=params)])[-1]
    assert alone.token_ids == among.token_ids
    assert len({tuple(o.token_ids) for o in engine.generate([dataclasses.replace(mates[0])])}) == 2
