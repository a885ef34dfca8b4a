# fuse_wgrad_accumulation under torch.compile: main_grad has the bits of eager; where eager reads a parameter in its
# backward and compiled code cannot, an error names it or the docs describe it, and a test in plain operations shows the
# PyTorch limitation.
import copy

import pytest
import torch
from support import assert_same_bits, call_op, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.torch_version import torch_version

from .weight_grad_cases import (
    backward,
    build,
    every_family,
    gradients,
    linear,
    microbatch,
    mlp,
    split_linear,
    weights,
    with_main_grads,
)

pytestmark = pytest.mark.usefixtures("fp8_left_off")
# Until then compiled code refuses whatever a backward reads and another one has written, however it is kept.
written_between = pytest.mark.skipif(torch_version() < (2, 11), reason="torch >= 2.11: docs/reference/limits.md")


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


def twins(family, device, dtype=torch.float32, main_grad=torch.float32, **options):
    module = build(family, device, dtype, fuse_wgrad_accumulation=True, **options)
    other = copy.deepcopy(module)
    with_main_grads(module, main_grad)
    for name, weight in weights(other).items():
        weight.main_grad = module.get_parameter(name).main_grad.clone()
    return module, other


def check_same(module, other, results=()):
    for got, want in results:
        assert_same_bits(got, want)
    for name, weight in weights(other).items():
        assert_same_bits(module.get_parameter(name).main_grad, weight.main_grad, name)
    wanted = gradients(other)
    for name, gradient in gradients(module).items():
        assert (gradient is None) == (wanted[name] is None), name
        if gradient is not None:
            assert_same_bits(gradient, wanted[name], name)


@every_family
def test_bits_equal_eager(device, family):
    """Added, then overwritten, then added again; the input's gradient too."""
    module, other = twins(family, device)
    call = compiled(module)
    for seed, first in enumerate((None, True, False)):
        x, generator = microbatch(device, torch.float32, seed)
        y, dy = microbatch(device, torch.float32, seed)
        got = backward(call, x, generator, is_first_microbatch=first)
        want = backward(other, y, dy, is_first_microbatch=first)
        check_same(module, other, [(got, want), (x.grad, y.grad)])
    assert all(weight.grad is None for weight in weights(module).values())


@pytest.mark.parametrize("main_grad", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_bfloat16_weights(device, bias, main_grad):
    module, other = twins(linear, device, torch.bfloat16, main_grad, bias=bias)
    for m in (compiled(module), other):
        backward(m, *microbatch(device, torch.bfloat16, 1))
    check_same(module, other)


@pytest.mark.parametrize("recipe", [Float8BlockScaling, Float8CurrentScaling])
@pytest.mark.parametrize("family", [split_linear, mlp], ids=lambda f: f.__name__)
def test_recipes(device, family, recipe):
    module, other = twins(family, device, torch.bfloat16)

    def step(m, x):
        with te.autocast(recipe=recipe()):
            return m(x)

    call = compiled(lambda x: step(module, x))
    for run in (call, lambda x: step(other, x)):
        backward(run, *microbatch(device, torch.bfloat16, 1))
    check_same(module, other)


@written_between
@pytest.mark.parametrize("family", [linear, mlp], ids=lambda f: f.__name__)
def test_two_microbatches_in_flight(device, family):
    module, other = twins(family, device)
    call = compiled(module)
    for m in (call, other):
        ys = [m(microbatch(device, torch.float32, seed)[0]) for seed in (1, 2)]
        for y in reversed(ys):
            y.square().sum().backward()
    check_same(module, other)


@written_between
def test_main_grads_in_one_buffer(device):
    """As data-parallel buffers have them: writing one moves the version of all, also of what another graph keeps."""
    pairs = [twins(linear, device) for _ in range(2)]
    for number in (0, 1):
        buffer = torch.zeros(2, *pairs[0][0].weight.shape, device=device)
        for i in (0, 1):
            pairs[i][number].weight.main_grad = buffer[i]
    x = randn(*microbatch(device, torch.float32, 1)[0].shape, device=device)
    for run in (lambda i: compiled(pairs[i][0]), lambda i: pairs[i][1]):
        ys = [run(i)(x) for i in (0, 1)]
        for y in reversed(ys):
            y.square().sum().backward()
    for module, other in pairs:
        check_same(module, other)


@pytest.mark.parametrize("frozen", [["fc1_weight"], ["fc2_weight"], ["fc1_weight", "fc2_weight"]], ids=str)
def test_frozen_weights(device, frozen):
    module, other = twins(mlp, device)
    for m in (module, other):
        for name in frozen:
            m.get_parameter(name).requires_grad_(False)
    for m in (compiled(module), other):
        backward(m, *microbatch(device, torch.float32, 1))
    check_same(module, other)


def test_parts_of_a_weight_by_themselves(device):
    """One is frozen, one overwrites, one is asked for its main_grad."""
    module, other = twins(split_linear, device)
    for m in (module, other):
        m.query_weight.requires_grad_(False)
        m.key_weight.overwrite_main_grad = True
        m.value_weight.get_main_grad = lambda own=m.value_weight.main_grad: own
    for m in (compiled(module), other):
        backward(m, *microbatch(device, torch.float32, 1))
    check_same(module, other)


def test_torch_autocast_and_other_batches(device):
    module, other = twins(mlp, device)
    for m in (torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True), other):
        for tokens in (4, 7):
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                y = m(torch.linspace(-1, 1, tokens * 32, device=device).view(tokens, 32))
            y.square().sum().backward()
    check_same(module, other)


@written_between
def test_inductor(device):
    """The graph contains the module alone, so the bits equal those of eager."""
    module, other = twins(linear, device)
    for m in (compiled(module, "inductor"), other):
        ys = [m(microbatch(device, torch.float32, seed)[0]) for seed in (1, 2)]
        for y in ys:
            y.backward(torch.ones_like(y))
    check_same(module, other)


def test_main_grad_is_that_of_the_forward(device):
    """Which the docs say: eager reads it in the backward."""
    module, other = twins(linear, device)
    for m, call, where in ((module, compiled(module), 0), (other, other, 1)):
        first = m.weight.main_grad.zero_()
        y = call(microbatch(device, torch.float32, 1)[0])
        m.weight.main_grad = torch.zeros_like(first)
        y.sum().backward()
        assert [bool(t.any()) for t in (first, m.weight.main_grad)] == [where == 0, where == 1]


def test_opcheck(device):
    ops, check = torch.ops.te, torch.library.opcheck
    x, weight, gamma, bias = (randn(*shape, device=device) for shape in ((6, 16), (16, 16), (16,), (16,)))
    for t in (x, weight, gamma, bias):
        t.requires_grad_()
    buffers = [torch.zeros(rows, 16, device=device) for rows in (4, 10)]
    targets = [0, 4, 0, 0, 2, -1, 0, 10, 1]  # of three weights the second is frozen, the third overwrites
    check(ops.linear.main_grad, (x, weight, bias, False, [], [], "", buffers, targets))
    check(ops.activation_linear.main_grad, (x, weight, None, "gelu", [], [], [], "", buffers, targets))
    norm = (1e-5, True, False)
    check(
        ops.normalization_linear.main_grad,
        (x, None, gamma, None, weight, bias, *norm, True, False, [], [], "", buffers, targets),
    )
    products = (weight, bias, weight, None)
    mlp = (x, None, gamma, None, *products, *norm, "gelu", [], True, False, False, False, [], [], [], "")
    check(ops.layernorm_mlp.main_grad, (*mlp, [torch.zeros(16, 16, device=device)], [1, 16, 0]))


# ---- what is refused, by name ----


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m: setattr(m.weight, "grad_added_to_main_grad", False), "'weight' has grad_added_to_main_grad"),
        (lambda m: delattr(m.weight, "main_grad"), "'weight' has main_grad None"),
        (lambda m: setattr(m.weight, "main_grad", m.weight.main_grad[1:]), "wanted a contiguous torch.float32"),
        (lambda m: setattr(m.weight, "main_grad", m.weight.main_grad.half()), r"torch.float16 \[40, 32\]"),
    ],
    ids=["hooks", "missing", "shape", "dtype"],
)
def test_refusals_are_named(device, change, words):
    module, _ = twins(linear, device)
    change(module)
    with pytest.raises(NotImplementedError, match=f"^Linear: .*{words}"):
        compiled(module)(microbatch(device, torch.float32, 1)[0])


def test_a_bad_first_microbatch_is_named(device):
    module, _ = twins(linear, device)
    with pytest.raises(NotImplementedError, match=r"^Linear: .*'is_first_microbatch' is 2, wanted True, False or None"):
        compiled(module)(microbatch(device, torch.float32, 1)[0], is_first_microbatch=2)


# ---- torch's own limits, in plain operations: where one of these turns red, a limit of ours can go ----


def test_torch_refuses_what_a_backward_reads_and_another_one_wrote():
    """The reason of functional.linear._Kept: kept as by save_for_backward, though the function does not save it so."""

    def write(x, out):
        out.add_(x)

    library = torch.library.Library("te_test_main_grad", "DEF")
    library.define("add(Tensor x, Tensor(a!) out) -> ()")
    library.define("identity(Tensor x, Tensor out) -> Tensor")
    library.impl("add", write, "CompositeExplicitAutograd")
    library.impl("identity", lambda x, out: x.clone(), "CompositeExplicitAutograd")

    def backward(ctx, gradient):
        torch.ops.te_test_main_grad.add(gradient, ctx.out)
        return gradient, None

    torch.library.register_autograd(
        "te_test_main_grad::identity",
        backward,
        setup_context=lambda ctx, inputs, output: setattr(ctx, "out", inputs[1]),
        lib=library,
    )
    x, out = torch.ones(3, requires_grad=True), torch.zeros(3)
    for call, raises in (
        (torch.ops.te_test_main_grad.identity, False),
        (compiled(lambda x, out: torch.ops.te_test_main_grad.identity(x, out)), True),
    ):
        first, second = call(x, out), call(x, out)
        second.sum().backward()
        if raises:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                first.sum().backward()
        else:
            first.sum().backward()


class Flag:
    set = False


class NotesGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flag):
        ctx.flag = flag
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.flag.set = True
        return gradient, None


def test_a_compiled_backward_sets_no_attribute():
    """The reason why grad_added_to_main_grad is refused."""
    flag, x = Flag(), torch.ones(3, requires_grad=True)
    NotesGrad.apply(x, flag).sum().backward()
    assert flag.set
    flag.set = False
    try:
        compiled(NotesGrad.apply)(x, flag).sum().backward()
    except Exception as error:
        assert isinstance(error, torch._dynamo.exc.TorchDynamoException)
    assert not flag.set


@pytest.mark.parametrize(
    "main_grads, targets, words",
    [
        (1, [0, 4], ("'targets'", "2 integers")),
        (1, [1, 4, 0], ("'targets'", "product 1")),
        (1, [-1, 4, 0], ("'targets'", "product -1")),
        (0, [0, 4, 0], ("'main_grads'", "0")),
    ],
)
def test_targets_that_name_nothing_are_refused(main_grads, targets, words, device):
    x, weight = torch.ones(2, 4, device=device), torch.ones(4, 4, device=device, requires_grad=True)
    grads = [torch.zeros(4, 4, device=device)] * main_grads
    with refused(ValueError, *words):
        call_op(torch.ops.te.linear.main_grad, x=x, weight=weight, main_grads=grads, targets=targets)
