"""The model class `replayssm` against lm-eval's own `hf`, and what it refuses."""

import json
from pathlib import Path
from typing import Any, cast

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import hash_string

from replayeval.engine import generation_batch
from replayeval.engine.generation import Generator as Engine
from replayeval.engine.generation_sampling import Sampling
from replayeval.errors import ConfigError, UnsupportedArmError
from replayeval.models.builtin.catalog import builtin_path
from replayeval.tasks.lm import NO_LIMIT, ReplayLM
from replayeval.tasks.lm_arguments import split_arguments
from replayeval.tasks.lm_requests import occurrences, prompt_hash, stream, wanted
from tests.models import tiny

# lm-eval is untyped, or typed by decorators that lose its types.
Plain: Any = HFLM
Own: Any = ReplayLM
evaluate: Any = lm_eval.simple_evaluate
Manager: Any = TaskManager

# lm-eval and what it loads warn of their own affairs.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_quiet_thread")]

PROMPTS = ("In the beginning God", "And it came to pass that", "The quick brown fox jumps", "x")
CHOICES = (" created the heaven", " a", " over the lazy dog\n")
POLICY = "separate:nvfp4/fp16+sr"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("qwen3_5", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def small(directory: Path) -> Any:
    return Own(str(directory), policy=POLICY, window=4, seed=7, device="cpu", batch_size=3)


def generations(prompts: tuple[str, ...] = PROMPTS, **kwargs: Any) -> list[Instance]:
    arguments = {"until": ["\n"], "max_gen_toks": 10, "do_sample": False, **kwargs}
    return [Instance("generate_until", {}, (p, dict(arguments)), 0, ("task", i, 1)) for i, p in enumerate(prompts)]


def likelihoods() -> list[Instance]:
    return [
        Instance("loglikelihood", {}, (prompt, choice), 0, ("task", i, 1))
        for i, prompt in enumerate((*PROMPTS[:2], ""))
        for choice in CHOICES
    ]


def rolling() -> list[Instance]:
    return [Instance("loglikelihood_rolling", {}, (prompt,), 0, ("task", i, 1)) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_the_reference_answers_like_the_hf_model_on_a_built_in_checkpoint(name: str) -> None:
    plain = Plain(pretrained=str(builtin_path(name)), device="cpu", dtype="float32", batch_size=1)
    own = Own(f"builtin:{name}", policy="conventional:fp32", device="cpu", dtype="float32", batch_size=3)
    assert own.generate_until(generations(), disable_tqdm=True) == plain.generate_until(
        generations(), disable_tqdm=True
    )
    # Sums of up to twenty log-probabilities in float32, in nats.
    for mine, theirs in zip(
        own.loglikelihood(likelihoods(), disable_tqdm=True),
        plain.loglikelihood(likelihoods(), disable_tqdm=True),
        strict=True,
    ):
        assert mine[0] == pytest.approx(theirs[0], abs=2e-3)
        assert mine[1] is theirs[1]
    wanted_sums = plain.loglikelihood_rolling(rolling(), disable_tqdm=True)
    assert own.loglikelihood_rolling(rolling(), disable_tqdm=True) == pytest.approx(wanted_sums, abs=2e-3)


def test_a_policy_changes_scores_and_the_switch_says_where(small: Any) -> None:
    def scores(**kwargs: Any) -> list[float]:
        lm = Own(small.model, tokenizer=small.tokenizer, batch_size=4, **{"policy": POLICY, "seed": 7, **kwargs})
        return [score for score, _ in lm.loglikelihood(likelihoods(), disable_tqdm=True)]

    reference = scores(policy="conventional:fp32")
    prompt, decoded = scores(policy="shared:nvfp4@L=2"), scores(policy="shared:nvfp4@L=2", context="decoded")
    longer = [i for i, request in enumerate(likelihoods()) if len(cast(Any, request).args[1]) > 2]
    assert max(abs(prompt[i] - reference[i]) for i in longer) > 0.01
    assert max(abs(decoded[i] - prompt[i]) for i in longer) > 0.01


def test_records_say_how_each_answer_came_about(small: Any) -> None:
    asked = [request for request in generations(PROMPTS[:2]) for _ in range(2)]
    texts = small.generate_until(asked, disable_tqdm=True)
    assert set(small.generation_records) == {(hash_string(p), repeat) for p in PROMPTS[:2] for repeat in (0, 1)}
    for place, request in enumerate(asked):
        record = small.generation_records[prompt_hash(request.args[0]), place % 2]
        text = small.tok_decode(list(record.output_tokens))
        assert texts[place] == text.split("\n")[0]
        assert record.prompt_tokens == len(request.args[0])
        assert (record.seed, record.truncated) == (7, record.finish == "length")
        assert record.sampling == Sampling()
    assert len({r.sequence for r in small.generation_records.values()}) == 4


def test_repeats_of_a_sampled_prompt_differ_and_depend_on_nothing_beside_them(small: Any) -> None:
    drawn = {"do_sample": True, "temperature": 1.5, "until": [], "max_gen_toks": 6}
    one = [request for request in generations(PROMPTS[:1], **drawn) for _ in range(3)]
    texts = small.generate_until(one, disable_tqdm=True)
    assert len(set(texts)) == 3
    among = [*generations(PROMPTS[1:3], **drawn), *one, *generations(PROMPTS[3:], **drawn)]
    assert small.generate_until(among, disable_tqdm=True)[2:5] == texts


def test_nothing_is_truncated(small: Any) -> None:
    lm = Own(small.model, policy=POLICY, tokenizer=small.tokenizer, max_length=24)
    with pytest.raises(ConfigError, match=r"at most 24 tokens, got 3 of 4 requests .* request 2, has a prompt of 25"):
        lm.generate_until(generations(), disable_tqdm=True)
    with pytest.raises(ConfigError, match=r"max_gen_toks=N, or raise the limit .* max_length=N"):
        lm.generate_until(generations(), disable_tqdm=True)
    with pytest.raises(ConfigError, match="a context of 24 tokens and a continuation of"):
        lm.loglikelihood(likelihoods(), disable_tqdm=True)
    assert len(lm.generate_until(generations(("short",)), disable_tqdm=True)) == 1
    # Windows are how lm-eval defines the score of a text that is longer than the model takes.
    window = Own(small.model, policy="conventional:fp32", tokenizer=small.tokenizer, max_length=9)
    plain = Plain(pretrained=small.model, tokenizer=small.tokenizer, max_length=9)
    assert window.loglikelihood_rolling(rolling(), disable_tqdm=True) == pytest.approx(
        plain.loglikelihood_rolling(rolling(), disable_tqdm=True), abs=2e-3
    )


def test_a_model_without_positions_has_no_longest_text() -> None:
    lm = Own(tiny.shared("mamba2"), policy=POLICY, tokenizer=tiny.tokenizer())
    assert lm.max_length == NO_LIMIT
    with pytest.raises(ConfigError, match="at least 1 token"):
        lm.generate_until(generations(("",)), disable_tqdm=True)


def test_auto_halves_the_rows_until_memory_suffices(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    generate = Engine.generate

    def short(self: Engine, requests: Any, **kwargs: Any) -> Any:
        tried.append(self._slots)
        if self._slots > 2:
            raise torch.OutOfMemoryError("too many rows")
        return generate(self, requests, **kwargs)

    monkeypatch.setattr(Engine, "generate", short)
    how = {"policy": POLICY, "tokenizer": small.tokenizer, "window": 4, "seed": 7}
    lm = Own(small.model, batch_size="auto", max_batch_size=8, **how)
    answers = lm.generate_until(generations(), disable_tqdm=True)
    assert (tried, lm.batch_sizes) == ([8, 4, 2], {0: 2})
    monkeypatch.undo()
    assert answers == small.generate_until(generations(), disable_tqdm=True)
    monkeypatch.setattr(Engine, "generate", short)
    with pytest.raises(torch.OutOfMemoryError):
        Own(small.model, batch_size=8, **how).generate_until(generations(), disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "separate:nvfp4"}, "two formats"),
        ({"policy": "shared:nvfp5"}, "nvfp5"),
        ({"window": 0}, "window"),
        ({"window": "many"}, "window"),
        ({"seed": -1}, "seed from 0"),
        ({"context": "both"}, "context=prompt or context=decoded"),
        ({"polcy": "x"}, "unknown polcy; did you mean policy"),
        ({"peft": "adapter"}, "peft is not supported"),
        ({"truncation": True}, "truncation is not supported"),
        ({"backend": "seq2seq"}, "causal"),
        ({"batch_size": "some"}, "batch_size"),
        ({"max_length": 0}, "max_length"),
        ({"state_backend": "cuda"}, "state_backend: expected a backend"),
        ({"pretrained": "builtin:gnd"}, "did you mean 'gdn'"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_followed_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Own(**{"pretrained": "builtin:gdn", **arguments})


def test_a_backend_that_cannot_run_is_refused_before_anything_runs(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_batch, "triton_problem", lambda _: "Triton kernels need a CUDA device")
    with pytest.raises(UnsupportedArmError, match="need a CUDA device"):
        Own(small.model, policy=POLICY, tokenizer=small.tokenizer, state_backend="triton")
    monkeypatch.setattr(generation_batch, "triton_problem", lambda _: None)
    with pytest.raises(UnsupportedArmError, match="layer 0: policy shared:int8"):
        Own(small.model, policy="shared:int8[ef=int8]", tokenizer=small.tokenizer, state_backend="triton")
    assert Own(small.model, policy=POLICY, tokenizer=small.tokenizer).get_model_info()["state_backend"] == "torch"


def test_arguments_may_hold_commas_inside_brackets(directory: Path) -> None:
    lm = Own.create_from_arg_string(
        f"pretrained={directory},policy=shared:fp8[tile=32,max=240]+sr,window=8,seed=3",
        {"batch_size": 2, "device": None},
    )
    assert str(lm.policy) == "shared:fp8[tile=32,max=240]+sr@L=8"
    assert (lm.seed, lm.batch_size) == (3, 2)
    assert split_arguments("a=1,b=[x,y],,c={1,2}") == ["a=1", "b=[x,y]", "c={1,2}"]
    info = json.loads(json.dumps(lm.get_model_info()))
    assert (info["policy"], info["state_backend"], info["model_dtype"]) == (str(lm.policy), "torch", "float32")
    for text, message in (("policy=x", "pretrained=MODEL"), ("builtin:gdn", "key=value")):
        with pytest.raises(ConfigError, match=message):
            Own.create_from_arg_string(text)


def test_plain_passes_of_the_base_class_are_refused(small: Any) -> None:
    for call in (small._model_call, small._model_generate):
        with pytest.raises(NotImplementedError, match="under a state policy"):
            call(torch.tensor([[1]]))


def read(asked: dict[str, Any], model: dict[str, Any] | None = None) -> Any:
    return wanted(asked, model=model or {}, eos="<eos>", default_tokens=256)


def test_generation_arguments_are_read_as_the_hf_model_reads_them() -> None:
    assert read({"until": "\n", "max_gen_toks": 5}).until == ("\n", "<eos>")
    assert read({}).max_tokens == 256
    assert read({"max_new_tokens": 7, "temperature": 0.0, "num_beams": 1, "repetition_penalty": 1.0}).max_tokens == 7
    assert read({"temperature": 0.6, "top_p": 0.9}).sampling == Sampling(temperature=0.6, top_p=0.9)
    assert read({"do_sample": False, "temperature": 0.6}).sampling == Sampling()
    own = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert read({"do_sample": True}, own).sampling == Sampling(temperature=0.7, top_k=20, top_p=0.8)
    assert read({"do_sample": True, "temperature": 1.0, "top_k": 5}, own).sampling == Sampling(
        temperature=1.0, top_k=5, top_p=0.8
    )
    assert read({"do_sample": False}, own).sampling == Sampling()


@pytest.mark.parametrize(
    ("asked", "model", "message"),
    [
        ({"num_beams": 4}, {}, "num_beams=4"),
        ({"min_p": 0.1, "temperature": 1.0}, {}, "min_p=0.1"),
        ({"stop_strings": ["x"]}, {}, "stop_strings"),
        ({"max_length": 40}, {}, "max_length=40"),
        ({}, {"repetition_penalty": 1.05}, "--gen_kwargs repetition_penalty=1.0"),
        ({"do_sample": True, "temperature": 0.0}, {}, "temperature above 0"),
        ({"temperature": "hot"}, {}, "hot"),
        ({"do_sample": "off"}, {}, r"do_sample='off' \(true or false\)"),
        ({"do_sample": 0}, {}, "do_sample=0"),
        ({"top_k": 2.5, "top_p": True}, {}, r"top_p=True \(a number\), top_k=2.5 \(a whole number\)"),
        ({"temperature": 1.0, "top_p": 2.0}, {}, "top_p"),
        ({"max_gen_toks": 0}, {}, "max_gen_toks of at least 1"),
        ({"until": 3.5}, {}, "3.5"),
    ],
    ids=str,
)
def test_generation_arguments_that_would_change_the_answer_are_refused(
    asked: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(asked, model)


def test_a_penalty_of_the_model_can_be_switched_off() -> None:
    assert read({"repetition_penalty": 1.0}, {"repetition_penalty": 1.05}).max_tokens == 256


def test_addresses_of_random_bits_depend_on_every_part() -> None:
    assert occurrences(["a", "b", "a", "a"]) == [0, 0, 1, 2]
    numbers = {stream("ab", 0), stream("ab", 1), stream("a", "b0"), stream("ba", 0), stream("ab")}
    assert len(numbers) == 5 and all(0 <= n < 2**32 for n in numbers)


def local_arc(folder: Path) -> Path:
    """lm-eval's own arc_easy, reading local files of the same format."""
    questions = [
        ("What colour is the sky?", ["blue", "green", "red"], "A"),
        ("Which animal barks?", ["cat", "dog", "cow", "ant"], "B"),
    ]
    rows = [
        {
            "id": str(i),
            "question": question,
            "choices": {"text": texts, "label": list("ABCD")[: len(texts)]},
            "answerKey": key,
        }
        for i, (question, texts, key) in enumerate(questions)
    ]
    data = folder / "arc.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = Path(lm_eval.__file__).parent / "tasks" / "arc" / "arc_easy.yaml"
    task = folder / "arc_local.yaml"
    files = "".join(f"    {split}: {data}\n" for split in ("train", "validation", "test"))
    task.write_text(
        f"include: {own}\ntask: arc_easy\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs:\n  data_files:\n{files}"
    )
    return task


def test_arc_easy_runs_unchanged_from_local_files(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    task = str(local_arc(tmp_path))
    # Without lm-eval's own index of thousands of tasks, which takes longer than all the rest.
    manager = Manager(include_defaults=False)
    how: dict[str, Any] = {"tasks": [task], "bootstrap_iters": 0, "device": "cpu", "task_manager": manager}
    own = evaluate("replayssm", f"pretrained={directory},policy=conventional:fp32", batch_size=4, **how)
    plain = evaluate("hf", f"pretrained={directory},dtype=float32", **how)
    assert own is not None and plain is not None
    assert own["results"]["arc_easy"]["acc,none"] == plain["results"]["arc_easy"]["acc,none"]
    for mine, theirs in zip(own["samples"]["arc_easy"], plain["samples"]["arc_easy"], strict=True):
        assert [r[0][0] for r in mine["resps"]] == pytest.approx([r[0][0] for r in theirs["resps"]], abs=2e-3)
    assert own["config"]["policy"] == "conventional:fp32"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["niah_single_1", "ruler_vt"])
def test_tasks_of_ruler_run_unchanged(task: str) -> None:
    manager = Manager(metadata={"tokenizer": str(builtin_path("gdn")), "max_seq_lengths": [1024]})
    # Written once, because they draw their texts anew whenever they are loaded.
    texts = manager.load([task])["tasks"][task]
    how: dict[str, Any] = {"tasks": [texts], "limit": 1, "bootstrap_iters": 0, "device": "cpu", "task_manager": manager}
    plain = evaluate("hf", {"pretrained": str(builtin_path("gdn")), "dtype": "float32"}, **how)
    own = evaluate("replayssm", "pretrained=builtin:gdn,policy=conventional:fp32", batch_size=2, **how)
    assert own is not None and plain is not None
    mine, theirs = own["samples"][task], plain["samples"][task]
    assert [s["prompt_hash"] for s in mine] == [s["prompt_hash"] for s in theirs]
    assert [s["resps"] for s in mine] == [s["resps"] for s in theirs]
