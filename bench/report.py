"""Tables, plots, and the places in the documentation they are written to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.envs import SLEEP_CEILING_PER_SLOT, TITLES
from bench.stats import MAX_FOREIGN, difference_ns, estimate, ratio, short
from bench.store import HERE
from bench.targets import PUFFER, Results, Row, rows

DOCS = HERE.parent / "docs" / "performance.md"
IMAGES = HERE.parent / "docs" / "images"
SCALING = HERE / "scaling.md"


def case_line(raw: Mapping[str, Any]) -> str:
    """One line for the terminal when a case is done."""
    if "error" in raw:
        return f"{raw['case']:<16} FAILED: {raw['error']}"
    left_out = [f"{name} ({why})" for name, why in {**raw["skipped"], **raw["failed"]}.items()]
    rest = f"; without {', '.join(left_out)}" if left_out else ""
    idle = raw.get("idle_cpu", 0.0)
    if idle > 0.04:
        rest += f"; contestants that were not measured used {idle:.2f} cores"
    return f"{raw['case']:<16} {raw['took_s']:6.1f} s, {raw.get('thrown', 0)} slices thrown away{rest}"


def as_text(results: Mapping[str, Any]) -> str:
    """The target table for the terminal."""
    lines = [f"{'case':<15} {'what':<62} {'target':>9}  {'measured':<24} "]
    for row in rows(results):
        if row.measured is not None:
            lines.append(f"{row.case:<15} {row.what:<62} {_goal(row):>9}  {f'{row.measured}{row.unit}':<24} {row.met.strip('*')}")
    return "\n".join(lines)


def _goal(row: Row) -> str:
    return f"{'≤' if row.at_most else '≥'} {row.goal:g}{row.unit}"


def write_docs(results: Mapping[str, Any]) -> None:
    """Fill what stands between the markers of the documentation."""
    plots = _plots(results)
    _fill(DOCS, {
        "about": _about(results), "targets": _target_table(results), "cases": _case_tables(results),
        "costs": _cost_table(results), "busy": _busy_table(results), "plots": plots, "left-out": _left_out(results),
    })  # fmt: skip
    _fill(SCALING, {"parent": _parent_table(results), "extrapolation": _extrapolation(results)})


def _fill(path: Path, parts: Mapping[str, str]) -> None:
    text = path.read_text()
    for name, content in parts.items():
        pattern = rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)"
        text, count = re.subn(pattern, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{path} needs the marker <!-- bench:{name} --> exactly once")
    path.write_text(text)


def _table(header: list[str], lines: list[list[str]]) -> str:
    aligned = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(header))) + "|"
    return "\n".join(["| " + " | ".join(header) + " |", aligned] + ["| " + " | ".join(line) + " |" for line in lines])


def _about(results: Mapping[str, Any]) -> str:
    about = results["about"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    thrown = sum(raw.get("thrown", 0) for raw in results["cases"].values())
    shares = [one.foreign for rec in Results(results).records.values() for s in rec.slices.values() for one in s.values()]
    foreign = f"{100 * estimate(shares).median:.1f} % in the median, {100 * max(shares):.0f} % at most" if shares else "?"
    return (
        f"Measured {about['date']} on {about['cpus']} cores ({about['processor']}), Python {about['python']}, {versions}; "
        f"compiled core {about['compiled core']}. {about['options']['pairs']} slices of "
        f"{about['options']['seconds']} s a contestant, {about.get('took_s', 0) / 60:.0f} minutes in all. "
        f"CPU share of other programs in the slices used: {foreign}; {thrown} slices were thrown away and repeated, "
        f"{sum(share > MAX_FOREIGN for share in shares)} above {100 * MAX_FOREIGN:.0f} % had to be kept."
    )


def _target_table(results: Mapping[str, Any]) -> str:
    lines = []
    for row in rows(results):
        measured = "" if row.measured is None else f"{row.measured}{row.unit}"
        lines.append([row.case, row.what, _goal(row), measured, row.met, row.note])
    return _table(["case", "what", "target", "measured [95 % interval]", "", "note"], lines)


def _case_tables(results: Mapping[str, Any]) -> str:
    found = Results(results)
    parts = []
    for name, record in found.records.items():
        if not record.slices or name.startswith("copy"):
            continue
        env, slots = record.raw["env"], record.raw["slots"]
        base = "limit" if "limit" in record.slices else "policy gymnasium Sync"
        lines = []
        names = list(record.slices) + ([PUFFER] if found.slices(name, PUFFER) else [])
        for who in sorted(names, key=lambda one: -found.rate(name, one)):
            mine = found.slices(name, who)
            share = found.ratio(name, who, base)
            if env == "unevensleep":
                share = ratio(mine, slots * SLEEP_CEILING_PER_SLOT)
            cpu = estimate([one.ns_per_step for one in mine.values()]).median
            start = record.raw["start_s"].get(who)
            derived = who == PUFFER
            lines.append([
                who + (" (derived)" if derived else ""), short(found.rate(name, who)), "" if share is None else str(share),
                "" if derived else short(cpu), "" if start is None else f"{start:.2f}",
            ])  # fmt: skip
        against = "of the ceiling" if env == "unevensleep" else "of the limit" if base == "limit" else "over SyncVectorEnv"
        title = f"### {TITLES.get(env, env)}{' with a policy' if name.startswith('policy') else ''}, {slots} slots"
        parts.append(title + "\n\n" + _table(["", "steps/s", against, "CPU ns/step", "start s"], lines))
    return "\n\n".join(parts)


def _cost_table(results: Mapping[str, Any]) -> str:
    found = Results(results)
    lines = []
    for case, more, less, what in (
        ("copy-cartpole", "ours serial-copy", "ours serial", "`copy=True`, CartPole-v1, 64 slots, serial"),
        ("copy-image", "ours serial-copy", "ours serial", "`copy=True`, 84×84×4 images, 64 slots, serial"),
    ):
        first, second = found.slices(case, more), found.slices(case, less)
        if first and second:
            lines.append([what, f"{difference_ns(first, second)} ns", str(ratio(first, second))])
    counted = found.values("statistics")
    if counted:
        share = f"{1 / (1 + estimate(counted['cost_ns']).median / counted['bare_ns']):.3f} (from the CPU)"
        lines.append(["statistics on every step, null env, 64 slots, serial", f"{estimate(counted['cost_ns'])} ns", share])
    for case, what in (("copy-cartpole", "CartPole-v1"), ("copy-image", "84×84×4 images")):
        share = found.ratio(case, "ours shm-copy", "ours shm")
        if share is not None:
            lines.append([f"`copy=True`, {what}, 64 slots, shm", "", str(share)])
    for slots in (8, 64, 256):
        share = found.ratio(f"cartpole-{slots}", "ours shm", "ours shm-share")
        if share is not None:
            lines.append([f"`isolate=True` instead of False, CartPole-v1, {slots} slots", "", str(share)])
    return _table(["what", "CPU per slot-step", "steps/s, of those without"], lines)


def _busy_table(results: Mapping[str, Any]) -> str:
    found = Results(results).values("busy").get("rows", [])
    if not found:
        return "Not measured yet."
    numbers = sorted({row["loops"] for row in found})
    cells: dict[tuple[str, int, str], dict[int, str]] = {}
    for row in found:
        backend = row["plan"].partition(",")[0].partition(" ")[0]
        line = cells.setdefault((row["env"], row["slots"], row["when"]), {})
        line[row["loops"]] = f"{estimate(row['shares'])} ({backend})"
    header = ["env", "slots", "the load comes", *(f"{count} busy loops" for count in numbers)]
    lines = [
        [env, str(slots), "first" if when == "start" else "later", *(line.get(count, "") for count in numbers)]
        for (env, slots, when), line in cells.items()
    ]
    return _table(header, lines)


def _left_out(results: Mapping[str, Any]) -> str:
    lines = []
    for name, raw in results["cases"].items():
        for who, why in {**raw.get("skipped", {}), **raw.get("failed", {})}.items():
            lines.append(f"* {name}: {who}: {why}")
        if "error" in raw:
            lines.append(f"* {name}: {raw['error']}")
    return "\n".join(lines) or "Nobody."


# -- the parent, and more cores ---------------------------------------------------------------------------------


def _parent_table(results: Mapping[str, Any]) -> str:
    found = Results(results).values("parent").get("rows", [])
    lines = [
        [f"{row['slots']:,}", str(row["workers"]), row["how"], short(row["step_ns"] / 1000), short(row["ns_per_slot"])]
        for row in found
    ]
    return _table(["slots", "workers", "workers are", "µs of parent CPU per step", "ns per slot"], lines)


def _extrapolation(results: Mapping[str, Any]) -> str:
    found = Results(results)
    fits = found.values("parent").get("fit")
    if not fits:
        return "Not measured yet."
    text = []
    for how, fit in fits.items():
        text.append(f"* workers {how}: {fit['base_ns'] / 1000:.1f} µs a step, {fit['per_slot_ns']:.1f} ns a slot, "
                    f"{fit['per_worker_ns'] / 1000:.2f} µs a worker")  # fmt: skip
    fit = {name: max(0.0, value) for name, value in fits["awake"].items()}  # noise can make a small one negative
    lines = []
    for env, case in (("null env", "null-64"), ("CartPole-v1", "cartpole-64"), ("Ant-v5", "ant-64")):
        slices = found.slices(case, "limit")
        if not slices:
            continue
        step_ns = estimate([one.ns_per_step for one in slices.values()]).median
        for per_worker in (64, 256):
            line = [env, short(step_ns / 1000), str(per_worker)]
            for cores in (8, 16, 32, 64):
                slots = per_worker * cores
                parent = fit["base_ns"] + fit["per_slot_ns"] * slots + fit["per_worker_ns"] * cores
                work = step_ns * per_worker
                line.append(f"{100 * work / (work + parent):.0f} %")
            share = fit["per_slot_ns"] * per_worker + fit["per_worker_ns"]
            line.append(f"{max(1.0, step_ns * per_worker / share):.0f}" if share > 0 else "never")
            lines.append(line)
    header = ["env", "µs/step", "slots per worker", "8 cores", "16", "32", "64", "cores at which the parent takes half"]
    return "\n".join(text) + "\n\n" + _table(header, lines)


# -- plots ------------------------------------------------------------------------------------------------------


def _plots(results: Mapping[str, Any]) -> str:
    try:
        import matplotlib
    except ImportError:
        return "(matplotlib is not installed, so there are no plots.)"
    matplotlib.use("Agg")
    IMAGES.mkdir(parents=True, exist_ok=True)
    found = Results(results)
    shown = []
    for env, title in (("cartpole", "CartPole-v1"), ("ant", "Ant-v5"), ("image", "84×84×4 uint8 images")):
        if found.slices(f"{env}-64", "limit"):
            shown.append(_bars(found, f"{env}-64", f"{title}, 64 slots", IMAGES / f"bench-{env}.png"))
    if any(found.slices(f"cartpole-{n}", "limit") for n in (8, 64, 256, 1024, 4096)):
        shown.append(_lines(found, IMAGES / "bench-slots.png"))
    return "\n\n".join(f"![{title}](images/{path.name})" for title, path in shown)


def _bars(found: Results, case: str, title: str, path: Path) -> tuple[str, Path]:
    from matplotlib import pyplot

    names = [name for name in found.records[case].slices if not name.startswith("limit") and "venv" not in name]
    base = "limit storing" if found.slices(case, "limit storing") else "limit"
    shares = {name: found.ratio(case, name, base) for name in names}
    ordered = sorted(shares.items(), key=lambda item: item[1].median if item[1] else 0.0)
    figure, axes = pyplot.subplots(figsize=(7, 0.28 * len(ordered) + 1.2))
    for place, (name, share) in enumerate(ordered):
        if share is not None:
            error = [[max(0.0, share.median - share.low)], [max(0.0, share.high - share.median)]]
            color = "#2a6f97" if name.startswith("ours") else "#adb5bd"
            axes.barh(place, share.median, xerr=error, color=color, error_kw={"lw": 0.8})
            axes.text(max(share.high, share.median) + 0.01, place, short(share.median), va="center", fontsize=7)
    axes.set_yticks(range(len(ordered)), [name for name, _ in ordered], fontsize=8)
    axes.axvline(1.0, color="black", lw=0.8)
    axes.set_xlabel(f"share of the limit ({'observations stored, ' if 'storing' in base else ''}no communication)")
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return title, path


def _lines(found: Results, path: Path) -> tuple[str, Path]:
    from matplotlib import pyplot

    title = "CartPole-v1: share of the limit by number of slots"
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in ("ours shm-share", "ours shm", "ours serial", "gymnasium Sync", "SB3 Dummy"):
        shares = {n: found.ratio(f"cartpole-{n}", name, "limit") for n in (8, 64, 256, 1024, 4096)}
        points = [(n, share) for n, share in shares.items() if share is not None]
        if points:
            axes.plot([n for n, _ in points], [share.median for _, share in points], marker="o", label=name)
            axes.fill_between(
                [n for n, _ in points], [share.low for _, share in points], [share.high for _, share in points], alpha=0.15
            )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("slots")
    axes.set_ylabel("share of the limit")
    axes.axhline(1.0, color="black", lw=0.8)
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return title, path
