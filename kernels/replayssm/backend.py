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

    `ieee`: float32, multiplied and added one by one. `bf16x6`: float32 operands as sums of three bfloat16 numbers, six
    of whose products run on tensor cores; what is left out is below 2**-24 of a product. `tf32` and `bf16`: what
    engines run on tensor cores, with operands of 11 and 8 significant bits.
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
        """Read `torch`, `triton` or `triton:PRODUCTS`.

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
        return cls(backend=Backend(backend), products=Products(products) if colon else Products.IEEE)

    def __str__(self) -> str:
        """The text form: `Execution.parse(str(e)) == e`."""
        return str(self.backend) if self.products is Products.IEEE else f"{self.backend}:{self.products}"
