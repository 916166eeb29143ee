"""`envfleet native`: environments in C++: write one, build it, look at it, check it."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "build and check environments written in C++"
DESCRIPTION = (
    "Writes a C++ environment to begin with, builds libraries of them, lists what is in one, checks that it keeps the contract."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    new = verbs.add_parser("new", help="write a small environment to begin with")
    new.add_argument("source", type=Path, metavar="FILE.cpp", help="the file to write")
    build = verbs.add_parser("build", help="compile a C++ file into a library ($CXX chooses the compiler)")
    build.add_argument("source", type=Path, metavar="FILE.cpp", help="the C++ file")
    build.add_argument("-o", "--out", type=Path, metavar="LIBRARY", help="the library (default: FILE.so, beside the file)")
    kind = build.add_mutually_exclusive_group()
    kind.add_argument("--debug", dest="kind", action="store_const", const="debug", help="for a debugger")
    kind.add_argument("--sanitize", dest="kind", action="store_const", const="sanitize", help="stop at errors of memory")
    build.set_defaults(kind="fast")
    listing = verbs.add_parser("list", help="the environments of a library, with spaces and options")
    listing.add_argument("library", nargs="?", metavar="LIBRARY", help="default: envfleet's own")
    check = verbs.add_parser("check", help="play at random and check the contract")
    check.add_argument("library", nargs="?", metavar="LIBRARY", help="default: envfleet's own")
    check.add_argument("--num-episodes", type=int, default=20, metavar="N", help="episodes of each environment")


def run(args: argparse.Namespace) -> int:
    """Run one of the verbs."""
    return {"new": _new, "build": _build, "list": _list, "check": _check}[args.verb](args)


def _new(args: argparse.Namespace) -> int:
    from envfleet.errors import BadArgument
    from envfleet.native import library

    text = (Path(library.__file__).parent / "template.cpp").read_text()
    try:
        with args.source.open("x") as out:
            out.write(text)
    except FileExistsError:
        raise BadArgument(f"{args.source} exists already: give another name, or remove it") from None
    print(f"{args.source} written; next: envfleet native build {args.source}")
    return 0


def _build(args: argparse.Namespace) -> int:
    from envfleet.native.build_library import BuildFailed, build_library
    from envfleet.native.library import load_library

    try:
        path, warnings = build_library(args.source, args.out, args.kind)
    except BuildFailed as failed:
        print(failed)  # the compiler's messages have many lines
        return 1
    if warnings:
        print(warnings)
    if args.kind == "sanitize":
        print(f"{path} built; run Python with LD_PRELOAD=$(c++ -print-file-name=libasan.so) to load it")
        return 0
    names = ", ".join(load_library(str(path)))
    print(f'{path} has {names}; use it: ef.make("native:{path}", num_envs=64)')
    return 0


def _list(args: argparse.Namespace) -> int:
    from envfleet.native.library import load_library, own_library, space_of

    for name, entry in load_library(args.library or own_library()).items():
        spaces = entry.spaces(entry.options({}))
        print(name)
        print(f"  observation: {space_of(spaces.obs)}")
        print(f"  action:      {space_of(spaces.action)}")
        if spaces.task_size:
            print(f"  task:        {spaces.task_size} numbers")
        for i in range(entry.table.num_options):
            print(f"  option:      {entry.table.option_names[i].decode()} = {entry.table.option_defaults[i]:g}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from envfleet.errors import BadArgument
    from envfleet.native.library import load_library, own_library
    from envfleet.native.native_env import NativeEnv
    from envfleet.native.play_check import check_env

    path = args.library or own_library()
    failed = False
    for name in load_library(path):
        try:
            problems = check_env(NativeEnv(path, name), args.num_episodes)
        except BadArgument as refused:
            if args.library is None:  # MuJoCo's need the engine that their Python classes make
                print(f"{name}: not checked ({refused})")
                continue
            problems = [str(refused)]
        print(f"{name}: {'fine' if not problems else ''}" + "".join(f"\n  {problem}" for problem in problems))
        failed |= bool(problems)
    return int(failed)
