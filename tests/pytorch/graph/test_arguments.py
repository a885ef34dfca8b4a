# Arguments of make_graphed_callables and of its replays: constants beside tensors, tensors that a graph can read, and a
# named refusal of any other argument before anything is changed.
import dataclasses
import functools

import numpy as np
import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.graph.capture.order import pipeline_schedule

from .cases import HIDDEN, build, capture, linear, tokens

OP = "make_graphed_callables"


def twice(x, **constants):
    return x * 2


def with_constant(value):
    return te.make_graphed_callables(twice, (torch.ones(3),), sample_kwargs={"k": value})


@dataclasses.dataclass
class Valued:
    value: object


class Named:
    """Equal only to itself."""


class Equal:
    """A comparison returns a given value or raises a given exception."""

    def __init__(self, answer):
        self.answer = answer

    def __eq__(self, other):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    __hash__ = object.__hash__


# ---- constants ----


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: complex(float("nan"), 1),
        lambda: np.float64("nan"),
        lambda: np.float32(2),
        lambda: np.arange(6).reshape(2, 3),
        lambda: np.array([1.0, float("nan")]),
        lambda: np.array(["a", "b"]),
        lambda: {1, 2},
        lambda: frozenset({"a"}),
        lambda: Valued([1, "x"]),
        lambda: [1, {"b": 2, "a": None}],
        lambda: slice(0, 3),
        lambda: torch.Size([1, 2]),
        lambda: torch.bfloat16,
        lambda: print,
    ],
)
def test_a_constant_that_is_equal_is_the_same(make):
    graphed = with_constant(make())
    assert_same_bits(graphed(torch.full((3,), 4.0), k=make()), torch.full((3,), 8.0))


@pytest.mark.parametrize(
    ("captured", "given", "words"),
    [
        (1, True, ["True", "1 is part"]),
        (1.0, 1, ["is 1,", "1.0 is part"]),
        (float("nan"), 1.0, ["1.0", "nan is part"]),
        (np.float32(1), 1.0, ["np.float32(1.0)"]),
        (np.zeros(3), np.ones(3), ["array([1., 1., 1.])"]),
        (np.zeros(3), np.zeros(4), ["array([0., 0., 0.])"]),
        (np.zeros(3), np.zeros(3, dtype=np.float32), ["float32"]),
        (np.zeros(10**6), np.zeros(3), ["an array of float64 [1000000] is part"]),
        ({1, 2}, {1}, ["{1, 2} is part"]),
        (Valued(1), Valued(2), ["Valued(value=2)"]),
        (Named(), Named(), ["Named"]),
        ("x" * 10**5, "y" * 10**5, ["yyy", "xxx"]),
        (list(range(50)), list(range(49)) + [0], ["argument 'k'[49] is 0"]),
        (3, torch.ones(1000), ["torch.float32 [1000]"]),
        (None, [1] * 10**5, ["[1, 1"]),
    ],
)
def test_another_constant_is_refused_in_few_words(captured, given, words):
    graphed = with_constant(captured)
    with pytest.raises(ValueError, match="part of the graph") as caught:
        graphed(torch.ones(3), k=given)
    assert all(word in str(caught.value) for word in [*words, "argument 'k'", "capture again"])
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("make", [lambda: np.zeros(3), lambda: {1}, lambda: Valued([1])])
def test_a_constant_that_was_changed_in_place_is_another_one(make):
    value = make()
    graphed = with_constant(value)
    if isinstance(value, Valued):
        value.value.append(2)
    elif isinstance(value, set):
        value.add(2)
    else:
        value += 1
    with refused(ValueError, "argument 'k'", "part of the graph"):
        graphed(torch.ones(3), k=value)
    graphed(torch.ones(3), k=make())


def test_an_object_is_itself():
    value = Named()
    with_constant(value)(torch.ones(3), k=value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Equal(RuntimeError("boom")), ["Equal", "RuntimeError: boom", "lambda"]),
        (Equal(np.array([True, False])), ["Equal", "array([ True, False])"]),
        (Equal(False), ["Equal", "gives False"]),
        (np.array([object()]), ["array of objects"]),
        (Valued(torch.ones(2)), ["Valued", "holds a tensor", "directly"]),
        (Valued({"a": [torch.ones(2)]}), ["Valued", "holds a tensor"]),
        ({torch.ones(2)}, ["set", "holds a tensor"]),
        (functools.partial(print, torch.ones(2)), ["partial", "holds a tensor"]),
    ],
    ids=lambda part: repr(part) if isinstance(part, list) else type(part).__name__,
)
def test_a_constant_that_no_replay_could_match(value, words):
    with refused(ValueError, OP, "'sample_kwargs'", "argument 'k'", "callable 0 (twice)", *words):
        with_constant(value)


def test_a_dict_matches_by_its_keys():
    def function(x, k):
        return x * k["a"] - k["b"]["c"]

    one, two = torch.tensor([3.0]), torch.tensor([5.0])
    graphed = te.make_graphed_callables(
        function, (torch.ones(1),), sample_kwargs={"k": {"a": torch.ones(1), "b": {"c": torch.zeros(1), "d": "x"}}}
    )
    assert graphed(torch.ones(1), k={"b": {"d": "x", "c": two}, "a": one}).item() == -2
    assert graphed(torch.ones(1), k={"a": two, "b": {"c": one, "d": "x"}}).item() == 2
    with refused(TypeError, "callable 0 (function)", "'k'['b']['c']", "missing key(s): {'b'}"):
        graphed(torch.ones(1), k={"a": one, "c": two})
    with refused(ValueError, "argument 'k'['b']['d'] is 'y'"):
        graphed(torch.ones(1), k={"a": one, "b": {"c": two, "d": "y"}})


def test_what_is_passed_in_place_of_a_tensor_is_described(device):
    module = build(linear, device)
    capture(module, device)
    for given, words in (
        ([torch.ones(1000)] * 1000, "[a tensor, torch.float32 [1000]"),
        (np.ones((1000, 32)), "an array of float64 [1000, 32]"),
    ):
        with pytest.raises(ValueError, match="argument 0") as caught:
            module(given)
        assert words in str(caught.value) and len(str(caught.value)) < 2000
    with refused(TypeError, "Linear", "argument 0", "arity"):
        module(tokens(device), tokens(device))


# ---- tensors that no graph can read ----


def quantized():
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    return quantizer(torch.ones(16, 32))


def inference():
    with torch.inference_mode():
        return torch.ones(4)


NO_MEMORY = {
    "sparse": (lambda: torch.eye(4).to_sparse(), "to_dense()"),
    "sparse csr": (lambda: torch.eye(4).to_sparse_csr(), "to_dense()"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "to_padded_tensor()"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "values()"),
    "meta": (lambda: torch.ones(4, device="meta"), "no values"),
    "conjugated": (lambda: torch.ones(4, dtype=torch.complex64).conj(), "resolve_conj()"),
    "negated": (lambda: torch.ones(4, dtype=torch.complex64).conj().imag, "resolve_neg()"),
    "quantized": (quantized, "Float8Tensor"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what it calls a beta
@pytest.mark.parametrize("kind", [*NO_MEMORY, "inference", "overlapping"])
def test_samples_that_no_graph_can_read(kind):
    make, word = (
        NO_MEMORY.get(kind)
        or {
            "inference": (inference, "clone()"),
            "overlapping": (lambda: torch.ones(4).as_strided((3, 2), (1, 1)), "strides [1, 1]"),
        }[kind]
    )
    with refused(ValueError, OP, "sample argument 0", "callable 0 (twice)", word):
        te.make_graphed_callables(twice, (make(),))
    with refused(ValueError, OP, "sample argument 'k'", word):
        te.make_graphed_callables(twice, (torch.ones(3),), sample_kwargs={"k": make()})


@pytest.mark.parametrize("strides", [(3, 2), (1, 3), (8, 2)])
def test_samples_with_strides_that_do_not_overlap(strides):
    x = torch.zeros(32).as_strided((2, 3), strides)
    graphed = te.make_graphed_callables(lambda x: x * 2, (x,))
    given = torch.zeros(32).as_strided((2, 3), strides).copy_(torch.arange(6.0).view(2, 3))
    assert_same_bits(graphed(given), torch.arange(6.0).view(2, 3) * 2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", NO_MEMORY)
def test_a_replay_with_tensors_that_no_graph_can_read(kind):
    make, word = NO_MEMORY[kind]
    like = make()
    shape = (2,) if like.is_nested else tuple(like.shape)
    static = torch.empty_strided(shape, like.stride() if kind == "negated" else torch.ones(shape).stride())
    graphed = te.make_graphed_callables(twice, (static.to(like.dtype).fill_(3),))
    with pytest.raises(ValueError) as caught:
        graphed(like)
    assert "argument 0" in str(caught.value) and "captured was" in str(caught.value)
    if kind != "meta":  # the error for another device comes first
        assert word in str(caught.value)


def test_the_conjugate_of_the_static_input_is_not_the_static_input():
    static = torch.full((3,), 1 + 2j)
    graphed = te.make_graphed_callables(lambda x: x * 2, (static,))
    with refused(ValueError, "argument 0", "conjugated"):
        graphed(static.conj())
    assert_same_bits(graphed(static.conj().resolve_conj()), torch.full((3,), 2 - 4j))


def test_samples_made_and_used_in_inference_mode():
    with torch.inference_mode():
        graphed = te.make_graphed_callables(lambda x: x * 2, (torch.ones(4),))
        assert_same_bits(graphed(torch.full((4,), 3.0)), torch.full((4,), 6.0))


# ---- values of other arguments ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enabled": 1}, ["'enabled'", "is 1,", "a bool"]),
        ({"enabled": (1,)}, ["'enabled'", "(1,)"]),
        ({"enabled": {}}, ["'enabled'"]),
        ({"calibrating": "yes"}, ["'calibrating'", "'yes'"]),
        ({"recipe": 5}, ["'recipe'", "5", "transformer_engine.common.recipe"]),
        ({"recipe": DelayedScaling}, ["'recipe'", "DelayedScaling"]),
        ({"recipe": (None, None)}, ["'recipe'", "1 callables"]),
        ({"amax_reduction_group": 5}, ["'amax_reduction_group'", "5", "process group"]),
        ({"cache_quantized_params": 1}, ["'cache_quantized_params'", "1"]),
        ({"allow_unused_input": "x"}, ["'allow_unused_input'", "'x'"]),
        ({"retain_graph_in_backward": None}, ["'retain_graph_in_backward'", "None"]),
        ({"clone_param_grads_on_return": 5}, ["'clone_param_grads_on_return'", "5"]),
        ({"_reuse_graph_input_output_buffers": 5}, ["'_reuse_graph_input_output_buffers'", "5"]),
        ({"pool": 5}, ["'pool'", "5", "graph_pool_handle()"]),
        ({"pre_warmup_hook": 5}, ["'pre_warmup_hook'", "5", "function"]),
        ({"post_warmup_hook": True}, ["'post_warmup_hook'", "True"]),
        ({"capture_time_hooks": [5]}, ["'capture_time_hooks'", "5", "callable 0"]),
        ({"capture_time_hooks": [[]]}, ["'capture_time_hooks'", "[]"]),
        ({"num_warmup_iters": True}, ["'num_warmup_iters'", "True"]),
        ({"sample_kwargs": {1: 2}}, ["'sample_kwargs'", "the key 1"]),
        ({"sample_kwargs": [torch.ones(1000)]}, ["'sample_kwargs'", "torch.float32 [1000]"]),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_values_that_mean_nothing(options, words):
    module = build(linear, "cpu")
    with refused(ValueError, OP, *words):
        te.make_graphed_callables(module, (tokens("cpu", grad=True),), **options)
    assert "forward" not in vars(module)


def test_callables_that_cannot_run():
    x = (torch.ones(2, HIDDEN),)
    with refused(ValueError, OP, "'modules'", "the class Linear at 0"):
        te.make_graphed_callables(te.Linear, x)
    with refused(ValueError, OP, "'modules'", "ModuleList at 0", "tuple of its modules"):
        te.make_graphed_callables(torch.nn.ModuleList([build(linear, "cpu")]), x)
    outer = torch.nn.Sequential(build(linear, "cpu"))
    with refused(ValueError, OP, "callable 0 (Sequential)", "contains another", "Linear"):
        te.make_graphed_callables((outer, outer[0]), (x, x))


@pytest.mark.parametrize("layers", [1.0, True, [1.0], [True], {1}, object()], ids=lambda n: repr(n).split()[0])
def test_wrong_numbers_of_layers_per_chunk(layers):
    with refused(ValueError, OP, "'_num_layers_per_chunk'", "wanted a number from 0 up for each chunk"):
        pipeline_schedule([1, -1], layers, 1, [False])


def test_an_order_of_numpy_numbers():
    order = [np.int64(1), np.int32(-1), np.float32(-1.5)]
    plain = pipeline_schedule([1, -1, -1.5], [1], 1, [True])
    assert pipeline_schedule(order, [np.int64(1)], 1, [True]) == plain
    assert pipeline_schedule(order, np.int64(1), 1, [True]) == plain


@pytest.mark.parametrize(("order", "missing"), [([1, 3, -3, -1], 2), ([2, -2], 1), ([10**30, -1], 2)])
def test_an_order_that_skips_a_chunk(order, missing):
    with refused(ValueError, OP, "'_order'", f"none of chunk {missing}", "without a gap"):
        pipeline_schedule(order, None, 2, [False, False])


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_weight_gradients_where_there_are_none(mode):
    module = build(linear, "cpu", delay_wgrad_compute=True).train(mode != "eval")
    with torch.set_grad_enabled(mode != "no_grad"):
        with refused(ValueError, OP, "'_order' has -1.5", "train mode"):
            te.make_graphed_callables((module,), ((tokens("cpu"),),), _order=[1, -1, -1.5])
        with refused(ValueError, OP, "'_reuse_graph_input_output_buffers'", "train mode"):
            te.make_graphed_callables(
                (module,), ((tokens("cpu"),),), _order=[1, -1], _reuse_graph_input_output_buffers=True
            )


# ---- keywords of a replay ----


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"cuda_graph_stream": "s"}, ["'cuda_graph_stream'", "'s'", "torch.cuda.Stream"]),
        ({"cuda_graph_stream": 5, "cuda_graph_event": 5}, ["'cuda_graph_stream'", "5"]),
        ({"is_first_microbatch": 3}, ["'is_first_microbatch'", "3", "True or False"]),
        ({"is_first_microbatch": "x"}, ["'is_first_microbatch'", "'x'"]),
    ],
)
@pytest.mark.parametrize("caching", [False, True])
def test_replay_keywords_that_mean_nothing(device, caching, keywords, words):
    module = build(linear, device)
    capture(module, device, cache_quantized_params=caching)
    if caching:
        keywords = {"is_first_microbatch": True, **keywords}
    with refused(ValueError, "Linear", *words):
        module(tokens(device), **keywords)


@pytest.mark.gpu
def test_events_of_a_wrong_type():
    module = build(linear, "cuda")
    capture(module, "cuda")
    with refused(ValueError, "Linear", "'cuda_graph_event'", "5", "external=True"):
        module(tokens("cuda"), cuda_graph_stream=torch.cuda.Stream(), cuda_graph_event=5)
