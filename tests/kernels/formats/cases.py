"""The contract of every format: inputs, and the bytes and values that they must become, derived by hand.

Any implementation of these formats can be held to this table. Payload bytes are in C order, two 4-bit codes to a byte
with the first in the low half; scales and head scales are little-endian.
"""

from dataclasses import dataclass

INF = float("inf")
NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One state of one head and one value row.

    Attributes:
        name: What it shows.
        text: The format.
        state: Values along `d_k`.
        words: Random words, for stochastic rounding.
        payload: Expected payload bytes, hexadecimal.
        scales: Expected scale bytes, hexadecimal.
        head_scales: Expected head scale bytes, hexadecimal.
        loaded: What loads back.
        why: The derivation.
    """

    name: str
    text: str
    state: list[float]
    words: list[int] | None = None
    payload: str
    scales: str = ""
    head_scales: str = ""
    loaded: list[float]
    why: str


HALF = 2**31

CASES = [
    Case(
        name="fp32 is stored as it is",
        text="fp32",
        state=[1.0, -2.5],
        payload="0000803f 000020c0",
        loaded=[1.0, -2.5],
        why="1.0 is 0x3f800000 and -2.5 is 0xc0200000, little-endian",
    ),
    Case(
        name="bf16 ties go to even",
        text="bf16",
        state=[1 + 2**-8, 1 + 3 * 2**-8, -0.0, INF],
        payload="803f 823f 0080 807f",
        loaded=[1.0, 1 + 2**-6, -0.0, INF],
        why="the step at 1 is 2**-7: half a step goes down to the even 0x3f80, one and a half up to the even 0x3f82",
    ),
    Case(
        name="bf16 stochastic",
        text="bf16+sr",
        state=[1 + 2**-8, 1 + 2**-8, 3.4e38, 3.4e38],
        words=[HALF, HALF - 1, 0, 2**32 - 1],
        payload="813f 803f 7f7f 807f",
        loaded=[1 + 2**-7, 1.0, 255 * 2.0**120, INF],
        why="halfway goes up from word 2**31; above the largest value 3.3895e38 the next grid point is infinity",
    ),
    Case(
        name="fp16 overflow and subnormals",
        text="fp16",
        state=[65519.0, 65520.0, 2**-24, 2**-25, 3 * 2**-25],
        payload="ff7b 007c 0100 0000 0200",
        loaded=[65504.0, INF, 2**-24, 0.0, 2**-23],
        why="65520 is halfway to 65536, which is infinity; half of 2**-24 is a tie with zero, 1.5 of it goes to 2",
    ),
    Case(
        name="fp16 stochastic overflow and subnormals",
        text="fp16+sr",
        state=[65520.0, 65520.0, 2**-26, 2**-26],
        words=[HALF, HALF - 1, 3 * 2**30, 3 * 2**30 - 1],
        payload="007c ff7b 0100 0000",
        loaded=[INF, 65504.0, 2**-24, 0.0],
        why="halfway between 65504 and 65536; 2**-26 is a quarter of the smallest subnormal: up for a quarter of words",
    ),
    Case(
        name="fp8 row",
        text="fp8",
        state=[448.0, 17.0, 19.0, -(2**-10), -3 * 2**-10, 0.0],
        payload="7e 58 5a 80 82 00",
        scales="0000803f",
        loaded=[448.0, 16.0, 20.0, -0.0, -(2**-8), 0.0],
        why="scale 448/448 = 1; step 2 at 16: 17 ties to 16 (even 0x58), 19 to 20 (0x5a); subnormal step 2**-9",
    ),
    Case(
        name="fp8 divisor",
        text="fp8[max=240]",
        state=[480.0, 2.0],
        payload="77 38",
        scales="00000040",
        loaded=[480.0, 2.0],
        why="scale 480/240 = 2; 240 = 1.875 * 2**7 is exponent field 14 with fraction 7",
    ),
    Case(
        name="fp8 stochastic",
        text="fp8+sr",
        state=[448.0, 16.5, 16.5, 2**-11, 2**-11, 447.0],
        words=[2**32 - 1, 3 * 2**30, 3 * 2**30 - 1, 3 * 2**30, 3 * 2**30 - 1, 2**32 - 1],
        payload="7e 59 58 01 00 7e",
        scales="0000803f",
        loaded=[448.0, 18.0, 16.0, 2**-9, 0.0, 448.0],
        why="16.5 is a quarter of the way from 16 to 18, 2**-11 from 0 to the subnormal 2**-9; 448 never moves",
    ),
    Case(
        name="bare fp8 saturates finite values only",
        text="fp8[scale=none]",
        state=[464.0, 1e30, -INF, 2**-9],
        payload="7e 7e ff 01",
        loaded=[448.0, 448.0, NAN, 2**-9],
        why="E4M3 has no infinity, so what diverged is NaN",
    ),
    Case(
        name="bare e5m2 saturates finite values only",
        text="fp8_e5m2[scale=none]",
        state=[1e30, INF, 1.125, 1.375],
        payload="7b 7f 3c 3e",
        loaded=[57344.0, NAN, 1.0, 1.5],
        why="a saturating store has no use for the infinity code; the step at 1 is a quarter, with ties at its eighths",
    ),
    Case(
        name="int8 row",
        text="int8",
        state=[127.0, -127.0, 0.5, 1.5, -0.5, -0.0],
        payload="7f 81 00 02 00 00",
        scales="0000803f",
        loaded=[127.0, -127.0, 0.0, 2.0, 0.0, 0.0],
        why="scale 1; ties go to even, and integers have no negative zero",
    ),
    Case(
        name="int8 with a float16 scale uses the rounded scale for its codes",
        text="int8[scale=fp16]",
        state=[127 * (1 + 2**-12), 63.5 * (1 + 2**-12)],
        payload="7f 40",
        scales="003c",
        loaded=[127.0, 64.0],
        why="the scale 1 + 2**-12 rounds to 1 (0x3c00); 63.5155 rounds to 64, over the unrounded scale it would tie",
    ),
    Case(
        name="int16 stochastic",
        text="int16+sr",
        state=[32767.0, -1.25, -1.25, 0.25],
        words=[2**32 - 1, 3 * 2**30, 3 * 2**30 - 1, 0],
        payload="ff7f feff ffff 0000",
        scales="0000803f",
        loaded=[32767.0, -2.0, -1.0, 0.0],
        why="rounding acts on the magnitude: a quarter above 1 goes to 2 for the upper quarter of the words",
    ),
    Case(
        name="nvfp4 two blocks",
        text="nvfp4",
        state=[2688.0, 448.0, -1344.0, 0.0, *[0.0] * 12, 6.0, 5.0, -2.5, 0.25, 0.75, -0.0, *[0.0] * 10],
        payload="27 0d 00 00 00 00 00 00 67 0c 82 00 00 00 00 00",
        scales="7e 38",
        head_scales="0000803f",
        loaded=[
            2688.0,
            448.0,
            -1344.0,
            0.0,
            *[0.0] * 12,
            6.0,
            4.0,
            -2.0,
            0.0,
            1.0,
            -0.0,
            *[0.0] * 10,
        ],
        why="codes 0 to 7 are 0 0.5 1 1.5 2 3 4 6. Head scale 2688/2688 = 1; block scales 448 (0x7e), 1 (0x38). "
        "Block one holds 6, 1, -3; block two the ties 5 to 4, 2.5 to 2, 0.25 to 0, 0.75 to 1",
    ),
    Case(
        name="nvfp4 stochastic in the subnormal step",
        text="nvfp4+sr",
        state=[6.0, 0.125, 0.125, 4.5, 4.5, *[0.0] * 11],
        words=[2**32 - 1, 3 * 2**30, 3 * 2**30 - 1, 3 * 2**30, 3 * 2**30 - 1, *[0] * 11],
        payload="17 70 06 00 00 00 00 00",
        scales="7e",
        head_scales="2549123b",
        loaded=[6.0, 0.5, 0.0, 6.0, 4.0, *[0.0] * 11],
        why="head scale 6/2688 = 1/448 is 0x3b124925 to nearest, block scale 448, their product 1; 0.125 is a "
        "quarter of the way to 0.5, 4.5 a quarter of the way from 4 to 6",
    ),
    Case(
        name="mxfp8 keeps the exponent of the largest value",
        text="mxfp8[block=4]",
        state=[1.75, 1.9, -1.0, 2**-18],
        payload="7e 7e f8 00",
        scales="77",
        loaded=[1.75, 1.75, -1.0, 0.0],
        why="scale 2**(0 - 8), code 127 - 8 = 0x77; 1.9 * 256 = 486 saturates to 448; 2**-18 * 256 ties with zero",
    ),
    Case(
        name="mxfp4 keeps the exponent of the largest value",
        text="mxfp4[block=4]",
        state=[24.0, -31.0, 5.0, 1.0],
        payload="f7 02",
        scales="81",
        loaded=[24.0, -24.0, 4.0, 0.0],
        why="scale 2**(4 - 2), code 129; -31/4 saturates to -6; 5/4 ties to 1 and 1/4 to 0",
    ),
    Case(
        name="zeros have the smallest scale and load back as zeros",
        text="fp8",
        state=[0.0, -0.0],
        payload="00 80",
        scales="00008000",
        loaded=[0.0, -0.0],
        why="the smallest scale is 2**-126, bit pattern 0x00800000",
    ),
    Case(
        name="a group that is not finite has the scale NaN",
        text="mxfp4[block=2]",
        state=[1.0, 6.0, INF, 1.0],
        payload="72 00",
        scales="7f ff",
        loaded=[1.0, 6.0, NAN, NAN],
        why="scale 2**(2 - 2) is code 127; code 255 is NaN, and the codes under it are zeros",
    ),
]
