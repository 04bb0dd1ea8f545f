"""Block-sparse attention operations. `api` is the door; `reference` is plain XLA and runs on every platform."""
