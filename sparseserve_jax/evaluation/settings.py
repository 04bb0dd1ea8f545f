"""`Setting`: what an evaluation compares, i.e. how decode chooses blocks and how prompts and KV are treated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

from sparseserve_jax.config import SELECTION_METHODS, KVDType, SelectionMethod

DENSE = "dense"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table.

    Attributes:
        budget_tokens: that a decode step attends to; None = dense.
        method: how blocks are selected; None = dense.
        prefill_sparsity / kv_dtype: as in `EngineConfig`; of a whole engine, so each pair has prefills of its own.
    """

    budget_tokens: int | None = None
    method: SelectionMethod | None = None
    prefill_sparsity: float | None = None
    kv_dtype: KVDType | None = None

    def __post_init__(self) -> None:
        assert (self.budget_tokens is None) == (self.method is None)

    @property
    def name(self) -> str:
        """For tables: `dense`, `cuboid-mean 1024`, `quest 512, prefill 0.995, int8 KV`."""
        parts = [DENSE if self.method is None else f"{self.method} {self.budget_tokens}"]
        if self.prefill_sparsity is not None:
            parts.append(f"prefill {self.prefill_sparsity:g}")
        if self.kv_dtype is not None:
            parts.append(f"{self.kv_dtype} KV")
        return ", ".join(parts)

    @property
    def file_stem(self) -> str:
        """For names of files: `cuboid-mean-1024`."""
        return self.name.replace(", ", "_").replace(" ", "-")

    @property
    def is_reference(self) -> bool:
        """Whether the others are compared with this one: dense decode and prefill, unquantised KV."""
        return self == Setting()


def parse_settings(
    budgets: str, methods: str, prefill_sparsity: str = DENSE, kv_dtype: str = "default"
) -> list[Setting]:
    """All combinations; dense ones first, once for each engine.

    Args:
        budgets: tokens, or `dense`, by comma: `dense,1024,2048`.
        methods: by comma; one may bring budgets of its own: `cuboid-mean,quest:1024+2048`.
        prefill_sparsity: shares, or `dense`, by comma.
        kv_dtype: `default` or `int8`, by comma.

    Raises:
        ValueError: a part is not understood; it is named.
    """
    shared = [None if part == DENSE else _whole("budgets", part) for part in _parts("budgets", budgets)]
    decode: list[tuple[int | None, SelectionMethod | None]] = [(None, None)] if None in shared else []
    for part in _parts("methods", methods):
        name, own, asked = part.partition(":")
        if name not in SELECTION_METHODS:
            raise ValueError(f"methods: {name!r} is not one of {', '.join(SELECTION_METHODS)}")
        tokens = [_whole(f"methods: {name}", one) for one in asked.split("+")] if own else shared
        method = cast(SelectionMethod, name)
        decode.extend((budget, method) for budget in tokens if budget is not None)
    shares = [None if part == DENSE else _share(part) for part in _parts("prefill_sparsity", prefill_sparsity)]
    dtypes: list[KVDType | None] = []
    for part in _parts("kv_dtype", kv_dtype):
        if part not in ("default", "int8"):
            raise ValueError(f"kv_dtype: {part!r} is not one of default, int8")
        dtypes.append(None if part == "default" else cast(KVDType, part))
    settings = [
        Setting(budget_tokens=budget, method=method, prefill_sparsity=share, kv_dtype=dtype)
        for share in shares
        for dtype in dtypes
        for budget, method in decode
    ]
    return list(dict.fromkeys(settings))


def by_engine(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Settings that one engine, and so one prefill of a prompt, can serve; in the order of their first."""
    groups: dict[tuple[float | None, str | None], list[Setting]] = {}
    for setting in settings:
        groups.setdefault((setting.prefill_sparsity, setting.kv_dtype), []).append(setting)
    return list(groups.values())


def _parts(what: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{what}: nothing is given; name at least one, by comma")
    return parts


def _whole(what: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(f"{what}: {text!r} is neither a number of tokens nor {DENSE!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"prefill_sparsity: {text!r} is neither a number nor {DENSE!r}") from error
