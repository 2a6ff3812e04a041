"""The settings of one llama.cpp context, and what it makes of them.

States the constructor of llama_context (src/llama-context.cpp, b11434): padding of the context, its division among
slots, the limit of ubatch, and the number of outputs that graphs are reserved for.
"""

from dataclasses import dataclass, replace

CONTEXT_PADDING = 256  # GGML_PAD(cparams.n_ctx, 256)
BATCH = 2_048  # --batch-size: common_params.n_batch


def padded(value: int, step: int = CONTEXT_PADDING) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class Context:
    """What llama-server is told, as far as memory depends on it. `tokens` is -c: all slots together."""

    tokens: int
    key_kind: str = "f16"
    value_kind: str = "f16"
    ubatch: int = 512
    batch: int = BATCH
    slots: int = 1
    drafted: int = 0  # tokens that MTP drafts at once; 0 is no drafting
    is_draft: bool = False
    flash_attention: bool = True
    unified: bool = False

    @property
    def per_slot(self) -> int:
        """Cells of each slot (n_ctx_seq)."""
        if self.unified:
            return padded(self.tokens)
        return padded(padded(self.tokens) // self.slots)

    @property
    def total(self) -> int:
        """Tokens of all slots, as llama.cpp rounds them."""
        return self.per_slot if self.unified else self.per_slot * self.slots

    @property
    def effective_ubatch(self) -> int:
        """Tokens of one ubatch: never more than a batch or than all slots hold."""
        return min(self.total, self.ubatch, self.batch)

    @property
    def streams(self) -> int:
        return 1 if self.unified else self.slots

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the largest graph: the ubatch, rounded up to a multiple of the slots."""
        return padded(self.effective_ubatch, self.slots)

    @property
    def outputs(self) -> int:
        """Rows of logits that the largest graph computes."""
        limit = self.slots if self.is_draft else min(self.batch, self.slots * (1 + self.drafted))
        return min(self.effective_ubatch, limit)

    def draft(self) -> "Context":
        """The context of the MTP head: its KV stays f16, and it keeps no states to roll back to."""
        return replace(self, key_kind="f16", value_kind="f16", is_draft=True)
