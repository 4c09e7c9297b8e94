"""Which implementation advances the states, and how it multiplies: explicit, checked, recorded."""

from dataclasses import dataclass
from enum import StrEnum


class Backend(StrEnum):
    """What walks the windows.

    `torch`: tensor programs on any device, in float32 or float64. `triton`: fused kernels on a CUDA device, in float32.
    """

    TORCH = "torch"
    TRITON = "triton"


class Products(StrEnum):
    """Operands of the matrix products inside windows; sums are float32 in all of them.

    `ieee`: float32, multiplied and added one by one. `bf16x6`: float32 on tensor cores: an operand is exactly the sum
    of three bfloat16 numbers (3 × 8 significant bits), and of the nine products of two such sums the six largest are
    added up in float32. The three that are left out are at most 2**-24, 2**-24 and 2**-32 of the product: as much as
    rounding a float32 product twice. `tf32` and `bf16`: what engines run on tensor cores, with operands of 11 and 8
    significant bits.
    """

    IEEE = "ieee"
    BF16X6 = "bf16x6"
    TF32 = "tf32"
    BF16 = "bf16"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the states of a run are advanced.

    Attributes:
        backend: What walks the windows.
        products: Operands of its products.

    Raises:
        ValueError: When the backend has no such products.
    """

    backend: Backend = Backend.TORCH
    products: Products = Products.IEEE

    def __post_init__(self) -> None:
        if self.backend is Backend.TORCH and self.products is not Products.IEEE:
            raise ValueError(
                f"backend {self.backend} multiplies in the dtype of its inputs, got products {self.products}; "
                f"use backend {Backend.TRITON}:{self.products}"
            )

    @classmethod
    def parse(cls, text: str) -> "Execution":
        """Read `torch`, `triton` (that is `triton:bf16x6`) or `triton:PRODUCTS`.

        Raises:
            ValueError: With what was expected and what came.
        """
        backend, colon, products = text.partition(":")
        backends, kinds = [str(b) for b in Backend], [str(p) for p in Products]
        if backend not in backends or (colon and products not in kinds):
            raise ValueError(
                f"expected a backend, one of {', '.join(backends)}, or {Backend.TRITON}:PRODUCTS with one of "
                f"{', '.join(kinds)}, got {text!r}"
            )
        if backend == Backend.TORCH:
            return cls(products=Products(products) if colon else Products.IEEE)
        return cls(backend=Backend(backend), products=Products(products) if colon else Products.BF16X6)

    def __str__(self) -> str:
        """The text form, products named: `Execution.parse(str(e)) == e`."""
        return str(self.backend) if self.backend is Backend.TORCH else f"{self.backend}:{self.products}"
