"""What modules made of other modules share: process groups handed on to every part. Nothing is computed here."""

from transformer_engine.pytorch.module.state import WholeCheckpoints


class Composite(WholeCheckpoints):
    """A module whose work its parts do."""

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """Hands the group to every part; without tensor parallelism nothing is communicated over it."""
        for part in self.children():
            if hasattr(part, "set_tensor_parallel_group"):
                part.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: object | None, cp_global_ranks: list[int] | None, cp_stream: object | None, cp_comm_type="p2p"
    ) -> None:
        """As DotProductAttention's."""
        for part in self.children():
            if hasattr(part, "set_context_parallel_group"):
                part.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
