"""The compiled core is optional: without a compiler the package installs and runs its Python twin."""

import glob
import os
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildExt(build_ext):
    """Leaves out the flags that the compiler does not know; says so when an extension is left out."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception:
            print(
                f"envfleet: {ext.name} could not be built (is there a C compiler?). Everything works without it, but slower: "
                "install a compiler and envfleet again. `envfleet doctor` says whether it is there.",
                file=sys.stderr,
            )
            raise  # it is optional: setuptools goes on without it

    def build_extensions(self) -> None:
        if self.compiler.compiler_type != "unix":  # MSVC has other names for all of them
            unknown = {flag for one in self.extensions for flag in one.extra_compile_args}
        else:
            unknown = {"-Wno-psabi"} if is_clang(self.compiler.compiler_so[0]) else set()  # GCC's note about vector arguments
        for one in self.extensions:
            one.extra_compile_args = [flag for flag in one.extra_compile_args if flag not in unknown]
        super().build_extensions()


def is_clang(compiler: str) -> bool:
    """False too where the compiler is not there: build_extension then says what is left out, and the package installs."""
    try:
        return "clang" in subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return False


def extensions() -> list[Extension]:
    try:
        import numpy
    except ImportError:  # an isolated build that could not get NumPy still gives a working package
        print("envfleet: no NumPy at build time, so the compiled core is left out", file=sys.stderr)
        return []
    flags = [
        "-O3",
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Wno-missing-field-initializers",
        "-Wno-cast-function-type",
        "-fvisibility=hidden",
    ]
    if os.environ.get("ENVFLEET_BUILD") == "debug":
        flags += ["-O1", "-g", "-fno-omit-frame-pointer", "-UNDEBUG"]
    if os.environ.get("ENVFLEET_BUILD") == "sanitize":
        flags += ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
    link = ["-fsanitize=address,undefined"] if "-fsanitize=address,undefined" in flags else []
    return [
        Extension(
            "envfleet._compiled",
            [
                "compiled/runner.c",
                "compiled/runner_agents.c",
                "compiled/runner_type.c",
                "compiled/info.c",
                "compiled/board.c",
                "compiled/exchange.c",
                "compiled/exchange_type.c",
                "compiled/native_life.c",
                "compiled/native_pool.c",
            ],
            depends=["compiled/envfleet.h", "compiled/exchange.h", "src/envfleet/native/envfleet_env.h"],
            include_dirs=["compiled", "src/envfleet/native", numpy.get_include()],
            extra_compile_args=[*flags, "-ffp-contract=off"],
            extra_link_args=link,
            optional=True,
        ),
        # A plain library with a C interface, no Python module: src/envfleet/native/library.py loads it. No fused operations and no
        # powers by multiplication, so that the bits are those of the environments in Python.
        Extension(
            "envfleet._native_envs",
            sorted(glob.glob("compiled/native/*.cpp")),
            depends=["compiled/native/envs.h", "compiled/native/mujoco_engine.h", "src/envfleet/native/envfleet_env.h"],
            include_dirs=["src/envfleet/native"],
            language="c++",
            extra_compile_args=[
                *(flag for flag in flags if flag != "-std=c11"),
                "-std=c++17",
                "-ffp-contract=off",
                "-fno-builtin-pow",
                "-fno-builtin-powf",
            ],
            extra_link_args=link,
            optional=True,
        ),
        *(
            Extension(
                f"envfleet.{name}",
                [source],
                depends=["compiled/arrays.h", "compiled/helpers.h", "compiled/panels.h"],
                # Sums of products in one rounding, and loops that may be turned into vector instructions.
                extra_compile_args=[
                    *flags,
                    "-ffp-contract=fast",
                    "-fno-math-errno",
                    "-fno-trapping-math",
                    "-Wno-psabi",
                    "-pthread",
                ],
                extra_link_args=[*link, "-pthread"],
                optional=True,
            )
            for name, source in (("_scan", "compiled/scan.c"), ("_dense", "compiled/dense.c"))
        ),
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
