"""Runs the production scheduler in simulated time: no model, no JAX, no device.

| file | idea |
|---|---|
| `cost_model.py` | seconds of prefill, decode and loads on a machine and a model (`CostModel.a100_llama3_8b()`) |
| `residency.py` | how many selected blocks are on the device, from the grant and the working set |
| `selection_study.py` | overlap with the past, working sets and LRU hits of recorded selections |
| `simulate.py` | `simulate(trace, ...)`: arrivals in, `SimulationReport` out |

Answers what a scheduling policy changes, not how fast a machine is: shares of peak are assumptions, named as such.
"""
