"""`measure_kl`: from a model, texts and policies to a result, one document at a time."""

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import replayssm
from replayeval.data import Document, default_docs, default_lengths_of, default_source, load_documents, make_documents
from replayeval.engine.checks import Check, check_floor, control_arm
from replayeval.engine.fitting import Fitting
from replayeval.engine.forcing import DEFAULT_CHUNK, DocumentTokens, Engine, Forcing
from replayeval.engine.precision import exact_float32
from replayeval.engine.scoring import Scorer
from replayeval.errors import ConfigError
from replayeval.models.attention import attention_name
from replayeval.models.head import OutputHead
from replayeval.policies import parse_policies
from replayeval.report import schema
from replayeval.report.from_summary import timing_report
from replayeval.report.result import KLResult
from replayeval.stats import summarise_kl
from replayeval.store import DocumentScores, RunDirectory, RunIdentity, RunManifest, provenance
from replayeval.subject import (
    Subject,
    bits_per_element,
    check_execution,
    check_formats,
    device_name,
    execution_record,
    load_subject,
    parse_engine,
    parse_execution,
    parse_seed,
    self_checks,
)
from replayssm.backend import Backend
from replayssm.policy import DEFAULT_WINDOW, REFERENCE, Policy

DEFAULT_MODEL = "builtin:gdn"

Progress = Callable[[int, int], None]


def measure_kl(
    model: PreTrainedModel | str = DEFAULT_MODEL,
    documents: Sequence[str | Sequence[int] | Document] | None = None,
    *,
    arms: Sequence[Policy | str] | None = None,
    precision: str | None = None,
    window: int = DEFAULT_WINDOW,
    data: str | Path | None = None,
    lengths: Sequence[int] | None = None,
    docs: int | None = None,
    engine: str = Engine.CHUNK,
    backend: str = Backend.TORCH,
    chunk: int = DEFAULT_CHUNK,
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    prefill: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> KLResult:
    """Measure how far state policies move a model's output distribution from that of a float32 state.

    Args:
        model: A hub id, a directory, `builtin:NAME`, or a model that is already loaded.
        documents: Texts or token ids in memory; `data` names a source instead.
        arms: Policies, as values or text (`"separate:nvfp4/fp16+sr@L=32"`).
        precision: A format that stands for its five default arms; `nvfp4` when neither this nor `arms` is given.
        window: Replay window in tokens of policies that name none.
        data: `builtin`, `pg19`, a file or a directory; `builtin` for a built-in model, else `pg19`.
        lengths: Generation lengths to report, in tokens.
        docs: Documents to score.
        engine: `chunk`, or `step` for its token-by-token oracle.
        backend: What advances the states: `torch`, or on a CUDA device `triton`, whose products may be coarser
            (`triton:tf32`, `triton:bf16`).
        chunk: Tokens per forward pass. It changes results by no more than float32 rounding does: until a rounding
            decision falls the other way, and then within the noise that such a flip brings.
        dtype: Dtype of the weights when a model is loaded here.
        device: Where it is loaded.
        seed: Seed of stochastic rounding and of the bootstrap.
        prefill: Tokens at the start of each document that are its prompt.
        out: Directory that keeps the scores of every token, one document at a time.
        resume: Go on with what is missing in `out`.
        revision: Branch, tag or commit of a hub model.
        trust_remote_code: Let a tokenizer run code from its repository.
        tokenizer: Tokenizer of a loaded model, for documents that are texts.
        progress: Called with the tokens done and their total, after each forward pass.

    Returns:
        The result: `.table()`, `.to_pandas()`, `.plot()`, `.to_json()`.

    Raises:
        ConfigError: Input that cannot be used.
        StoreError: A run directory that cannot be used.
        NumericsError: A self-check failed; nothing measured can be trusted.

    Source: ReplaySSM, output KL divergence by generation length.
    """
    arguments = _arguments(locals())
    policies = parse_policies(arms, precision, window)
    execution = parse_execution(backend)
    forcing = Forcing(
        arms=policies,
        engine=parse_engine(engine),
        chunk_tokens=chunk,
        prefill_tokens=prefill,
        seed=parse_seed(seed),
        execution=execution,
        scorer=Scorer.TRITON if execution.backend is Backend.TRITON else Scorer.TORCH,
    )
    source = _source(model, documents, data)
    wanted = tuple(sorted({int(n) for n in lengths})) if lengths is not None else default_lengths_of(source)
    if not wanted or wanted[0] < 1:
        raise ConfigError(f"expected generation lengths of at least 1 token, got {list(wanted)}")
    subject = load_subject(
        model, tokenizer, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
    )
    check_formats(policies, subject.layers)
    check_execution(forcing.execution, forcing.policies, subject)
    # One token more than is read: it is the next token of the last one.
    needed: dict[str, Any] = {
        "tokens": prefill + wanted[-1] + 1,
        "lengths": wanted,
        "prefill_tokens": prefill,
        "vocab_size": subject.head.vocabulary,
    }
    if documents is not None:
        texts = make_documents(documents, subject.tokenizer, **needed)
    else:
        count = default_docs(source) if docs is None else docs
        texts = load_documents(source, subject.tokenizer, docs=count, seed=seed, **needed)
    run_provenance = provenance(
        device=device_name(subject.head), given=arguments["given"], defaulted=arguments["defaulted"]
    )
    identity = _identity(subject, forcing, texts, source=source, lengths=wanted, window=window, hashed=out is not None)
    bits = {str(p): bits_per_element(p, subject.layers) for p in policies}
    with exact_float32(), _run_directory(out, identity, run_provenance, resume=resume) as run:
        scores, checks = _score(subject.head, texts, forcing, run, read=prefill + wanted[-1], progress=progress)
        if run is not None:
            run.finish(results={"checks": [asdict(c) for c in checks], "bits_per_element": bits})
    control = control_arm(policies)
    summary = summarise_kl(scores, lengths=wanted, floor_arm=None if control is None else str(control), seed=seed)
    return KLResult.build(
        scores=scores,
        summary=summary,
        model=subject.name,
        reference=str(REFERENCE),
        window=window,
        bits_per_element=bits,
        checks=[_check_record(c) for c in checks],
        timing=timing_report(scores, rows=len(forcing.policies)),
        provenance={
            **run_provenance,
            "data": source,
            "states": execution_record(forcing.execution),
            "attention": attention_name(subject.head.config, subject.head.input_device),
            "scores": str(forcing.scorer),
            "model": dict(subject.details),
            "fingerprint": identity.fingerprint,
        },
    )


def _score(
    head: OutputHead,
    texts: Sequence[Document],
    forcing: Forcing,
    run: RunDirectory | None,
    *,
    read: int,
    progress: Progress | None,
) -> tuple[list[DocumentScores], list[Check]]:
    """Score what is missing, document by document, between the self-checks."""
    documents = [
        DocumentTokens(index=i, doc_id=d.doc_id, tokens=d.token_ids, read_tokens=min(len(d), read))
        for i, d in enumerate(texts)
    ]
    checks = self_checks(head, documents[0], forcing)
    control = control_arm(forcing.arms)
    total = sum(d.read_tokens for d in documents)
    done = 0
    scores: list[DocumentScores] = []
    fitting = Fitting()
    for document in documents:
        if run is not None and run.has(document.index):
            scores.append(run.read(document.index))
            done += document.read_tokens
            if progress is not None:
                progress(done, total)
        else:
            before = done

            def advanced(tokens: int, *, before: int = before) -> None:
                nonlocal done
                done += tokens
                if progress is not None:
                    progress(done, total)

            scores.append(fitting.score(head, document, forcing, progress=advanced))
            if run is not None:
                run.write(scores[-1])
        # As soon as the control arm fails, hours of further numbers would be worthless.
        check_floor(scores, control, dtype=head.model.dtype)
    checks.append(check_floor(scores, control, dtype=head.model.dtype))
    return scores, checks


def _source(model: PreTrainedModel | str, documents: Sequence[Any] | None, data: str | Path | None) -> str:
    if documents is not None:
        if data is not None:
            raise ConfigError(f"expected either documents or data, got both (data={data})")
        return "documents in memory"
    if data is not None:
        return str(data)
    return default_source(model if isinstance(model, str) else "")


def _identity(
    subject: Subject,
    forcing: Forcing,
    texts: Sequence[Document],
    *,
    source: str,
    lengths: tuple[int, ...],
    window: int,
    hashed: bool,
) -> RunIdentity:
    return RunIdentity(
        kind="kl",
        model=subject.name,
        revision=subject.revision,
        weights_sha256=subject.weights_sha256() if hashed else None,
        reference=str(REFERENCE),
        arms=tuple(str(a) for a in forcing.arms),
        data=source,
        documents=tuple(d.doc_id for d in texts),
        lengths=lengths,
        prefill_tokens=forcing.prefill_tokens,
        seed=forcing.seed,
        engine=str(forcing.engine),
        dtype=str(subject.head.model.dtype).removeprefix("torch."),
        window_tokens=window,
        extra={"numerics": replayssm.NUMERICS_VERSION, "backend": str(forcing.execution)},
    )


@contextmanager
def _run_directory(
    out: str | Path | None, identity: RunIdentity, run_provenance: Mapping[str, Any], *, resume: bool
) -> Generator[RunDirectory | None]:
    if out is None:
        if resume:
            raise ConfigError("expected a directory to resume, got resume without out")
        yield None
        return
    with RunDirectory.create(
        out, manifest=RunManifest.start(identity, provenance=run_provenance), resume=resume
    ) as run:
        yield run


def _check_record(check: Check) -> schema.Check:
    notes = {} if check.reason is None else {"passed": check.reason}
    return schema.Check(name=check.name, passed=check.passed, value=check.value, limit=check.limit, notes=notes)


def _arguments(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Which arguments were passed and which took their default, as JSON values."""
    defaults = {n: p.default for n, p in inspect.signature(measure_kl).parameters.items()}
    shown = {n: _shown(v) for n, v in values.items() if n not in ("progress", "documents", "tokenizer")}
    given = {n: v for n, v in shown.items() if v != _shown(defaults[n])}
    return {"given": given, "defaulted": {n: v for n, v in shown.items() if n not in given}}


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_shown(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
    return str(value) if isinstance(value, Policy | Path) else type(value).__name__
