"""The benchmark runs and writes what it promises. Nothing here is about speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="CPU shares are read from /proc")


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.full
def test_quick_run_writes_every_row(tmp_path):
    out = tmp_path / "results.json"
    done = bench("--quick", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert set(results["cases"]) == {
        "cartpole-8", "policy-8", "null-8", "unevensleep-8", "parent", "startup", "statistics", "busy", "copy-cartpole",
    }  # fmt: skip
    race = results["cases"]["cartpole-8"]
    assert not race["failed"]
    for name in ("limit", "plain", "ours serial", "ours shm", "ours shm-share", "ours auto", "gymnasium Sync"):
        assert set(race["slices"][name]) == {"0", "1"}, name
        for steps, seconds, cpu_ns, foreign in race["slices"][name].values():
            assert steps > 0 and seconds > 0 and cpu_ns > 0 and 0 <= foreign <= 1
    assert {row["how"] for row in results["cases"]["parent"]["values"]["rows"]} == {"awake", "asleep"}
    beside = results["cases"]["busy"]["values"]["rows"]
    assert [(row["loops"], row["when"]) for row in beside] == [(0, "start"), (1, "start"), (1, "later")]
    assert all(share > 0 for row in beside for share in row["shares"])

    again = bench("--quick", "--out", str(out), "--resume")
    assert "0 cases" in again.stdout, again.stdout + again.stderr


def test_report_fills_the_markers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import report

    for name, source in (("DOCS", report.DOCS), ("SCALING", report.SCALING)):
        copy = tmp_path / source.name
        copy.write_text(source.read_text())
        monkeypatch.setattr(report, name, copy)
    monkeypatch.setattr(report, "IMAGES", tmp_path / "images")
    slices = {str(turn): [1000 + turn, 0.01, 5_000_000, 0.01] for turn in range(15)}
    half = {turn: [steps // 2, *rest] for turn, (steps, *rest) in slices.items()}
    case = {
        "case": "cartpole-64", "env": "CartPole-v1", "slots": 64, "skipped": {"RLlib two runners": "no venv"},
        "failed": {}, "start_s": {"limit": 0.1}, "plans": {}, "thrown": 2,
        "slices": {"limit": slices, "ours shm": half, "ours shm-share": slices, "gymnasium Sync (copy)": half},
    }  # fmt: skip
    about = {"date": "d", "cpus": 2, "processor": "p", "python": "3", "versions": {}, "compiled core": "present",
             "options": {"pairs": 15, "seconds": 0.4}}  # fmt: skip
    results = {"about": about, "cases": {"cartpole-64": case}}
    report.write_docs(results)
    report.write_docs(results)  # what it wrote must not confuse it
    text = report.DOCS.read_text()
    assert "| cartpole-64 | ours shm-share, step, of the limit | ≥ 0.92 | 1.00 [1.00, 1.00] | met |" in text
    assert "| cartpole-64 | ours shm, step, of the limit | ≥ 0.8 | 0.50 [0.50, 0.50] | **not met** |" in text
    assert "RLlib two runners: no venv" in text
    assert "PufferLib Serial (derived)" in text
    assert text.count("<!-- bench:targets -->") == 1
