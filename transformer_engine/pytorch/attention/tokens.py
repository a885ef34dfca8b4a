"""The first two sizes of a layer's input: the declared ones, and those of one rank if dimension 0 is divided over the
ranks of a group. Nothing is divided here."""

import torch

from transformer_engine.pytorch._internal.arguments import check_tensor
from transformer_engine.pytorch.attention.masks import swapped_advice
from transformer_engine.pytorch.module.parallel import divided


class TokenSizes:
    """ranks: over which the layer is divided; divides: over which dimension 0 of its input is (sequence parallelism),
    or 1. The declared sizes are those of all ranks, None if not declared; in
    thd they have no effect."""

    def __init__(
        self,
        op: str,
        layout: str,
        *,
        seq_length: int | None,
        micro_batch_size: int | None,
        ranks: int,
        divides: int,
    ) -> None:
        self.layout, self.seq_length, self.ranks, self.divides = layout, seq_length, ranks, divides
        if layout == "thd":  # the lengths come with each call
            self.of_rank = (None, None)
            return
        declared = [("seq_length", seq_length), ("micro_batch_size", micro_batch_size)]
        declared = declared if layout == "sbhd" else declared[::-1]
        (first, size), (_, second) = declared
        if size is not None:
            size = divided(op, first, size, divides)
        self.of_rank = (size, second)

    def length(self, tokens: torch.Tensor) -> int:
        """The length of the sequences in attention: over all ranks."""
        return tokens.shape[0] * self.divides if self.layout == "sbhd" else tokens.shape[1]

    def check_order(self, op: str, tokens: torch.Tensor) -> None:
        """Raises for an input in the other layout, if the caller has declared the sizes."""
        if None in self.of_rank or self.of_rank[0] == self.of_rank[1]:
            return
        if tuple(tokens.shape[:2]) == self.of_rank[::-1]:
            raise ValueError(
                f"{op}: argument 'hidden_states' has shape {tuple(tokens.shape)} in {self.layout}, wanted "
                f"{self.of_rank} first, by seq_length and micro_batch_size; {swapped_advice(self.layout)}"
            )

    def check_length(self, op: str, tokens: torch.Tensor) -> None:
        """Raises for sequences of another length than declared, if the layer is divided over ranks: mostly a rank got
        all tokens instead of its own, or the other way round."""
        if self.ranks == 1 or self.seq_length is None or self.layout == "thd" or tokens.dim() != 3:
            return
        self.check_order(op, tokens)
        dim = self.layout.index("s")
        wanted = self.of_rank[dim]
        if tokens.shape[dim] != wanted:
            shared = f" over the {self.divides} ranks that dimension 0 is divided over" if self.divides > 1 else ""
            raise ValueError(
                f"{op}: argument 'hidden_states' has shape {tuple(tokens.shape)} in {self.layout}, wanted {wanted} in "
                f"dimension {dim}: seq_length {self.seq_length}{shared if dim == 0 else ''}; give each rank "
                f"{'its own tokens' if self.divides > 1 else 'all tokens'}, or make the module without seq_length."
            )

    def check_rotary(
        self, op: str, rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *tokens: torch.Tensor
    ) -> None:
        """tokens: the input of the queries, then the input of the keys."""
        angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        for freqs, of in zip(angles, tokens):
            if type(freqs) is not torch.Tensor:
                check_tensor(op, "rotary_pos_emb", freqs)
            if self.layout == "thd":  # the op checks positions
                continue
            length = self.length(of)
            if freqs.dim() and freqs.shape[0] < length:
                raise ValueError(
                    f"{op}: argument 'rotary_pos_emb' has {freqs.shape[0]} positions, wanted at least the sequence "
                    f"length {length}: RotaryPositionEmbedding(dim)({length}) has them."
                )
