"""One small engine in device memory for about two working sets, and one server around it, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparseserve_jax import Engine, EngineConfig
from tests.server.running_server import RunningServer
from tests.tiny_model import write_sharp_model

CONFIG = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, max_num_batched_tokens=256,
    max_model_len=512, max_num_seqs=8, kv_tiers="tiered", device_kv_bytes=1_600_000, record_timeline=True,
)  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def engine(model) -> Engine:
    engine = Engine(model, CONFIG)
    for _ in engine.warm_up():
        pass
    return engine


@pytest.fixture(scope="module")
def server(engine) -> Iterator[RunningServer]:
    with RunningServer(engine) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def idle_afterwards(server) -> Iterator[None]:
    yield
    server.assert_idle()
