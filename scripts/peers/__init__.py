"""What `scripts/compare_peers.py` is made of.

Host side: `weights`, `prompts`, `contestants`, `worker_process`, `pairing`, `works`, `report`, `plots`.
Worker side: `protocol` and `driver`, which need nothing but the standard library because they also run in the peers'
environments, and one `*_worker.py` for each engine.
"""
