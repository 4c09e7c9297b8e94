"""The type of a NumPy array, as shape annotations take it."""

from typing import Any, TypeVar

import numpy as np

_Scalar = TypeVar("_Scalar", bound=np.generic)

# numpy.typing.NDArray became a type alias that shape annotations cannot look into (NumPy 2.5).
Array = np.ndarray[Any, np.dtype[_Scalar]]
