"""What modules made of other modules share: process groups, kept and handed on to every part. It computes nothing."""

from transformer_engine.pytorch.module.parallel import check_ranks, group_by_name
from transformer_engine.pytorch.module.whole_checkpoints import WholeCheckpoints


class Composite(WholeCheckpoints):
    """A module whose work its parts do."""

    tp_size: int = 1
    _tp_group_name: str | None = None
    tp_group = group_by_name

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """Hands the group to every part; without tensor parallelism nothing is communicated over it.

        Errors: ValueError for a group of another size than the module was made for; all keep the one they have then."""
        if self.tp_size > 1:
            check_ranks(type(self).__name__, tp_group, self.tp_size)
        self.tp_group = tp_group
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
