"""lm-eval's `hf` model class with the types that lm-eval's own decorator loses."""

# pyright: reportMissingTypeStubs=false

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from lm_eval.api.model import CacheHook
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    class HFLM:
        """The members of lm-eval's class that the adapter uses."""

        model: PreTrainedModel
        tokenizer: PreTrainedTokenizerBase
        cache_hook: CacheHook
        think_end_token: str | int | None
        batch_size_per_gpu: int
        batch_sizes: dict[int, int]
        eot_token_id: int
        prefix_token_id: int
        _device: torch.device
        _max_length: int | None

        def __init__(self, **kwargs: Any) -> None: ...
        def tok_encode(self, string: str) -> list[int]:
            """Tokens of a text."""
            ...

        def tok_batch_encode(self, strings: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
            """Tokens of texts, padded, and their mask."""
            ...

        def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
            """Text of tokens."""
            ...


else:
    from lm_eval.models.huggingface import HFLM

__all__ = ["HFLM"]
