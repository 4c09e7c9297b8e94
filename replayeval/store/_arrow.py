"""pyarrow behind names of type `Any`: it ships no type information, so its use is kept to few places."""

from importlib import import_module
from typing import Any

pa: Any = import_module("pyarrow")
pq: Any = import_module("pyarrow.parquet")
