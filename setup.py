"""Compiles cpu_kernels/src into one plain shared library for each instruction set; all else is in pyproject.toml.

The libraries are optional: without a C++ compiler, or where one of them does not compile, the install goes on, and
`cpu_kernels.loader` says what is missing. They are no Python modules: XLA calls them through its FFI.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("cpu_kernels/src")
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
VARIANTS = {
    "avx512bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],  # every CPU with the one has the other
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma"],
    "plain": [],
}
# Contraction: a * b + c in one instruction. Hidden symbols: libraries for different CPUs share one process.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-DNDEBUG",
    "-Wall",
    "-Wno-return-type",
]


def ffi_headers() -> Path | None:
    """The folder of XLA's FFI headers, which jaxlib brings along; found without importing it."""
    spec = importlib.util.find_spec("jaxlib")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(place, "include") for place in places if Path(place, "include/xla/ffi/api/ffi.h").exists()), None)


def libraries() -> list[Extension]:
    """One for each instruction set of this machine's architecture."""
    headers = ffi_headers()
    if headers is None or os.name != "posix":
        print("cpu_kernels: no native kernels without jaxlib's headers on a POSIX system; plain XLA will serve")
        return []
    names = list(VARIANTS) if platform.machine().lower() in ("x86_64", "amd64") else ["plain"]
    wanted = os.environ.get("SPARSESERVE_CPU_VARIANTS")
    if wanted:  # fewer, to build faster
        names = [name for name in names if name in wanted.split(",")]
    return [
        Extension(
            f"cpu_kernels.{name}",
            sources=sorted(str(path) for path in SOURCES.glob("*.cc")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            include_dirs=[str(headers)],
            extra_compile_args=[*FLAGS, *VARIANTS[name]],
            language="c++",
            optional=True,
        )
        for name in names
    ]


class BuildLibraries(build_ext):
    """Builds plain libraries, side by side."""

    def finalize_options(self) -> None:
        """One compiler for each CPU unless said otherwise."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def get_ext_filename(self, fullname: str) -> str:
        """`cpu_kernels/libsparseserve_avx2.so`: no module, so no name of one."""
        package, _, name = fullname.rpartition(".")
        return str(Path(*package.split("."), f"libsparseserve_{name}.so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Sources say what is exported; there is no PyInit function."""
        return []

    def build_extension(self, ext: Extension) -> None:
        """Every variant has object files of its own."""
        objects = self.compiler.compile(
            ext.sources,
            output_dir=str(Path(self.build_temp, ext.name)),
            include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args,
            depends=ext.depends,
        )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), target_lang="c++")


setup(ext_modules=libraries(), cmdclass={"build_ext": BuildLibraries})
