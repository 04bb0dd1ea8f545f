"""Whatever happens in whatever order, every plan keeps the contract: a hypothesis state machine."""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduler.harness import Harness
from tests.scheduler.layouts import make_config, make_layout, make_request


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts and steps at random; the fake runner checks each plan."""

    @initialize(
        is_tiered=st.booleans(),
        prefill=st.sampled_from(["layer", "chunked"]),
        batch_control=st.sampled_from(["working-set", "none"]),
        deterministic=st.booleans(),
        max_inject_tokens=st.sampled_from([None, 1, 150, 600, 2000]),
        num_dense_layers=st.sampled_from([0, 1]),
        num_slots=st.sampled_from([4, 20, 32]),
        seed=st.integers(0, 1000),
    )
    def start(self, is_tiered, num_dense_layers, num_slots, seed, **settings):
        self.rng = random.Random(seed)
        config = make_config(kv_tiers="tiered" if is_tiered else "unified", **settings)
        layout = make_layout(num_dense_layers=num_dense_layers, num_blocks=160)
        if is_tiered:
            num_dense_blocks = 80 if num_dense_layers else 0
            layout = make_layout(
                tiered=True, num_dense_layers=num_dense_layers, num_blocks=160, num_slots=num_slots,
                num_dense_blocks=num_dense_blocks,
            )  # fmt: skip
        self.num_added = 0
        self.harness = Harness(
            config, layout, slots_of=lambda _: self.rng.randint(1, 24), ends=lambda _: self.rng.random() < 0.03
        )

    @rule(prompt=st.integers(1, 900), new=st.integers(1, 60), priority=st.sampled_from([0, 0, 0, -1, 1]))
    def add(self, prompt, new, priority):
        request = make_request(f"r{self.num_added}", prompt, new, arrival_s=self.num_added / 3, priority=priority)
        self.num_added += 1
        self.harness.add(request)

    @rule(prompt=st.integers(1, 120), count=st.integers(2, 10))
    def add_short_ones(self, prompt, count):
        for index in range(count):
            self.add(1 + (prompt * (index + 1)) % 120, 5, 0)

    @rule(prompt=st.integers(130, 400), new=st.integers(10, 60), count=st.integers(1, 4))
    def add_several(self, prompt, new, count):
        for _ in range(count):
            self.add(prompt, new, 0)

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.requests))))

    @rule(data=st.data())
    def step_with_an_abort_on_the_way(self, data):
        live = sorted(self.harness.requests)
        victim = data.draw(st.sampled_from(live)) if live else None
        self.harness.step(between=lambda: self.harness.abort(victim) if victim else None)

    @invariant()
    def both_sides_agree(self):
        if hasattr(self, "harness"):
            self.harness.check_usage()

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.run()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestScheduler = SchedulerMachine.TestCase
