# The order of backends where FA3 or FA4 is active in place of torch's flash. A stub is activated: the order alone, no
# kernel of theirs runs.
import pytest
import torch
from torch.nn.attention import SDPBackend

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.backends import active_flash, attention_path
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

CUDNN, FLASH, EFFICIENT, MATH = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
FIRST, WITHOUT = (FLASH, CUDNN, EFFICIENT, MATH), (CUDNN, EFFICIENT, MATH)
CAUSAL, WINDOW = {"mask": "causal"}, {"mask": "causal", "window": (4, 0)}
PACKED = {"mask": "padding_causal", "packed": True, "same_lengths": True}


class Handle:
    def remove(self):
        pass


@pytest.fixture
def activated():
    attention = torch.nn.attention
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("this torch has no implementations of flash to activate")
    registry = dict(attention._registry._FLASH_ATTENTION_IMPLS)

    def activate(name):
        attention.register_flash_attention_impl(name, register_fn=Handle)
        attention.activate_flash_attention_impl(name)

    yield activate
    attention.restore_flash_attention_impl()
    attention._registry._FLASH_ATTENTION_IMPLS.update(registry)


def path_of(flash_impl, *, dtype=torch.bfloat16, **options):
    options = {"deterministic": False, "widest_head": 64, **options}
    return attention_path(torch.device("cuda"), dtype, flash_impl=flash_impl, **options)


@pytest.mark.parametrize("impl", ["FA3", "FA4"])
@pytest.mark.parametrize(
    "options, backends",
    [
        (CAUSAL, FIRST),
        ({"mask": "no_mask"}, FIRST),
        ({**CAUSAL, "dropout": 0.1}, WITHOUT),
        ({**CAUSAL, "away": ("NVTE_FLASH_ATTN",)}, WITHOUT),
        ({**CAUSAL, "away": ("NVTE_FUSED_ATTN",)}, (FLASH, EFFICIENT, MATH)),
        ({**CAUSAL, "deterministic": True}, (MATH,)),
        ({**CAUSAL, "dtype": torch.float32}, (CUDNN, FLASH, EFFICIENT, MATH)),
        ({"mask": "padding"}, WITHOUT),
        ({**WINDOW, "dropout": 0.1}, WITHOUT),
        ({**WINDOW, "deterministic": True}, (MATH,)),
    ],
    ids=str,
)
def test_order(impl, options, backends):
    path = path_of(impl, **options)
    assert path.backends == backends and not path.kernel and not path.flash_window and path.reason.endswith(".")


@pytest.mark.parametrize("impl, window", [(None, True), ("FA3", True), ("FA4", False), ("another", False)])
def test_a_window_keeps_a_path_that_trains(impl, window):
    path = path_of(impl, **WINDOW)
    assert path.flash_window == window and path.backends == ((FLASH,) if window else WITHOUT)
    assert path_of(impl, **PACKED, window=(4, 0)).kernel == ("flash" if window else "chunked")
    assert path_of(impl, **WINDOW, sink=True).kernel == ("flash" if window else "chunked")


@pytest.mark.parametrize("impl", ["FA3", "FA4"])
def test_kernels(impl):
    assert path_of(impl, **PACKED).kernel == path_of(impl, **CAUSAL, sink=True).kernel == "flash"
    for options in ({**PACKED, "deterministic": True}, {**PACKED, "repeat_bits": True}):
        path = path_of(impl, **options)
        assert path.kernel == "chunked" and f"{impl} is active" in path.reason
    assert path_of(impl, **CAUSAL, repeat_bits=True).backends == (MATH,)


@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_a_stub_that_is_active_is_named(activated, monkeypatch, name):
    """By each call, so that it may be activated after the module is made; nothing of it is imported here."""
    assert active_flash() is None
    chosen = []
    real = dot_product_attention.attention_path
    monkeypatch.setattr(
        dot_product_attention,
        "attention_path",
        lambda *args, **options: chosen.append(options["flash_impl"]) or real(*args, **options),
    )
    module, q = te.DotProductAttention(2, 8), torch.randn(5, 1, 2, 8)
    wanted = module(q, q, q)
    activated(name)
    assert active_flash() == name
    assert torch.equal(module(q, q, q), wanted)  # a CPU has none of them
    assert chosen == [None, name]
