"""The hook against each model's own cores, and what it leaves behind."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayeval.errors import ConfigError, NumericsError
from replayeval.models import inputs as inputs_module
from replayeval.models.architectures import ARCHITECTURES, Architecture
from replayeval.models.head import OutputHead
from replayeval.models.hook import hooked, ssm_layers
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.replay import StateBank
from replayssm.token_inputs import float32_tokens
from tests.models import tiny
from tests.models.agreement import LIMIT, PLANTED, TOKENS, gap, in_chunks, own_logits
from tests.models.driver import TokenByToken


@pytest.mark.parametrize("name", tiny.NAMES)
def test_reference_reproduces_the_model_for_every_way_to_cut_the_tokens(name: str) -> None:
    model, ids = tiny.shared(name), tiny.token_ids(2, TOKENS)
    expected = own_logits(model, ids)
    # Lengths 1 and 7, everything at once, and a prompt followed by single tokens.
    for cuts in ([1] * TOKENS, [7, 7, 5], [TOKENS], [TOKENS - 4, 1, 1, 1, 1]):
        assert gap(in_chunks(model, ids, cuts, TokenByToken()), expected) < LIMIT, cuts
    with hooked(model, TokenByToken()) as report:
        without_cache = model(input_ids=ids, use_cache=False).logits
        report.verify()
    assert gap(without_cache, expected) < LIMIT


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_state_bank_agrees_with_the_definition_under_the_hook(name: str) -> None:
    model, ids = tiny.shared(name), tiny.token_ids(2, TOKENS)
    padded = torch.cat([torch.full((2, 3), 7), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    exact, low = Policy.parse("conventional:fp32"), Policy.parse("shared:nvfp4@L=4")
    cuts = [10, 1, 1, TOKENS - 9]
    banked = in_chunks(model, padded, cuts, StateBank([exact, exact], sequences=[0, 1], seed=0), mask)
    defined = in_chunks(model, padded, cuts, TokenByToken(), mask)
    assert gap(banked[0, 3:], defined[0, 3:]) < LIMIT
    assert gap(banked[1], defined[1]) < LIMIT
    rounded = in_chunks(model, padded, cuts, StateBank([low, low], sequences=[0, 1], seed=0), mask)
    assert gap(rounded[1], defined[1]) > PLANTED  # a policy that rounds shows in the logits


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5", "kimi_linear"])
def test_chunks_longer_than_the_chunks_of_the_model(name: str) -> None:
    model, ids = tiny.shared(name), tiny.token_ids(1, 70)
    assert gap(in_chunks(model, ids, [64, 6], TokenByToken()), own_logits(model, ids)) < LIMIT


@pytest.mark.parametrize("name", tiny.NAMES)
def test_left_padding_changes_nothing(name: str) -> None:
    model, ids = tiny.shared(name), tiny.token_ids(2, TOKENS)
    expected = own_logits(model, ids)
    pads = 5
    padded = torch.cat([torch.full((2, pads), 7), ids], dim=1)
    padded[1] = torch.cat([ids[1], torch.zeros(pads, dtype=torch.int64)])  # the second row needs no padding
    mask = torch.ones_like(padded)
    mask[0, :pads] = 0
    # Single tokens too: transformers would take a padding token that comes alone for a real one.
    for cuts in ([TOKENS + pads], [1] * (TOKENS + pads), [3, 9, TOKENS + pads - 12]):
        driver = TokenByToken()
        got = in_chunks(model, padded, cuts, driver, mask)
        assert gap(got[0, pads:], expected[0]) < LIMIT, cuts
        assert gap(got[1, :TOKENS], expected[1]) < LIMIT, cuts
        assert any(v is not None for v in driver.valid)
        assert len(cuts) == 1 or driver.valid[-1] is None  # the last of several chunks holds no padding


@pytest.mark.parametrize("name", tiny.NAMES)
def test_right_padding_leaves_valid_tokens_and_states_alone(name: str) -> None:
    model, ids = tiny.shared(name), tiny.token_ids(2, TOKENS)
    plain, padded_driver = TokenByToken(), TokenByToken()
    expected = in_chunks(model, ids, [TOKENS], plain)
    padded = torch.cat([ids, torch.full((2, 4), 7)], dim=1)
    mask = torch.ones_like(padded)
    mask[:, TOKENS:] = 0
    got = in_chunks(model, padded, [TOKENS + 4], padded_driver, mask)
    assert gap(got[:, :TOKENS], expected) < LIMIT
    for layer, state in plain.states.items():
        assert gap(padded_driver.states[layer], state) < LIMIT


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that the hook could leave changed."""
    functions = {
        (a.module, name): getattr(importlib.import_module(a.module), name)
        for a in ARCHITECTURES
        for name in (core.name for core in a.cores.all)
    }
    hooks = {
        name: (
            list(m._forward_hooks),
            list(m._forward_pre_hooks),
            list(m._forward_hooks_always_called),
            list(m._forward_hooks_with_kwargs),
            list(m._forward_pre_hooks_with_kwargs),
            sorted(m.__dict__),
            m.training,
        )
        for name, m in model.named_modules()
    }
    return {"functions": functions, "hooks": hooks}


def assert_as_before(model: PreTrainedModel, before: dict[str, Any], weights: dict[str, Tensor]) -> None:
    after = snapshot(model)
    assert after["hooks"] == before["hooks"]
    assert all(after["functions"][key] is function for key, function in before["functions"].items())
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_nothing_of_the_model_changes(name: str) -> None:
    model, ids = tiny.build(name), tiny.token_ids(1, 9)
    # A mixture of modes, so that restoring the mode of the whole model at once would show.
    model.train()
    next(model.children()).eval()
    before, weights = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
    with hooked(model, TokenByToken()):
        assert not model.training and not torch.is_grad_enabled()
        model(input_ids=ids, use_cache=False)
    assert torch.is_grad_enabled()
    assert_as_before(model, before, weights)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next", "kimi_linear"])
def test_an_exception_inside_leaves_everything_restored(name: str) -> None:
    model, ids = tiny.build(name), tiny.token_ids(1, 9)
    expected = own_logits(model, ids)
    before, weights = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}

    class Failing:
        def advance(self, *args: Any, **kwargs: Any) -> Tensor:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), hooked(model, Failing()):
        model(input_ids=ids, use_cache=False)
    assert_as_before(model, before, weights)
    assert torch.equal(own_logits(model, ids), expected)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_moe", "bailing_hybrid"])
def test_another_model_of_the_same_class_is_not_affected(name: str) -> None:
    model, other, ids = tiny.shared(name), tiny.build(name, seed=3), tiny.token_ids(2, TOKENS)

    def prompt_and_token() -> Tensor:
        """Logits of the other model through both of its cores."""
        with torch.no_grad():
            prompt = other(input_ids=ids[:, :-1], use_cache=True)
            return torch.cat([prompt.logits, other(input_ids=ids[:, -1:], cache=prompt.cache).logits], dim=1)

    expected, other_expected = own_logits(model, ids), prompt_and_token()
    driver = TokenByToken()
    with hooked(model, driver) as report:
        first = model(input_ids=ids[:, :10], use_cache=False).logits
        calls = len(driver.calls)
        assert torch.equal(prompt_and_token(), other_expected)
        assert len(driver.calls) == calls
        report.verify()
    assert gap(first, expected[:, :10]) < LIMIT


@pytest.mark.parametrize("outer_first", [True, False])
def test_two_models_can_be_hooked_at_once_and_end_in_any_order(outer_first: bool) -> None:
    one, two, ids = tiny.build("olmo_hybrid"), tiny.build("olmo_hybrid", seed=3), tiny.token_ids(1, 8)
    expected = own_logits(one, ids), own_logits(two, ids)
    before = snapshot(one)
    contexts = [hooked(one, TokenByToken()), hooked(two, TokenByToken())]
    for context in contexts:
        context.__enter__()
    for model, logits in zip((one, two), expected, strict=True):
        assert gap(model(input_ids=ids, use_cache=False).logits, logits) < LIMIT
    for context in contexts if outer_first else reversed(contexts):
        context.__exit__(None, None, None)
    torch.set_grad_enabled(True)  # leaving in the wrong order hands back the wrong mode; that is PyTorch's own rule
    assert all(snapshot(one)["functions"][key] is f for key, f in before["functions"].items())


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_the_table_of_cores_is_that_of_transformers(architecture: Architecture) -> None:
    module = importlib.import_module(architecture.module)
    assert inspect.isclass(getattr(module, architecture.mixer))
    for core in (architecture.cores.chunk, architecture.cores.step):
        found = [
            name
            for name, parameter in inspect.signature(inspect.unwrap(getattr(module, core.name))).parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        assert tuple(found) == core.parameters


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5", "kimi_linear"])
def test_cores_that_kernel_packages_wrap_in_an_opaque_callable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's `kernels` package turns each core into a module that takes any arguments."""

    class Opaque(torch.nn.Module):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__()
            self.function = function

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

    model, ids = tiny.shared(name), tiny.token_ids(2, TOKENS)
    expected = own_logits(model, ids)
    architecture = ssm_layers(model)[0].architecture
    module = importlib.import_module(architecture.module)
    for core in architecture.cores.all:
        monkeypatch.setattr(module, core.name, Opaque(getattr(module, core.name)))
    before = {core.name: getattr(module, core.name) for core in architecture.cores.all}
    assert gap(in_chunks(model, ids, [7, 7, 1, 1, 1, 1, 1], TokenByToken()), expected) < LIMIT
    assert all(getattr(module, core_name) is function for core_name, function in before.items())


def test_the_same_model_cannot_be_hooked_twice() -> None:
    model = tiny.build("mamba2")
    with hooked(model, TokenByToken()), pytest.raises(NumericsError, match="not hooked yet"):
        with hooked(model, TokenByToken()):
            pass
    assert ssm_layers(model)


def delta_arguments(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (1, 3, 2, 16), "key": (1, 3, 2, 16), "value": (1, 3, 4, 8), "g": (1, 3, 4), "beta": (1, 3, 4)}
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    return {**made, "use_qk_l2norm_in_kernel": True, **changes}


def test_delta_rule_inputs_follow_the_definition() -> None:
    arguments = delta_arguments()
    got = inputs_module.delta_rule_inputs(arguments)
    got.validate(Recurrence.GDN)
    q, k = arguments["query"].double(), arguments["key"].double()

    def unit(x: Tensor) -> Tensor:
        return x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)

    for x, expected in ((got.query, unit(q) / 4.0), (got.key, unit(k))):
        assert x.dtype == torch.float32
        assert float((x - expected).abs().max()) < 4 * 2.0**-23
        assert float((x - 1.02 * expected).abs().max()) > 1e-3
    raw = inputs_module.delta_rule_inputs({**arguments, "use_qk_l2norm_in_kernel": False})
    assert torch.equal(raw.key, arguments["key"].float())
    assert torch.equal(raw.query, arguments["query"].float() * 0.25)


def test_the_epsilon_of_the_norm_is_inside_the_root() -> None:
    tiny_vector = torch.full((16,), 1e-4)
    expected = tiny_vector.double() / torch.sqrt((tiny_vector.double() ** 2).sum() + 1e-6)
    got = float32_tokens(tiny_vector.view(1, 1, 1, 16), eps=inputs_module.L2_NORM_EPS).flatten()
    assert float((got - expected).abs().max()) < 1e-6 * float(expected.max())
    outside = tiny_vector / (tiny_vector.norm() + 1e-6)
    assert float((outside - expected).abs().max()) > 0.1 * float(expected.max())


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "falcon_h1", "qwen3_5", "kimi_linear"])
def test_half_precision_models_hand_over_float32_and_get_back_their_dtype(name: str) -> None:
    model, ids = tiny.build(name, dtype=torch.bfloat16), tiny.token_ids(2, TOKENS)
    driver = TokenByToken()  # asserts that what it is given is float32
    chunked = in_chunks(model, ids, [TOKENS], driver)
    stepped = in_chunks(model, ids, [1] * TOKENS, TokenByToken())
    assert chunked.dtype == stepped.dtype == torch.float32
    # bfloat16 keeps 8 bits; a few layers of it stay within a few percent, where a dtype that is lost would raise.
    own = own_logits(model, ids).float()
    for logits in (chunked, stepped):
        assert float((logits - own).norm() / own.norm()) < 0.05


def test_time_steps_are_computed_in_float32_whatever_the_dtype_of_the_model() -> None:
    dt, bias = torch.full((1, 1, 2), 0.5, dtype=torch.bfloat16), torch.tensor([-6.0, 0.123456])
    got = inputs_module.time_steps(dt, bias=bias, softplus=True, limit=(0.0, float("inf")))
    exact = torch.log1p(torch.exp(0.5 + bias.double()))
    assert float((got[0, 0] / exact - 1).abs().max()) < 4 * 2.0**-23
    in_bfloat16 = torch.nn.functional.softplus(dt + bias.bfloat16())[0, 0]
    assert float((in_bfloat16 / exact - 1).abs().max()) > 1e-3


def test_layers_are_described_as_the_model_is_built() -> None:
    layers = ssm_layers(tiny.shared("qwen3_5_wrapper"))
    assert [x.layer_idx for x in layers] == [0, 2, 3]
    assert {(x.heads, x.key_heads, x.d_v, x.d_k) for x in layers} == {(4, 2, 8, 16)}
    assert {x.recurrence for x in layers} == {Recurrence.GDN}
    assert layers[0].name == "model.language_model.layers.0.linear_attn"
    (first, *_) = ssm_layers(tiny.shared("mamba2"))
    assert (first.heads, first.key_heads, first.d_v, first.d_k, first.time_step_limit) == (4, 2, 16, 32, (0.01, 1.0))


def test_a_model_without_recognised_layers_is_refused_with_what_is_supported() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    with pytest.raises(ConfigError, match="LlamaForCausalLM.*supported.*mamba2.*kimi_linear"):
        ssm_layers(model)
    with pytest.raises(ConfigError, match="none is recognised"), hooked(model, TokenByToken()):
        pass


def test_a_core_that_is_replaced_inside_the_mixer_is_noticed() -> None:
    model, ids = tiny.build("qwen3_5"), tiny.token_ids(1, 5)
    mixer = model.get_submodule(ssm_layers(model)[1].name)
    mixer.forward = lambda hidden_states, **kwargs: hidden_states  # as a kernel that replaces the whole layer
    with pytest.raises(NumericsError, match=r"layers 2 .*0 of 1 passes.*use_kernels"), hooked(model, TokenByToken()):
        model(input_ids=ids, use_cache=False)


def test_a_hook_that_saw_no_pass_does_not_verify() -> None:
    with hooked(tiny.shared("bamba"), TokenByToken()) as report, pytest.raises(NumericsError, match="never did"):
        report.verify()


def test_a_cache_that_was_filled_outside_is_refused() -> None:
    for name in ("zamba2", "olmo_hybrid"):
        model, ids = tiny.shared(name), tiny.token_ids(1, 6)
        with torch.no_grad():
            cache: Any = model(input_ids=ids, use_cache=True).cache
        head = OutputHead(model)
        for length in (1, 3):
            with pytest.raises(NumericsError, match="new cache"), hooked(model, TokenByToken()):
                head.hidden(ids[:, :length], cache, 6)


def test_packed_sequences_are_refused() -> None:
    model, ids = tiny.shared("qwen3_next"), tiny.token_ids(1, 6)
    with pytest.raises(NumericsError, match="packed"), hooked(model, TokenByToken()):
        model(input_ids=ids, use_cache=False, cu_seq_lens_q=torch.tensor([0, 3, 6]))


def test_a_mask_that_does_not_cover_the_past_is_refused() -> None:
    model, ids = tiny.shared("mamba2"), tiny.token_ids(1, 6)
    with hooked(model, TokenByToken()), pytest.raises(ValueError, match="past and current"):
        OutputHead(model).hidden(ids, None, 0, torch.ones(1, 4))
    with hooked(model, TokenByToken()), pytest.raises(NumericsError, match="cover the past"):
        model(input_ids=ids, use_cache=False, attention_mask=torch.tensor([[0, 1, 1, 1]]))


def test_generation_runs_through_the_driver() -> None:
    """Greedy decoding under the hook, left-padded, gives the tokens of each sequence alone."""
    for name in ("qwen3_5", "nemotron_h"):
        model: Any = tiny.shared(name)
        ids = tiny.token_ids(2, 7)
        ids[0, :3] = 7
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 256, "eos_token_id": None}
        with hooked(model, TokenByToken()):
            together = model.generate(input_ids=ids, attention_mask=mask, **options)[:, 7:]
        for row, start in ((0, 3), (1, 0)):
            alone = model.generate(input_ids=ids[row : row + 1, start:], **options)[0, 7 - start :]
            assert torch.equal(together[row], alone), name
