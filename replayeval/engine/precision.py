"""Float32 products that are float32."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32() -> Generator[None]:
    """Switch TF32 off for matrix products and convolutions, and restore what was set on exit.

    TF32 keeps 10 bits of a factor, so a float32 model would be measured with an error of 1e-3 in every product.
    """
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
