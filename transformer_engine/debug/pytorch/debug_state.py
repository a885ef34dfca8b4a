"""The switch of the debugging tools, which clients read and set: it is off, and no tensor is inspected."""


class TEDebugState:
    """Attributes for clients: debug_enabled is False. Values that they set stay until reset()."""

    debug_enabled = False
    initialized = False
    layer_count = 1
    layers_initialized: dict[str, object] = {}  # noqa: RUF012 (the class is the state)
    weight_tensor_tp_group_reduce = True

    @classmethod
    def initialize(cls) -> None:
        """Nothing is started."""

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
