"""SparseServe-JAX: serving long-context LLMs with block-sparse attention and a tiered KV cache (arXiv 2509.24626)."""

from sparseserve_jax.api import serve
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.request import Request, RequestMetrics, RequestOutput, SamplingParams, Variant
from sparseserve_jax.validation import RequestError

__all__ = [
    "Engine",
    "EngineConfig",
    "Request",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Variant",
    "serve",
]
