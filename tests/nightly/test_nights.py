"""Several nights: a planted regression is found, noise is not, and what follows a finding."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from replayeval.errors import ConfigError, StoreError
from replayeval.nightly.cells import night_cell
from replayeval.nightly.compare import compare
from replayeval.nightly.night import Night, accept
from replayeval.nightly.record import Finding, History, Kind, Metric, NightRecord
from replayeval.stats.history import Method
from tests.nightly.nights import FP8, NVFP4, Weather, measured, name, play

CALM = Weather()
WORSE = Weather(factor={FP8: 1.4})


PROVENANCE: dict[str, object] = {"versions": {"torch": "1"}, "git": {"commit": "abc", "dirty": False}, "python": "3"}


@pytest.fixture(autouse=True)
def short_nights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and provenance take most of the time of a night; the tests of pages look at them."""
    monkeypatch.setattr("replayeval.nightly.night.provenance", lambda device: dict(PROVENANCE))
    monkeypatch.setattr("replayeval.nightly.night.write_night", lambda history, nights, reports, limits=None: history)


def kinds(night: Night) -> dict[tuple[str, str], Kind]:
    return {(f.series.policy, f"{f.series.metric}/{f.series.where}"): f.kind for f in night.record.findings}


def only(findings: Iterable[Finding], kind: Kind) -> list[Finding]:
    return [finding for finding in findings if finding.kind is kind]


def test_a_planted_regression_is_found_kept_open_and_resolved(tmp_path: Path) -> None:
    calm = play(tmp_path, [CALM] * 9)
    assert [night.record.findings for night in calm] == [()] * 9
    assert all(night.passed for night in calm)

    (worse,) = play(tmp_path, [WORSE], first=9)
    assert not worse.passed
    # Likelihoods follow KL here; no other arm is named.
    changed = {(FP8, "kl/32"), (FP8, "kl/64"), (FP8, "nll_delta/64")}
    assert kinds(worse) == dict.fromkeys(changed, Kind.REGRESSION)
    found = worse.record.findings[0]
    assert found.since == name(9)
    assert found.method is Method.NIGHTS
    assert (found.nights_before, found.documents) == (9, 8)
    assert found.change == pytest.approx(1.4, rel=0.12)
    assert found.ci95 is not None
    assert found.change is not None
    assert found.ci95[0] < found.change < found.ci95[1]

    (still,) = play(tmp_path, [WORSE], first=10)
    assert not still.passed
    assert kinds(still) == dict.fromkeys(changed, Kind.OPEN)
    assert still.record.findings[0].since == name(9)
    # The baseline is still that of the nights before it began.
    assert still.record.findings[0].nights_before == 9

    back = play(tmp_path, [CALM] * 3, first=11)
    assert kinds(back[0]) == dict.fromkeys(changed, Kind.RESOLVED)
    assert [night.passed for night in back] == [True] * 3
    assert back[1].record.findings == back[2].record.findings == ()


def test_noise_is_not_flagged(tmp_path: Path) -> None:
    nights = play(tmp_path, [CALM] * 16)
    assert [night.record.findings for night in nights] == [()] * 16
    # Eight series are followed; with the first night there is nothing to compare with.
    assert [night.record.tested for night in nights[:2]] == [0, 12]


def test_a_creeping_regression_is_found_although_no_night_differs_much_from_the_last(tmp_path: Path) -> None:
    creeping = [Weather(factor={FP8: 1.02**step}) for step in range(1, 13)]
    nights = play(tmp_path, [*[CALM] * 8, *creeping])
    found = [number for number, night in enumerate(nights) if not night.passed]
    assert found, "a KL that grows by 2% a night is never found"
    assert found[0] >= 10
    assert {policy for night in nights for policy, _ in kinds(night)} == {FP8}


def _drawn(histories: int) -> list[list[NightRecord]]:
    """Nine nights without a change, many times over."""
    return [
        [
            _record(number, tuple(night_cell(result) for result in measured(CALM, seed=1000 * history + number)))
            for number in range(9)
        ]
        for history in range(histories)
    ]


def _share_with_findings(histories: list[list[NightRecord]], alpha: float) -> float:
    found = [compare(h[-1].cells, h[:-1], night=name(8), alpha=alpha, tolerance=0.0).findings for h in histories]
    return sum(map(bool, found)) / len(found)


def test_false_findings_are_as_rare_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short histories without a change, at a level at which a broken correction shows after few of them."""
    histories = _drawn(24)
    # Three standard errors of a share of 0.2 in 24 histories are 0.25.
    assert _share_with_findings(histories, alpha=0.2) <= 0.2 + 0.25
    monkeypatch.setattr("replayeval.nightly.compare.holm", lambda p_values: p_values)
    assert _share_with_findings(histories, alpha=0.2) > 0.2 + 0.25


@pytest.mark.slow
def test_false_findings_at_five_percent() -> None:
    trials = 300
    assert _share_with_findings(_drawn(trials), alpha=0.05) <= 0.05 + 3 * (0.05 * 0.95 / trials) ** 0.5


def _record(number: int, cells: tuple[object, ...]) -> NightRecord:
    return NightRecord(
        night=name(number),
        plan="nightly",
        cells=cells,  # pyright: ignore[reportArgumentType]
        findings=(),
        tested=0,
        untested=0,
        alpha=0.01,
        tolerance=0.05,
        provenance={},
    )


def test_nights_that_agree_bit_by_bit_tell_a_change_at_once(tmp_path: Path) -> None:
    play(tmp_path, [CALM] * 2, seed=0)
    (small,) = play(tmp_path, [Weather(factor={FP8: 1.03})], first=2, seed=0)
    assert small.record.findings == ()
    (large,) = play(tmp_path / "other", [CALM] * 2, seed=0)[:1]
    assert large.passed
    (large,) = play(tmp_path / "other", [Weather(factor={FP8: 1.08})], first=2, seed=0)
    assert kinds(large) == {(FP8, "kl/32"): Kind.REGRESSION, (FP8, "kl/64"): Kind.REGRESSION}
    assert large.record.findings[0].method is Method.IDENTICAL
    assert large.record.findings[0].change == pytest.approx(1.08)


def test_an_improvement_is_the_new_level(tmp_path: Path) -> None:
    better = Weather(factor={NVFP4: 0.5})
    nights = play(tmp_path, [*[CALM] * 8, *[better] * 8])
    assert kinds(nights[8])[NVFP4, "kl/64"] is Kind.IMPROVEMENT
    assert all(night.passed for night in nights)
    assert all(not night.record.findings for night in nights[9:])
    # Half the gain lost again is a regression against the new level, though better than the nights at the beginning.
    (lost,) = play(tmp_path, [Weather(factor={NVFP4: 0.75})], first=16)
    assert kinds(lost)[NVFP4, "kl/64"] is Kind.REGRESSION
    assert lost.record.findings[0].change == pytest.approx(1.5, rel=0.12)


def test_an_accepted_regression_is_the_new_level(tmp_path: Path) -> None:
    play(tmp_path, [*[CALM] * 8, WORSE])
    record = accept(tmp_path)
    assert {series.policy for series in record.accepted} == {FP8}
    assert not record.regressions
    nights = play(tmp_path, [WORSE] * 3, first=9)
    assert all(night.passed for night in nights)
    assert kinds(nights[0]) == {}


def test_a_divergence_is_a_regression_without_a_test(tmp_path: Path) -> None:
    play(tmp_path, [CALM] * 2)
    nights = play(tmp_path, [Weather(diverged=(NVFP4,))] * 2, first=2)
    assert kinds(nights[0])[NVFP4, "kl/64"] is Kind.REGRESSION
    # It diverges at 40, and up to 32 there is nothing to say.
    assert (NVFP4, "kl/32") not in kinds(nights[0])
    assert "diverged before generation length 64, and did not before" in nights[0].record.findings[0].text
    assert kinds(nights[1])[NVFP4, "kl/64"] is Kind.OPEN
    (back,) = play(tmp_path, [CALM], first=4)
    assert kinds(back)[NVFP4, "kl/64"] is Kind.RESOLVED
    always = play(tmp_path / "always", [Weather(diverged=(NVFP4,))] * 3)
    assert all(night.passed for night in always)


def test_other_weights_begin_anew(tmp_path: Path) -> None:
    play(tmp_path, [CALM] * 8)
    (night,) = play(tmp_path, [Weather(factor={FP8: 3.0}, settings={"pin": {"revision": "def"}})], first=8)
    assert night.passed
    assert night.record.tested == 0
    assert night.record.restarted == (
        "builtin:gdn, builtin to 64, L=16: pin.revision changed, so its series begin anew",
    )


def test_documents_that_both_nights_have_are_compared(tmp_path: Path) -> None:
    play(tmp_path, [CALM] * 8)
    (night,) = play(tmp_path, [Weather(documents=tuple(range(2, 30)), factor={FP8: 1.4})], first=8)
    found = only(night.record.findings, Kind.REGRESSION)
    assert {(f.series.policy, f.documents) for f in found} == {(FP8, 6)}
    # Twenty harder or easier documents of their own do not count.
    (other,) = play(tmp_path / "x", [CALM])
    (other,) = play(tmp_path / "x", [Weather(documents=tuple(range(20, 40)))], first=1)
    assert other.record.tested == 0


@pytest.mark.parametrize("away", ["arm", "cell", "documents"])
def test_a_night_that_lacks_a_series_does_not_hide_those_before_it(away: str) -> None:
    """A night without the arm, without its cell, or on two documents only; then KL ten times as high."""
    cells = [tuple(night_cell(result) for result in measured(CALM, seed=number)) for number in range(9)]
    if away == "arm":
        values = {policy: numbers for policy, numbers in cells[8][0].values.items() if policy != FP8}
        cells[8] = (cells[8][0].model_copy(update={"values": values}),)
    elif away == "cell":
        cells[8] = ()
    else:
        cells[8] = tuple(night_cell(result) for result in measured(Weather(documents=(0, 1)), seed=8))
    history = [_record(number, of_night) for number, of_night in enumerate(cells)]
    tonight = [night_cell(result) for result in measured(Weather(factor={FP8: 10.0}), seed=9)]
    found = compare(tonight, history, night=name(9))
    changed = only(found.findings, Kind.REGRESSION)
    assert {(f.series.policy, f.nights_before) for f in changed} == {(FP8, 8)}
    assert found.untested == 0


def test_tasks_are_followed_by_their_drop(tmp_path: Path) -> None:
    # Drops of some tenths of a point go up and down; then two points are lost.
    drops = [0.2, 0.4, 0.1, 0.3, 0.2, 0.4, 0.3]
    play(tmp_path, [Weather(drop=drop) for drop in drops])
    (night,) = play(tmp_path, [Weather(drop=2.3)], first=7)
    (found,) = night.record.findings
    assert (found.series.metric, found.series.where, found.kind) == (Metric.DROP, "recall", Kind.REGRESSION)
    assert found.change == pytest.approx(2.3 - sum(drops) / len(drops))


def test_a_night_counts_when_its_record_is_there(tmp_path: Path) -> None:
    play(tmp_path, [CALM] * 2)

    def broken(plan: object, out: Path, *, resume: bool) -> list[object]:
        out.mkdir(parents=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, [CALM], first=2, runner=broken)  # pyright: ignore[reportArgumentType]
    history = History(tmp_path)
    assert history.names()[-1] == name(2)
    assert history.finished() == [name(0), name(1)]


@pytest.mark.parametrize(
    ("dirty", "versions", "resumed"), [(False, {}, True), (True, {}, False), (False, {"torch": "0"}, False)]
)
def test_an_interrupted_night_is_gone_on_with_by_the_same_code_alone(
    dirty: bool, versions: dict[str, str], resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, object] = PROVENANCE | {"git": {"commit": "abc", "dirty": dirty}}
    monkeypatch.setattr("replayeval.nightly.night.provenance", lambda device: dict(said))
    seen: list[tuple[str, bool]] = []

    def broken(plan: object, out: Path, *, resume: bool) -> list[object]:
        out.mkdir(parents=True)
        raise KeyboardInterrupt

    def whole(plan: object, out: Path, *, resume: bool) -> list[object]:
        seen.append((out.parent.name, resume))
        return list(measured(CALM, seed=0))

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, [CALM], runner=broken)  # pyright: ignore[reportArgumentType]
    if versions:
        said["versions"] = versions
    play(tmp_path, [CALM], first=1, runner=whole)  # pyright: ignore[reportArgumentType]
    assert seen == [(name(0), True) if resumed else (name(1), False)]


def test_a_history_that_cannot_be_used(tmp_path: Path) -> None:
    play(tmp_path, [CALM])
    record = tmp_path / "nights" / name(0) / "night.json"
    content = record.read_text()
    record.write_text(content.replace('"plan": "nightly"', '"plan": "other"'))
    with pytest.raises(ConfigError, match="holds nights of the plan 'other', not of 'nightly'"):
        play(tmp_path, [CALM], first=1)
    record.write_text(content[:-20])
    with pytest.raises(StoreError, match=r"history is damaged: .* is not JSON.* Move .*02-00-00Z elsewhere"):
        play(tmp_path, [CALM], first=1)
    with pytest.raises(ConfigError, match="no finished night"):
        accept(tmp_path / "none")
    with pytest.raises(ConfigError, match="expected at least one cell"):
        play(tmp_path / "empty", [CALM], runner=lambda *_, **__: [])


def test_a_night_that_is_damaged_is_named(tmp_path: Path) -> None:
    play(tmp_path, [CALM])
    record = tmp_path / "nights" / name(0) / "night.json"
    content = json.loads(record.read_text())
    del content["cells"][0]["values"][FP8]["kl/64"][-1]
    record.write_text(json.dumps(content))
    with pytest.raises(StoreError, match=r"02-00-00Z/night\.json .*each of 8 documents, got 7 for kl/64 of shared:fp8"):
        play(tmp_path, [CALM], first=1)
    record.write_text(json.dumps(json.loads(record.read_text()) | {"cells": [], "night": name(5)}))
    with pytest.raises(StoreError, match=rf"damaged: .*{name(0)}/night\.json is that of the night {name(5)}"):
        play(tmp_path, [CALM], first=1)
    with pytest.raises(StoreError, match="is that of the night"):
        accept(tmp_path)


def test_a_report_folder_of_others_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("mine")
    with pytest.raises(ConfigError, match=r"report holds index\.html, which no report wrote"):
        play(tmp_path, [CALM], runner=lambda *_, **__: pytest.fail("measured"))
    assert History(tmp_path).names() == []


def test_two_processes_do_not_run_a_night_in_one_history(tmp_path: Path) -> None:
    lock = History(tmp_path).lock()
    assert lock is not None
    with pytest.raises(StoreError):
        play(tmp_path, [CALM])
    lock.close()
    play(tmp_path, [CALM])


def test_a_record_reads_back(tmp_path: Path) -> None:
    (night,) = play(tmp_path, [Weather(drop=0.3)])
    assert History(tmp_path).load() == [night.record]
    assert json.loads(night.record.to_json())["schema"] == "replayeval.night/1"
