"""The rules that no single module can keep alone: imports point one way, and who may touch devices and memory kinds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUR_PACKAGES = ("sparseserve_jax", "pallas_kernels", "cpu_kernels", "host_offload", "scripts", "tests")

# A module may import from its own row and from the rows it names. Prefixes; the longest that fits a module counts.
ENGINE = "sparseserve_jax."
CONTRACTS = (ENGINE + "config", ENGINE + "request", ENGINE + "plan", ENGINE + "timeline")
CACHE = (*CONTRACTS, ENGINE + "cache")
SCHEDULER = (*CACHE, ENGINE + "scheduler")
KERNELS = ("pallas_kernels", "cpu_kernels")
MODELS = (*CACHE, *KERNELS, "host_offload", ENGINE + "models")
SAMPLING = (*CONTRACTS, ENGINE + "sampling", ENGINE + "models")
TEXT = (ENGINE + "text",)
CHECKPOINT = (ENGINE + "checkpoint", ENGINE + "models.config", ENGINE + "models.rope", ENGINE + "text")
RUNNER = (*MODELS, *SAMPLING, ENGINE + "runner")
EVERYTHING_BELOW_API = (
    *SCHEDULER, *RUNNER, *TEXT, *CHECKPOINT, ENGINE + "output", ENGINE + "validation", ENGINE + "info",
    ENGINE + "compilation_cache", ENGINE + "recovery", ENGINE + "engine",
)  # fmt: skip
ALLOWED: dict[str, tuple[str, ...]] = {
    ENGINE + "config": CONTRACTS,
    ENGINE + "request": CONTRACTS,
    ENGINE + "plan": CONTRACTS,
    ENGINE + "timeline": CONTRACTS,
    ENGINE + "percentiles": (),
    ENGINE + "provenance": (),
    ENGINE + "load_generator": (ENGINE + "load_generator", ENGINE + "percentiles", ENGINE + "provenance"),
    ENGINE + "validation": (*CONTRACTS, ENGINE + "validation"),
    ENGINE + "recovery": (ENGINE + "recovery",),
    ENGINE + "output": (*CONTRACTS, *TEXT, ENGINE + "output"),
    ENGINE + "selection_record": (ENGINE + "request",),
    ENGINE + "cache": CACHE,
    ENGINE + "scheduler": SCHEDULER,
    ENGINE + "simulator": (*SCHEDULER, ENGINE + "simulator", ENGINE + "percentiles"),
    ENGINE + "text": TEXT,
    ENGINE + "models": MODELS,
    ENGINE + "sampling": SAMPLING,
    ENGINE + "checkpoint": CHECKPOINT,
    ENGINE + "runner": RUNNER,
    "pallas_kernels": (*KERNELS, "host_offload"),
    "cpu_kernels": (*KERNELS, "host_offload"),
    "host_offload": ("host_offload",),
    ENGINE + "info": EVERYTHING_BELOW_API,
    ENGINE + "engine": EVERYTHING_BELOW_API,
    ENGINE + "evaluation": (*EVERYTHING_BELOW_API, ENGINE + "evaluation", ENGINE + "provenance"),
    ENGINE + "server": (*EVERYTHING_BELOW_API, ENGINE + "server", ENGINE + "provenance"),
}
NO_JAX = tuple(
    ENGINE + name
    for name in (
        "config",
        "request",
        "plan",
        "timeline",
        "cache",
        "scheduler",
        "simulator",
        "output",
        "selection_record",
        "validation",
        "text",
        "evaluation",
        "percentiles",
        "provenance",
        "load_generator",
        "recovery",
    )
)


def _modules() -> dict[str, Path]:
    found = {}
    for package in ("sparseserve_jax", "pallas_kernels", "cpu_kernels", "host_offload"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports(path: Path) -> set[str]:
    """Full names of all imported modules, also of imports inside functions and under TYPE_CHECKING."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in MODULES)
    return names


def _is_under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def _is_package_of(module: str, prefixes: tuple[str, ...]) -> bool:
    """`from sparseserve_jax.runner import buckets` also names the package, which must hold nothing but a docstring."""
    return any(prefix.startswith(module + ".") for prefix in prefixes)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module: str) -> None:
    rows = [prefix for prefix in ALLOWED if _is_under(module, prefix)]
    ours = {name for name in _imports(MODULES[module]) if name.split(".")[0] in OUR_PACKAGES}
    assert not any(name.split(".")[0] in ("scripts", "tests") for name in ours), f"{module} imports scripts or tests"
    if not rows:
        return  # api, cli and the package itself may import everything else
    allowed = ALLOWED[max(rows, key=len)]
    wrong = [
        name for name in ours
        if not any(_is_under(name, prefix) for prefix in allowed) and not _is_package_of(name, allowed)
    ]  # fmt: skip
    assert not wrong, f"{module} must not import {sorted(wrong)}"


@pytest.mark.parametrize("module", sorted(name for name in MODULES if any(_is_under(name, p) for p in NO_JAX)))
def test_no_jax(module: str) -> None:
    wrong = {name for name in _imports(MODULES[module]) if name.split(".")[0] in ("jax", "jaxlib", "flax", "jaxtyping")}
    assert not wrong, f"{module} must not import {sorted(wrong)}"


def _names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    constants = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return attributes | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | constants


@pytest.mark.parametrize("module", sorted(name for name in MODULES if not _is_under(name, "host_offload")))
def test_only_host_offload_moves_arrays_between_memories(module: str) -> None:
    memory = {"device_put", "memory_kind", "pinned_host", "unpinned_host", "with_memory_kind"}
    assert not memory & _names_in(MODULES[module])


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nobody_waits_for_the_device_in_passing(module: str) -> None:
    if module == "cpu_kernels.huge_pages":  # once, at start: an address is asked for when the array is there
        return
    assert "block_until_ready" not in _names_in(MODULES[module])


@pytest.mark.parametrize("module", sorted(MODULES))
def test_environment_is_not_read_in_passing(module: str) -> None:
    if module in ("sparseserve_jax.compilation_cache", "cpu_kernels.loader"):
        return
    assert not {"environ", "getenv"} & _names_in(MODULES[module])


def test_names_say_what_a_module_holds() -> None:
    vague = {"utils", "common", "helpers", "misc"}
    assert not [name for name in MODULES if name.split(".")[-1] in vague]
