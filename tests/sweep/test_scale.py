"""Ten thousand units are planned, resumed and collected in seconds and in little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, sys, time
from replayeval.sweep.collect import results
from replayeval.sweep.grid import expand
from replayeval.sweep.runner import plan_manifest, run
from tests.sweep.synthetic import SyntheticMeasurer, plan

store, models, docs, found = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), {}
chosen = plan(models=models, windows=10, docs=docs)

def clocked(name, work):
    started = time.process_time()
    result = work()
    found[name] = time.process_time() - started
    return result

clocked("plan", lambda: plan_manifest(chosen, SyntheticMeasurer().prepare(expand(chosen))))
os.fsync = lambda descriptor: None  # what the disk takes is not what is measured here
found["written"] = run(chosen, store, measurer=SyntheticMeasurer()).measured
found["reused"] = clocked("resume", lambda: run(chosen, store, resume=True, measurer=SyntheticMeasurer())).reused
records = clocked("collect", lambda: results(store))
found["records"], found["docs"] = len(records), sum(record.docs for record in records)
# Not ru_maxrss: a new process inherits that of the one which started it.
peak, = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:"))
found["peak_bytes"] = int(peak) * 1024
print(json.dumps(found))
"""


@pytest.mark.parametrize(("models", "docs"), [(2, 10), pytest.param(10, 100, marks=pytest.mark.slow)])
def test_many_units_take_seconds_and_little_memory(models: int, docs: int, tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), str(models), str(docs)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["written"], found["reused"], found["docs"]) == (10 * models * docs,) * 3
    assert found["records"] == 10 * models
    # Processor time: other processes on the machine make the clock on the wall useless.
    assert found["plan"] < 10 and found["resume"] < 20 and found["collect"] < 60, found
    assert found["peak_bytes"] < 1e9, found
