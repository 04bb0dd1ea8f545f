"""Decides what each iteration does. Pure Python: no JAX, clock, thread, I/O or randomness; same inputs, same plan.

| file | idea | paper |
|---|---|---|
| `scheduler.py` | `Scheduler`: admission, one `StepPlan` per iteration, what its `StepResult` changes | section 3.1 |
| `request_state.py` | `SchedulerRequest` and its states | |
| `working_set.py` | how many device slots a decoding request needs | section 3.2, w = 12 steps |
| `batch_control.py` | who decodes in this iteration, with control and without | Algorithm 1, figure 15 |
| `device_room.py` | which slots they get, who is parked for it | |
| `prefill_plan.py` | prompts as chunks, packs and layer segments; the injection budget | section 3.3, figure 16 |

One iteration:

    plan = scheduler.schedule(now_s)      # admit, choose the decode batch, inject prefill work
    result = ...                          # the runner carries the plan out, or a cost model says what it costs
    scheduler.update(plan, result)        # tokens counted, working sets learnt, the finished freed

A request moves WAITING -> PREFILL -> (PARKED <-> RUNNING) -> FINISHED. On admission it gets a row and all the KV
blocks it can ever need, so that it never runs dry. In tiered mode it decodes only while it holds device slots (and
device blocks of the dense layers); a parked request keeps its KV on the host and resumes without recomputing.

Order is always priority (lower first), then arrival, then the order of `add_request`.
"""
