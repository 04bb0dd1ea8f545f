"""What an A100 is to the compiler and to the roofline (A100-SXM4-40GB)."""

from __future__ import annotations

ARCHITECTURE = "sm_80"
MEMORY_BYTES_PER_S = 1555e9
BF16_FLOPS = 312e12
PCIE_BYTES_PER_S = 32e9
"""PCIe 4.0 x16 in one direction, before protocol overhead."""

NUM_SMS = 108
THREADS_PER_SM = 2048
WARPS_PER_SM = THREADS_PER_SM // 32
PROGRAMS_PER_SM = 32
REGISTERS_PER_SM = 65536
REGISTER_ALLOCATION = 256
"""Registers are given to a warp in units of this."""
SHARED_MEMORY_PER_SM = 167936
SHARED_MEMORY_OPTIN = 166912
"""The most one program may ask for."""
SHARED_MEMORY_RESERVED = 1024
"""Taken by the driver for every program."""
L2_BYTES = 40 * 2**20

TARGET_CONFIG = f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {SHARED_MEMORY_PER_SM}
  shared_memory_per_block_optin: {SHARED_MEMORY_OPTIN}
  threads_per_core_limit: {THREADS_PER_SM}
  core_count: {NUM_SMS}
  fpus_per_core: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(MEMORY_BYTES_PER_S)}
  l2_cache_size: {L2_BYTES}
  clock_rate_ghz: 1.41
  device_memory_size: 42331013120
  registers_per_core_limit: {REGISTERS_PER_SM}
  registers_per_block_limit: {REGISTERS_PER_SM}
  cuda_compute_capability {{ major: 8 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
"""
"""XLA's GpuTargetConfig in text form: what the compiler would ask the driver for."""


def programs_per_sm(*, threads: int, registers: int, shared_memory_bytes: int) -> int:
    """Programs of one kernel that an SM holds at once (CUDA occupancy rules for compute capability 8.0)."""
    warps = -(-threads // 32)
    registers_per_warp = -(-registers * 32 // REGISTER_ALLOCATION) * REGISTER_ALLOCATION
    limits = [
        PROGRAMS_PER_SM,
        WARPS_PER_SM // warps,
        SHARED_MEMORY_PER_SM // (shared_memory_bytes + SHARED_MEMORY_RESERVED),
    ]
    if registers_per_warp:
        limits.append(REGISTERS_PER_SM // registers_per_warp // warps)
    return min(limits)


def describe() -> str:
    """The target in one line, for reports."""
    return f"A100-SXM4-40GB ({ARCHITECTURE}): 1,555 GB/s, 312 TFLOP/s bf16, PCIe 32 GB/s"
