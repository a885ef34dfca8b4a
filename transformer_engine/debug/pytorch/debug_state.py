"""The switch of the debugging tools, which clients ask and set: it is off, and nothing here looks at tensors."""


class TEDebugState:
    """What clients read: debug_enabled is False. What they write stays until reset()."""

    debug_enabled = False
    initialized = False
    layer_count = 1
    layers_initialized: dict[str, object] = {}  # noqa: RUF012 (the class is the state)
    weight_tensor_tp_group_reduce = True

    @classmethod
    def initialize(cls) -> None:
        """Nothing has to be started."""

    @classmethod
    def get_layer_count(cls) -> int:
        """A number for a layer without a name: 1, 2, ..."""
        count = cls.layer_count
        cls.layer_count += 1
        return count

    @classmethod
    def set_weight_tensor_tp_group_reduce(cls, enabled: bool) -> None:
        cls.weight_tensor_tp_group_reduce = enabled

    @classmethod
    def reset(cls) -> None:
        cls.layer_count, cls.weight_tensor_tp_group_reduce = 1, True
        cls.layers_initialized.clear()
