"""Compiling jitted functions for an A100 on a machine without a GPU, and what the compiler made of them.

Needs the wheels of `make compile-report` (jax-cuda12-plugin, jax-cuda12-pjrt, nvidia-cuda-nvcc-cu12) beside jax, and
JAX_PLATFORMS=cpu. The route: lower for CUDA with CPU shardings, because those know memory kinds and a compile-only
client does not; then compile the StableHLO for the A100. Host memory arrives there as layout memory space `S(5)`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler as jax_compiler
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from host_offload.memory import abstract as abstract
from pallas_kernels.a100.target import ARCHITECTURE, NUM_SMS, TARGET_CONFIG, programs_per_sm

WHEELS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")

_A100 = AbstractDevice(device_kind="NVIDIA A100-SXM4-40GB", num_cores=NUM_SMS, platform="gpu")


class CompilerMissing(RuntimeError):
    """The wheels that hold the compiler are not installed."""


def missing_reason() -> str | None:
    """Why nothing can be compiled here, in words that name the remedy; None when it can."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        return f"compiling for {ARCHITECTURE} needs the wheels {', '.join(WHEELS)}: run `make compile-report`"
    if _cuda_tool("ptxas") is None:
        return "ptxas of nvidia-cuda-nvcc-cu12 is not installed: run `make compile-report`"
    if jax.default_backend() != "cpu":
        return "compiling without a GPU needs JAX_PLATFORMS=cpu"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """One kernel's machine code.

    Attributes:
        grid / threads: programs of one launch, threads of a program.
        registers: per thread.
        spill_bytes: stores and loads of registers that did not fit; 0 is wanted.
        static_shared_memory_bytes / dynamic_shared_memory_bytes: of one program.
        instructions: counts in PTX of tensor-core, asynchronous-copy and vector-load instructions.
    """

    name: str
    grid: tuple[int, ...]
    threads: int
    registers: int
    spill_bytes: int
    static_shared_memory_bytes: int
    dynamic_shared_memory_bytes: int
    instructions: dict[str, int]

    @property
    def shared_memory_bytes(self) -> int:
        """Static and dynamic."""
        return self.static_shared_memory_bytes + self.dynamic_shared_memory_bytes

    @property
    def programs_per_sm(self) -> int:
        """Programs that one SM can hold at once."""
        return programs_per_sm(
            threads=self.threads, registers=self.registers, shared_memory_bytes=self.shared_memory_bytes
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A jitted function's A100 executable, taken apart.

    Attributes:
        kernels: by name, in order of first launch. Kernels with equal code share one entry.
        launches: names of all kernels in the order they run, as often as they run.
        alias_bytes / host_alias_bytes: arguments updated in place, by memory.
        temp_bytes / host_temp_bytes: scratch memory beside arguments and results.
        argument_bytes / host_argument_bytes: arguments by memory.
        hlo: the optimised HLO module as text.
    """

    kernels: dict[str, CompiledKernel]
    launches: tuple[str, ...]
    alias_bytes: int
    host_alias_bytes: int
    temp_bytes: int
    host_temp_bytes: int
    argument_bytes: int
    host_argument_bytes: int
    hlo: str

    def copies_of(self, shape: tuple[int, ...]) -> list[str]:
        """HLO lines that copy an array of as many elements as `shape` has, in any shape (pools are also taken flat).

        What is computed anew is no copy: it shows in `temp_bytes`.
        """
        copies = re.findall(r"^\s*(?:ROOT )?%\S+ = .*? (?:copy|copy-start)\(.*$", self.hlo, re.MULTILINE)
        sizes = ([math.prod(_ints(dims)) for dims in re.findall(r"\w+\[([\d,]+)\]", line)] for line in copies)
        return [line for line, found in zip(copies, sizes, strict=True) if math.prod(shape) in found]

    def host_calls(self) -> list[str]:
        """HLO lines that would compute on the host or call back into the host program."""
        marks = r'custom_call_target="\w*callback|HostExecute|execution_thread="host"|\b(?:infeed|outfeed|send|recv)\('
        return re.findall(rf"^.* = .*(?:{marks}).*$", self.hlo, re.MULTILINE)


@functools.cache
def _device() -> Any:
    reason = missing_reason()
    if reason:
        raise CompilerMissing(reason)
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="a100", target_config=TARGET_CONFIG, topology="1x1x1"
    )
    return topology.devices[0]


def lower_for_cuda(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Lowers a jitted function for an A100; arguments are arrays or what `abstract` gives."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=_A100)):  # jax >= 0.11 asks which GPU it lowers for
        return function.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))  # pyright: ignore[reportFunctionMemberAccess]


def compile_for_a100(function: Callable[..., Any], *args: Any, **kwargs: Any) -> CompiledProgram:
    """Compiles a jitted function for an A100.

    Args:
        function: a `jax.jit` function.
        args / kwargs: arrays or `abstract` shapes, and static arguments.

    Raises:
        CompilerMissing: the wheels are not installed; names the remedy.
        NotImplementedError: a kernel does not support the shape.
    """
    device = _device()
    lowered = lower_for_cuda(function, *args, **kwargs)
    with tempfile.TemporaryDirectory() as folder:
        overrides: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        if jax.__version_info__ >= (0, 11):
            overrides["xla_dump_emitter_re"] = "ptx|llvm"  # PTX is no longer dumped unasked
        options = jax_compiler.get_compile_options(
            num_replicas=1, num_partitions=1,
            env_options_overrides=overrides,
        )  # fmt: skip
        executable = device.client.compile(
            lowered.compiler_ir("stablehlo"),
            executable_devices=xla_client.DeviceList((device,)),
            compile_options=options,
        )
        memory = executable.get_compiled_memory_stats()
        return _take_apart(Path(folder), memory)


def _take_apart(folder: Path, memory: Any) -> CompiledProgram:
    (hlo_file,) = folder.glob("*gpu_after_optimizations.txt")
    launches = [
        match
        for path in folder.glob("*thunk_sequence.txt")
        for match in re.findall(
            r"\] (\S+) grid: \[(.*?)\] threads: \[(.*?)\]\s+shared_memory: (\d+) bytes", path.read_text()
        )
    ]
    resources = {name: found for path in sorted(folder.glob("*.ptx")) for name, found in _assemble(path).items()}
    kernels: dict[str, CompiledKernel] = {}
    for name, grid, threads, dynamic in launches:
        if name in kernels or name not in resources:
            continue
        kernels[name] = CompiledKernel(
            name=name, grid=_ints(grid), threads=math.prod(_ints(threads)),
            dynamic_shared_memory_bytes=int(dynamic), **resources[name],
        )  # fmt: skip
    return CompiledProgram(
        kernels=kernels,
        launches=tuple(name for name, *_ in launches),
        alias_bytes=memory.alias_size_in_bytes,
        host_alias_bytes=memory.host_alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        host_argument_bytes=memory.host_argument_size_in_bytes,
        hlo=hlo_file.read_text(),
    )


_COUNTED = r"\b(mma\.sync|ldmatrix|cp\.async\.c[ga]|ld\.global(?:\.\w+)*?\.v\d|st\.global(?:\.\w+)*?\.v\d)"


def _assemble(ptx: Path) -> dict[str, dict[str, Any]]:
    """Resources of every kernel in a PTX file, as the assembler for the architecture reports them."""
    text = ptx.read_text()
    if ".entry" not in text:
        return {}
    # Newer XLA writes PTX 9.0, which the CUDA 12 assembler refuses for its number alone.
    ptx.write_text(text := re.sub(r"^\.version 9\.\d$", ".version 8.8", text, flags=re.MULTILINE))
    command = [str(_cuda_tool("ptxas")), "-v", f"-arch={ARCHITECTURE}", str(ptx), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", text, re.DOTALL))
    found = {}
    for block in re.split(r"Compiling entry function ", done.stderr)[1:]:
        match = re.match(r"'(\S+)'", block)
        assert match, block
        name = match.group(1)
        found[name] = {
            "registers": _number(r"Used (\d+) registers", block),
            "spill_bytes": _number(r"(\d+) bytes spill stores", block) + _number(r"(\d+) bytes spill loads", block),
            "static_shared_memory_bytes": _number(r"(\d+) bytes smem", block),
            "instructions": dict(Counter(re.findall(_COUNTED, bodies.get(name, "")))),
        }
    return found


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _cuda_tool(name: str) -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob(f"*/bin/{name}"):
            return path
    return None
