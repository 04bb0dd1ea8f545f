"""`sparseserve bench`: load for any OpenAI-compatible server, and what its clients saw. Knows nothing of our engine.

| file | idea |
|---|---|
| `arrivals.py` | when requests come: Poisson, constant, bursts, all at once |
| `lengths.py` | how long prompts and answers are |
| `trace.py` | a recorded trace: times, lengths, shared prefixes by hash |
| `prompt_text.py` | text of a wanted number of tokens: seeded words, or a place of a file |
| `json_lines.py` | their files: a JSON object a line, mistakes named by line |
| `prompt_file.py` | prompts of the user's own, one a line |
| `workload.py` | all of these made into `PlannedRequest`s, before the clock starts |
| `server_sent_events.py` | the stream's framing, however it is cut into packets |
| `client.py` | one request: sent, streamed, timed; every way to fail has a name |
| `generator.py` | all requests at their times (open loop), under a limit of concurrency |
| `records.py` | `PlannedRequest` and `RequestRecord` |
| `summary.py` | percentiles, throughput, goodput, failures by kind |
| `report.py`, `plot.py` | JSON, the table, the picture |
| `measurement.py` | all of it in order, for one server |
| `command.py` | the command line |

Every time is measured twice: from when a request was sent, and from when it should have been. A server that makes its
clients wait is not flattered by the requests they could not send meanwhile (coordinated omission).
"""
