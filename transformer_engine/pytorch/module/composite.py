"""The base of modules that consist of other modules: it passes process groups on to every part. It computes nothing."""

from transformer_engine.pytorch.module.atomic_checkpoints import AtomicCheckpoints
from transformer_engine.pytorch.module.parallel import check_ranks, group_by_name


class Composite(AtomicCheckpoints):
    """A module that consists of other modules, which compute."""

    tp_size: int = 1
    _tp_group_name: str | None = None
    tp_group = group_by_name

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """Passes the group to every part; without tensor parallelism nothing is communicated over it.

        Errors: ValueError for a group whose size differs from the one that the module was built for; every part keeps
        its present group then."""
        if self.tp_size > 1:
            check_ranks(type(self).__name__, tp_group, self.tp_size)
        self.tp_group = tp_group
        for part in self.children():
            if hasattr(part, "set_tensor_parallel_group"):
                part.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: object | None, cp_global_ranks: list[int] | None, cp_stream: object | None, cp_comm_type="p2p"
    ) -> None:
        """The same as DotProductAttention's."""
        for part in self.children():
            if hasattr(part, "set_context_parallel_group"):
                part.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
