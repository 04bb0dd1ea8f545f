"""Memory kinds: what the device offers, host pools in pinned memory, and moving small inputs to the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

PINNED_HOST = "pinned_host"


def host_sharding(device: jax.Device) -> SingleDeviceSharding:
    """The sharding of arrays in `device`'s pinned host memory.

    Raises:
        RuntimeError: the backend has no pinned host memory; names what it has.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if PINNED_HOST not in kinds:
        raise RuntimeError(
            f"kv_tiers='tiered' needs the memory kind {PINNED_HOST!r}, but {device.platform} offers {kinds}; "
            "use kv_tiers='unified' or a backend with pinned host memory (cpu, cuda)"
        )
    return SingleDeviceSharding(device, memory_kind=PINNED_HOST)


def allocate_host_pools(
    num_layers: int, shape: tuple[int, ...], dtype: jnp.dtype, device: jax.Device
) -> tuple[Array, ...]:
    """One zeroed pool a layer in pinned host memory: allocated once, at start, and only ever updated in place.

    `out_shardings` alone would place the array but leave its type in device memory, and the next jit would refuse to
    index it with host indices: the `device_put` is what types it. It passes through the device one layer at a time,
    so allocate host pools before device pools.
    """

    def make() -> Array:
        return jax.device_put(jnp.zeros(shape, dtype), jax.memory.Space.Host)

    make_pool = jax.jit(make, out_shardings=host_sharding(device))
    return tuple(make_pool() for _ in range(num_layers))


def to_device(inputs: Any) -> Any:
    """Copies small host inputs (a tree of NumPy arrays and scalars) to the device in one call.

    The arrays must be fresh: on the CPU backend the device array may alias them, so later writes would show through.
    """
    return jax.device_put(inputs)


def place(array: Any, device: jax.Device, *, in_host_memory: bool = False) -> Any:
    """A copy of one array on `device` or in its pinned host memory; None stays None (checks and measurements)."""
    sharding = host_sharding(device) if in_host_memory else SingleDeviceSharding(device)
    return None if array is None else jax.device_put(array, sharding)


def to_device_space(array: Array) -> Array:
    """Inside a jitted function: an array of any memory, in device memory.

    What is there already is not copied, what is in host memory is copied whole.
    """
    return jax.device_put(array, jax.memory.Space.Device)


def as_host_array(array: Array) -> Array:
    """Inside a jitted function: types the result of an in-place update of a host array as one in host memory.

    Nothing moves when it aliases the host array; without this jit would take it for a device array.
    """
    return jax.device_put(array, jax.memory.Space.Host)


def commit(tree: Any, device: jax.Device) -> Any:
    """The same arrays, bound to `device` (nothing is copied).

    Host pools are bound to it, so what a program returns that reads them is bound, too; arrays that begin unbound would
    make every such program compile twice.
    """
    return jax.device_put(tree, device)


def physical_memory_bytes(device: jax.Device) -> tuple[int, int]:
    """(device, host) bytes that are free now. On the CPU both are the same memory."""
    import psutil

    host = psutil.virtual_memory().available
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)), host
    return host, host


def abstract(tree: Any, memory_kind: str = "device") -> Any:
    """Shapes and dtypes of a tree as if its arrays lay in `memory_kind` ("device", "pinned_host"): to lower without
    allocating anything, on the CPU, whose devices have both kinds.
    """
    sharding = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind=memory_kind)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
