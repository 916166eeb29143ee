"""The compiled core is optional: without a compiler the package installs and runs its Python twin."""

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
            version = subprocess.run([*self.compiler.compiler_so[:1], "--version"], capture_output=True, text=True)
            unknown = {"-Wno-psabi"} if "clang" in version.stdout else set()  # GCC's note about vector arguments
        for one in self.extensions:
            one.extra_compile_args = [flag for flag in one.extra_compile_args if flag not in unknown]
        super().build_extensions()


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
            ],
            depends=["compiled/envfleet.h", "compiled/exchange.h"],
            include_dirs=["compiled", numpy.get_include()],
            extra_compile_args=[*flags, "-ffp-contract=off"],
            extra_link_args=link,
            optional=True,
        ),
        Extension(
            "envfleet._scan",
            ["compiled/scan.c"],
            # Sums of products in one rounding, and loops that may be turned into vector instructions.
            extra_compile_args=[*flags, "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"],
            extra_link_args=link,
            optional=True,
        ),
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
