"""What the one who runs a server may set: `ServerSettings`."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

LogFormat = Literal["text", "json"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything that shapes the server around the engine.

    Attributes:
        served_model_names: names that requests may use; responses carry the first. () = the model's own name.
        api_keys: any of these opens everything; () = no key is needed. `/health` never needs one.
        max_waiting: continuations that may wait besides the `max_num_seqs` that can run; more get 429.
        max_body_bytes: larger bodies get 413.
        request_timeout_s: from arrival to the last token; then the request is aborted and gets 408. inf = never.
        drain_timeout_s: what running requests are given to finish after SIGTERM.
        grammar_timeout_s: for compiling a request's grammar.
        metrics_prefix: `sparseserve`, or `vllm` for existing dashboards.
        cors_origins: origins whose pages may call the server from a browser; () = none but its own.
        trust_request_chat_template: requests may bring a `chat_template` (it runs in the sandbox).
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 256
    max_body_bytes: int = 16 * 2**20
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    grammar_timeout_s: float = 5.0
    metrics_prefix: str = "sparseserve"
    cors_origins: tuple[str, ...] = ()
    trust_request_chat_template: bool = False

    def __post_init__(self) -> None:
        for name, low in (("max_waiting", 0), ("max_body_bytes", 1024)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        for name in ("request_timeout_s", "drain_timeout_s", "grammar_timeout_s"):
            value = getattr(self, name)
            if math.isnan(value) or value <= 0:
                raise ValueError(f"{name}={value} must be more than 0 seconds")
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ValueError(f"metrics_prefix={self.metrics_prefix!r} must be letters, digits and underscores")
        if any(not key or not key.isascii() or key.strip() != key for key in self.api_keys):
            raise ValueError("every API key must be ASCII text without spaces around it, and not empty")
        if any(not name for name in self.served_model_names):
            raise ValueError("a served model name must not be empty")
