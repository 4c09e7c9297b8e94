"""Whole sweeps on synthetic units: resumed, reused, failed, compared, and collected."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from replayeval.errors import ConfigError, NumericsError, ReplayEvalError, StoreError
from replayeval.report.schema import KLReport
from replayeval.store.sweeps import SweepStore, locate_run
from replayeval.sweep.collect import cells, results
from replayeval.sweep.difference import run_difference
from replayeval.sweep.grid import expand
from replayeval.sweep.plan import Plan
from replayeval.sweep.progress import Progress
from replayeval.sweep.runner import run
from tests.sweep.synthetic import FAILURES, SyntheticMeasurer, numbers, plan, synthetic_scores

UNITS = 2 * 2 * 5


def computed(log: Path) -> list[str]:
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def test_a_sweep_measures_every_unit_once_and_its_records_are_those_of_the_scores(tmp_path: Path) -> None:
    log, seen = tmp_path / "log", list[Progress]()
    done = run(plan(), tmp_path / "s", measurer=SyntheticMeasurer(log=str(log)), progress=seen.append)
    assert done.complete and (done.measured, done.reused, done.failures) == (UNITS, 0, ())
    assert len(computed(log)) == len(set(computed(log))) == UNITS
    assert (seen[-1].units, seen[-1].units_total, seen[-1].tokens, seen[-1].tokens_left) == (
        UNITS,
        UNITS,
        UNITS * 48,
        0,
    )
    jobs = {job.key: job for cell in SyntheticMeasurer().prepare(expand(plan())) for job in cell.jobs}
    found = list(cells(done.path))
    assert [cell.report.model for cell in found] == ["org/model-0"] * 2 + ["org/model-1"] * 2
    for cell in found:
        assert isinstance(cell.report, KLReport)
        kl = [synthetic_scores(jobs[key]).kl_nats for key in cell.cell.units]  # pyright: ignore[reportArgumentType]
        for row, arm in enumerate(cell.report.arms):
            mean = sum(float(values[row].sum()) for values in kl) / (5 * 48)
            assert arm.kl.mean == pytest.approx(mean, rel=1e-12)
        assert cell.report.arms[1].ratio_to_floor is not None
        assert cell.report.rounding_ratios[0].stochastic.startswith("shared:fp8+sr")
        floor = cell.report.checks[-1]
        assert floor.value == pytest.approx(sum(float(values[0].sum()) for values in kl) / (5 * 48), rel=1e-12)


def test_the_same_plan_is_refused_without_resume_and_costs_nothing_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run(plan(), tmp_path / "s", measurer=SyntheticMeasurer(log=str(log)))
    with pytest.raises(StoreError, match=r"already holds this sweep, 20 of 20 units done.*--resume"):
        run(plan(), tmp_path / "s", measurer=SyntheticMeasurer(log=str(log)))
    again = run(plan(), tmp_path / "s", resume=True, measurer=SyntheticMeasurer(log=str(log)))
    assert (again.measured, again.reused) == (0, UNITS)
    assert len(computed(log)) == UNITS
    assert len(again.manifest.attempts) == 2


def test_plans_in_one_store_share_their_units(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run(plan(windows=1), tmp_path / "s", measurer=SyntheticMeasurer(log=str(log)))
    larger = run(plan(name="larger"), tmp_path / "s", measurer=SyntheticMeasurer(log=str(log)))
    assert (larger.measured, larger.reused) == (10, 10)
    assert len(set(computed(log))) == len(computed(log)) == UNITS
    alone = run(plan(name="larger"), tmp_path / "t", measurer=SyntheticMeasurer())
    assert list(map(numbers, larger.results())) == list(map(numbers, alone.results()))
    assert len(SweepStore.open(tmp_path / "s").runs()) == 2
    with pytest.raises(StoreError, match="expected one run in .*, got 2"):
        results(tmp_path / "s")
    assert list(map(numbers, results(tmp_path / "t"))) == list(map(numbers, alone.results()))


def test_a_store_on_another_file_system(tmp_path: Path) -> None:
    there = run(plan(), f"memory://{tmp_path.name}/store", measurer=SyntheticMeasurer())
    here = run(plan(), tmp_path, measurer=SyntheticMeasurer())
    assert list(map(numbers, there.results())) == list(map(numbers, here.results()))
    again = run(plan(), f"memory://{tmp_path.name}/store", resume=True, measurer=SyntheticMeasurer())
    assert again.reused == UNITS


@pytest.mark.parametrize(
    ("kind", "error", "units"), [("input", ConfigError, 5), ("check", NumericsError, 5), ("error", ReplayEvalError, 1)]
)
def test_a_failure_stops_its_cell_only_where_the_others_would_fail_too(
    kind: str, error: type[Exception], units: int, tmp_path: Path
) -> None:
    """Document 1 fails: document 0 was done before it, and those after it are tried only if it may be bad luck."""
    log = tmp_path / "log"
    failing = run(plan(), tmp_path / "s", measurer=SyntheticMeasurer(fails=FAILURES[kind], log=str(log)))
    assert not failing.complete and failing.manifest.finished is None
    assert {failure["kind"] for failure in failing.failures} == {kind}
    assert len(failing.failures) == 4 * (units - 1 if units > 1 else 1)
    with pytest.raises(error, match=r"of 20 units were not measured(.|\n)*--resume"):
        failing.raise_failures()
    repaired = run(plan(), tmp_path / "s", resume=True, measurer=SyntheticMeasurer(log=str(log)))
    assert repaired.complete and repaired.manifest.failures == ()
    assert len(computed(log)) == len(set(computed(log))) == UNITS


def test_an_unfinished_cell_says_so(tmp_path: Path) -> None:
    failing = run(plan(), tmp_path, measurer=SyntheticMeasurer(fails=FAILURES["error"]))
    for report in failing.results():
        assert isinstance(report, KLReport) and report.docs == 4
        assert report.intervals is not None and report.intervals.caution is not None
        assert "not finished: 4 of 5 documents" in report.intervals.caution


def test_a_damaged_unit_is_named_and_measured_anew_when_it_is_deleted(tmp_path: Path) -> None:
    done = run(plan(), tmp_path, measurer=SyntheticMeasurer())
    before = list(map(numbers, done.results()))
    bad = sorted(tmp_path.glob("units/*/*.parquet"))[3]
    bad.write_bytes(bad.read_bytes()[:-20])
    with pytest.raises(StoreError, match=bad.name):
        done.results()
    manifest = next(path for path in bad.parent.glob("*.json") if bad.name.startswith(path.stem))
    manifest.unlink()
    again = run(plan(), tmp_path, resume=True, measurer=SyntheticMeasurer())
    assert again.measured == 1
    assert list(map(numbers, again.results())) == before


def test_units_that_were_exchanged_are_found(tmp_path: Path) -> None:
    """Two units whose tables were exchanged, by somebody who made all digests fit."""
    done = run(plan(), tmp_path, measurer=SyntheticMeasurer())
    store, manifest = locate_run(done.path)
    first, second = manifest.cells[0].units[:2]
    path = store.folder.local
    assert path is not None
    a = store.units.read(first)
    b = store.units.read(second)
    for file in path.glob(f"units/{first[:2]}/{first}*"):
        file.unlink()
    store.units.write(replace(a, table=b.table))
    with pytest.raises(StoreError, match="holds the numbers of another unit"):
        done.results()


def test_the_manifest_of_another_run_is_found(tmp_path: Path) -> None:
    first = run(plan(models=1), tmp_path, measurer=SyntheticMeasurer())
    second = run(plan(models=2), tmp_path, measurer=SyntheticMeasurer())
    assert first.path != second.path
    (Path(second.path) / "manifest.json").write_bytes((Path(first.path) / "manifest.json").read_bytes())
    with pytest.raises(StoreError, match=rf"is the manifest of run {Path(first.path).name}, not of"):
        second.results()
    assert "not of" in " ".join(problem.text for problem in locate_run(first.path)[0].verify())


def test_a_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"holds thesis\.txt and no store\.json"):
        run(plan(), tmp_path, measurer=SyntheticMeasurer())
    with pytest.raises(StoreError, match="expected a store of sweeps"):
        results(tmp_path)
    (tmp_path / "store.json").write_text(json.dumps({"schema": "replayeval.store/7"}))
    with pytest.raises(StoreError, match=r"expected schema replayeval\.store/1, got 'replayeval\.store/7'"):
        run(plan(), tmp_path, measurer=SyntheticMeasurer())


def test_a_run_that_another_process_works_on_is_refused(tmp_path: Path) -> None:
    done = run(plan(), tmp_path, measurer=SyntheticMeasurer())
    lock = SweepStore.open(tmp_path).lock_run(done.manifest.run)
    assert lock is not None
    with lock, pytest.raises(StoreError, match="written by another process"):
        run(plan(), tmp_path, resume=True, measurer=SyntheticMeasurer())


def test_verify_names_every_bad_file(tmp_path: Path) -> None:
    done = run(plan(), tmp_path, measurer=SyntheticMeasurer())
    store = SweepStore.open(tmp_path)
    assert store.verify() == [] and store.verify(done.manifest.run) == []
    (tmp_path / "runs" / done.manifest.run / "notes").write_text("mine")
    manifest = tmp_path / "runs" / done.manifest.run / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"name": "synthetic"', '"name": "sinthetic"'))
    sorted(tmp_path.glob("units/*/*.json"))[0].write_text("{}")
    assert sorted(problem.kind for problem in store.verify()) == ["damaged", "damaged", "foreign"]


def test_a_finished_run_that_lost_a_unit_is_not_whole(tmp_path: Path) -> None:
    done = run(plan(), tmp_path, measurer=SyntheticMeasurer())
    store = SweepStore.open(tmp_path)
    next(tmp_path.glob("units/*/*.json")).unlink()
    assert [problem.kind for problem in store.verify(done.manifest.run)] == ["missing"]


def test_a_difference_of_two_runs_tells_equal_numbers_from_others(tmp_path: Path) -> None:
    first = run(plan(), tmp_path / "a", measurer=SyntheticMeasurer())
    second = run(plan(), tmp_path / "b", measurer=SyntheticMeasurer())
    same = run_difference(locate_run(first.path), locate_run(second.path))
    assert not same.differs and same.lines[-1].startswith("4 cells in both; 20 units equal bit by bit, 0 differ")
    other = run(plan(windows=3), tmp_path / "c", measurer=SyntheticMeasurer())
    more = run_difference(locate_run(first.path), locate_run(other.path))
    assert more.differs and sum("only in the second run" in line for line in more.lines) == 2

    store, manifest = locate_run(second.path)
    key = manifest.cells[1].units[2]
    unit = store.units.read(key)
    for file in (tmp_path / "b" / "units" / key[:2]).glob(f"{key}*"):
        file.unlink()
    store.units.write(replace(unit, content_sha256="0" * 64))
    changed = run_difference(locate_run(first.path), locate_run(second.path))
    assert changed.differs and f"{manifest.cells[1].label}: 1 of 5 units differ" in changed.lines


def test_the_run_of_a_plan_does_not_depend_on_where_it_is_run() -> None:
    """More GPUs or shorter passes regroup the same work, so they go on with the same run."""

    def fingerprint(changed: Plan) -> str:
        from replayeval.sweep.runner import plan_manifest

        return plan_manifest(changed, SyntheticMeasurer().prepare(expand(changed))).fingerprint

    base = plan()
    models = tuple(model.model_copy(update={"gpus": 2, "device": "cuda:0"}) for model in base.models)
    grids = tuple(grid.model_copy(update={"chunk": 64}) for grid in base.grids)
    assert fingerprint(base.model_copy(update={"models": models, "grids": grids})) == fingerprint(base)
    other = tuple(grid.model_copy(update={"seeds": (1,)}) for grid in base.grids)
    assert fingerprint(base.model_copy(update={"grids": other})) != fingerprint(base)
