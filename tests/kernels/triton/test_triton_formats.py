"""Stores in Triton, bit for bit those of `replayssm.formats`: values, bytes, random words.

Without a GPU the kernels run in Triton's interpreter; on one, the same tests run compiled.
"""

import pytest
import torch

from replayssm.formats import NAMED_FORMATS, Format, Rounding, pack, random_bits, store_and_load
from replayssm.formats.triton_format import TritonFormat
from replayssm.formats.triton_store import StoreAddress
from replayssm.formats.triton_store import pack as pack_in_triton
from replayssm.formats.triton_store import unpack as unpack_in_triton
from tests.kernels.formats.support import deciding_words, mismatches, regimes, words_for
from tests.kernels.formats.test_cast import texts
from tests.kernels.triton.stores import store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEXTS = [text for text in texts() if "[tensor]" not in text]


def states_of(text: str) -> torch.Tensor:
    """All regimes for a plain name; two for the many groupings, which share all of their rounding with it."""
    names = [*regimes()] if text.removesuffix("+sr") in NAMED_FORMATS else ["finite patterns", "not finite"]
    return torch.cat([regimes()[name] for name in names])


def differing_bytes(got: torch.Tensor, want: torch.Tensor, keep: torch.Tensor) -> int:
    """Elements whose bytes differ, of those that `keep` names."""
    width = got.numel() // keep.numel() if got.numel() >= keep.numel() else 0
    if width == 0:
        # Two codes share a byte.
        keep = keep.view(-1, 2).all(-1)
        width = 1
    return int(((got.view(-1, width) != want.view(-1, width)).any(-1) & keep).sum())


@pytest.mark.parametrize("text", TEXTS)
def test_stores_are_those_of_pytorch(text: str) -> None:
    fmt = Format.parse(text)
    states = states_of(text)
    words = words_for(len(states)) if fmt.rounding is Rounding.STOCHASTIC else None
    want = pack(states, fmt, bits=words)
    packed, loaded = store(states.to(DEVICE), fmt, words)
    truth = store_and_load(states, fmt, bits=words)
    assert {name: mismatches(values.cpu(), truth)[:3] for name, values in loaded.items()} == dict.fromkeys(loaded, [])
    assert mismatches(packed.unpack().cpu(), truth) == []
    assert mismatches(unpack_in_triton(packed).cpu(), truth) == []
    # A NaN has many patterns, and a payload under a NaN scale may be anything.
    assert differing_bytes(packed.payload.cpu(), want.payload, ~truth.flatten().isnan()) == 0
    if fmt.is_scaled:
        size = fmt.group_elements(heads=states.shape[1], d_v=states.shape[2], d_k=states.shape[3])
        finite = ~truth.view(-1, size).isnan().any(-1)
        assert differing_bytes(packed.scales.cpu(), want.scales, finite) == 0


@pytest.mark.parametrize("text", ["fp16+sr", "fp8+sr", "nvfp4+sr", "int8+sr", "bf16+sr"])
def test_words_on_either_side_of_a_decision(text: str) -> None:
    fmt = Format.parse(text)
    states = torch.cat([regimes()[name] for name in ("normal", "halfway")])
    words = deciding_words(states, fmt)
    truth = store_and_load(states, fmt, bits=words)
    assert mismatches(store(states.to(DEVICE), fmt, words)[1]["stored"].cpu(), truth) == []
    # Planted: one step of a word is enough to be seen.
    wrong = store(states.to(DEVICE), fmt, (words + 1).clamp(max=2**32 - 1))[1]["stored"].cpu()
    assert mismatches(wrong, truth) != []


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("text", ["fp16+sr", "fp8+sr", "nvfp4+sr", "mxfp4+sr", "int8+sr", "bf16+sr"])
def test_extreme_words(text: str, word: int) -> None:
    """The largest word takes everything up that is 2**-32 of a gap above a grid point, the smallest nothing."""
    fmt = Format.parse(text)
    states = torch.cat([*regimes().values()])
    words = torch.full((len(states), states[0].numel()), word, dtype=torch.int64)
    truth = store_and_load(states, fmt, bits=words)
    loaded = store(states.to(DEVICE), fmt, words)[1]
    assert {name: mismatches(values.cpu(), truth)[:3] for name, values in loaded.items()} == dict.fromkeys(loaded, [])


@pytest.mark.parametrize(("text", "divisor"), [("fp8", 448.0), ("nvfp4", 6.0), ("int8", 127.0)])
def test_a_divisor_that_is_off_by_one_bit_is_seen(text: str, divisor: float) -> None:
    fmt = Format.parse(text)
    states = regimes()["wide"]
    off = torch.nextafter(torch.tensor(divisor), torch.tensor(torch.inf)).item()
    truth = store_and_load(states, fmt)
    assert mismatches(store(states.to(DEVICE), fmt, None)[1]["stored"].cpu(), truth) == []
    assert mismatches(store(states.to(DEVICE), fmt, None, divisor=off)[1]["stored"].cpu(), truth) != []


@pytest.mark.parametrize("shape", [(2, 1, 3, 32), (1, 2, 20, 48), (2, 1, 5, 18)])
@pytest.mark.parametrize("text", ["fp16+sr", "fp8+sr", "nvfp4[row]+sr"])
def test_addresses_odd_sizes_and_strides(text: str, shape: tuple[int, ...]) -> None:
    """Words come from seed, layer, copy, sequence, token and element; 18 keys straddle the counters of 4 words."""
    fmt = Format.parse(text)
    rows, heads, d_v, d_k = shape
    wide = torch.randn((rows, heads, d_k, 2 * d_v), generator=torch.Generator().manual_seed(5))
    states = wide[..., ::2].transpose(-1, -2)
    assert not states.is_contiguous()
    sequences, tokens = torch.arange(rows) + 2**32 - 2, torch.arange(rows) + 2**31
    where = {"seed": 0xFEDC_BA98_7654_3210, "layer": 5, "copy": 1, "sequences": sequences, "tokens": tokens}
    words = random_bits(**where, elements=heads * d_v * d_k, device="cpu")
    truth = store_and_load(states.contiguous(), fmt, bits=words)
    on_device = states.to(DEVICE) if DEVICE.type == "cpu" else wide.to(DEVICE)[..., ::2].transpose(-1, -2)
    packed, loaded = pack_in_triton(on_device, fmt, address=StoreAddress(**where))
    assert mismatches(loaded.cpu(), truth) == []
    assert torch.equal(packed.payload.cpu(), pack(states.contiguous(), fmt, bits=words).payload)
    # Planted: every part of the address matters.
    for part, other in (("seed", 1), ("layer", 6), ("copy", 0), ("sequences", sequences - 1), ("tokens", tokens + 1)):
        wrong = pack_in_triton(on_device, fmt, address=StoreAddress(**{**where, part: other}))[1]
        assert mismatches(wrong.cpu(), truth) != [], part
        if shape != (2, 1, 3, 32):
            break


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int8[ef=int8]", "error-feedback"),
        ("fp8[tensor]", "spans heads"),
        ("fp8[tile=3]", "power of two"),
        ("fp8[block=24]", "power of two"),
    ],
)
def test_what_the_kernels_cannot_store_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{reason}.*use backend torch"):
        TritonFormat.of(Format.parse(text), heads=2, d_v=6, d_k=48)


def test_addresses_are_asked_for_and_refused() -> None:
    states = regimes()["normal"].to(DEVICE)
    with pytest.raises(ValueError, match="expected an address"):
        pack_in_triton(states, Format.parse("fp8+sr"))
    index = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected no address"):
        pack_in_triton(
            states, Format.parse("fp8"), address=StoreAddress(seed=0, layer=0, copy=0, sequences=index, tokens=index)
        )
    with pytest.raises(ValueError, match="expected a float32 state"):
        pack_in_triton(states.double(), Format.parse("fp8"))
