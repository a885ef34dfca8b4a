# Quantized tensors that leave and come back: through save_for_backward, copies, pickle, torch.save under weights_only,
# DCP, files of plain tensors; and files that lie.
import copy
import io
import pickle

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from quantized_cases import FORMATS, FP8_FORMATS, assert_same_parts, assert_same_tensor, parts_of
from support import assert_same_bits, randn, refused, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import pack_state_dict, pickling, unpack_state_dict

every_format = pytest.mark.parametrize("name", FORMATS)
every_fp8 = pytest.mark.parametrize("name", FP8_FORMATS)
SHAPES = [(5, 7), (6, 48), (3, 2, 40), (0, 5), (2, 65, 300)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def made(name, device, *shape, internal=False, **usages):
    quantizer = FORMATS[name](device=device, **usages)
    quantizer.internal = internal
    return quantizer(randn(*(shape or (6, 40)), device=device))


def pointers(t):
    return [p.data_ptr() for p in parts_of(t).values()]


# ---- save_for_backward ----


@every_format
def test_a_storage_is_taken_apart_and_put_together(device, name):
    storage = made(name, device, 3, 5, 40, internal=True)
    wanted, before, usages = parts_of(storage), pointers(storage), storage.get_usages()
    x, size = randn(2, device=device), storage.size()
    tensors, objects = te.prepare_for_saving(x, storage, None)
    assert all(t is None or type(t) is torch.Tensor for t in tensors) and objects[1] is storage
    assert parts_of(storage) == {} and tensors[0] is x and tensors[-1] is None
    if name in ("delayed", "current"):
        assert [t.data_ptr() for t in tensors[1:4]] == [
            wanted[n].data_ptr() for n in ("_data", "_transpose", "_scale_inv")
        ]
    back = te.restore_from_saved(objects, tensors)
    assert back[0] is x and back[1] is storage and back[2] is None
    assert pointers(storage) == before and storage.get_usages() == usages and storage.size() == size
    assert_same_parts(storage, wanted)
    assert te.restore_from_saved(objects[:1], tensors, return_saved_tensors=True)[1] == tensors[1:]


@every_fp8
def test_directions_survive_saving(device, name):
    for usages in ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}):
        storage = made(name, device, 5, 7, internal=True, **usages)
        value = storage.dequantize()
        tensors, objects = te.prepare_for_saving(storage)
        (back,) = te.restore_from_saved(objects, tensors)
        assert back.get_usages() == usages
        assert_same_bits(back.dequantize(), value)


@every_format
def test_a_tensor_stays_whole_while_it_is_saved(device, name):
    t = made(name, device)
    tensors, objects = te.prepare_for_saving(t)
    assert parts_of(t) != {} and all(x is None or type(x) is torch.Tensor for x in tensors)
    (back,) = te.restore_from_saved(objects, tensors)
    assert back is not t and pointers(back) == pointers(t)
    assert_same_tensor(back, t)


@every_format
def test_through_an_autograd_node(device, name):
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, quantizer):
            tensors, ctx.tensor_objects = te.prepare_for_saving(quantizer(x), x)
            ctx.save_for_backward(*tensors)
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            quantized, _ = te.restore_from_func_ctx(ctx)
            assert ctx.tensor_objects is None
            return quantized.dequantize() * grad, None

    quantizer = FORMATS[name](device=device)
    quantizer.internal = True
    x = randn(6, 40, device=device, requires_grad=True)
    with saved_tensors() as kept:
        y = Node.apply(x, quantizer)
    assert len(kept) == len(parts_of(quantizer(x.detach()))) + 1
    y.sum().backward()
    assert_same_bits(x.grad, quantizer(x.detach()).dequantize())


def test_restoring_what_is_not_there():
    storage = made("current", "cpu", internal=True)
    tensors, objects = te.prepare_for_saving(storage, torch.ones(1))
    for few in (tensors[:2], []):
        with refused(ValueError, "restore_from_saved", len(few), "3"):
            te.restore_from_saved(objects, few)
    with refused(ValueError, "restore_from_saved", "saved_tensors"):
        te.restore_from_saved([None], [])

    class Context:
        saved_tensors = ()

    with refused(ValueError, "restore_from_func_ctx", "tensor_objects", "once"):
        te.restore_from_func_ctx(Context())


# ---- copies ----


@every_format
@every_shape
def test_deepcopies(device, name, shape):
    t = made(name, device, *shape)
    p = torch.nn.Parameter(t)
    p.partition_dim, p.main_grad = 0, torch.ones(3)
    p.grad = randn(*shape, device=device)
    other = copy.deepcopy(p)
    assert_same_tensor(other, p)
    assert not (set(pointers(other)) & set(pointers(p))) - {0}
    assert isinstance(other, torch.nn.Parameter) and other.requires_grad and other.partition_dim == 0
    assert other.main_grad is not p.main_grad and torch.equal(other.main_grad, p.main_grad)
    assert_same_bits(other.grad, p.grad)
    assert other._quantizer is not p._quantizer and type(other._quantizer) is type(p._quantizer)
    module = torch.nn.ParameterList([p, p])
    twins = copy.deepcopy(module)
    assert twins[0] is twins[1] and twins[0] is not p
    storage = made(name, device, *shape, internal=True)
    twin = copy.deepcopy(storage)
    assert_same_parts(twin, storage)
    assert not (set(pointers(twin)) & set(pointers(storage))) - {0}
    with refused(RuntimeError, type(t).__name__, "history"):
        copy.deepcopy(torch.nn.Parameter(t).view_as(t))


# ---- pickle and torch.save ----


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


def by_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_format
@every_shape
@pytest.mark.parametrize("through", [by_pickle, by_torch])
def test_through_a_file(device, name, shape, through):
    t = made(name, device, *shape)
    got = through({"w": t, "again": t})
    assert got["w"] is got["again"]
    assert_same_tensor(got["w"], t, name)
    assert got["w"].device == t.device
    storage = made(name, device, *shape, internal=True)
    assert_same_parts(through(storage), storage)
    p = through(torch.nn.Parameter(t, requires_grad=False))
    assert isinstance(p, torch.nn.Parameter) and not p.requires_grad
    assert through(torch.nn.Parameter(t)).requires_grad
    with torch.no_grad():
        got["w"].copy_(torch.ones_like(t.dequantize()))
    assert (got["w"].dequantize() - 1).abs().max() < 0.05 if t.numel() else True


@every_fp8
def test_one_direction_through_a_file(device, name):
    for usages in ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}):
        t = made(name, device, 5, 7, **usages)
        assert_same_tensor(by_torch(t), t)


@every_format
def test_settings_of_the_quantizer_through_a_file(device, name):
    """Those without state come back; delayed scaling's belongs to the module, and a hybrid's is code."""
    t = made(name, device)
    quantizer = by_torch(t)._quantizer
    if name in ("current", "block1d", "block2d"):
        assert quantizer._plain() == t._quantizer._plain()
    else:
        assert quantizer is None


@every_fp8
def test_a_file_holds_no_more_than_it_needs(device, name):
    """Not the buffer that many tensors share, and not the direction that can be made of the other one."""
    quantizer = FP8_FORMATS[name](device=device)
    many = quantizer.multi_quantize([randn(128, 128, device=device) for _ in range(8)])
    file = io.BytesIO()
    torch.save(many[3], file)
    directions = 2 if name == "block1d" else 1
    assert file.tell() < 128 * 128 * directions + 8000
    file.seek(0)
    assert_same_tensor(torch.load(file, weights_only=True), many[3])


@every_format
def test_a_module_through_files_trains_on(device, name):
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(made(name, device, 16, 40))
    module.w.sequence_parallel = True
    x = randn(3, 40, device=device)

    def step(m):
        m.w.grad = None
        torch.nn.functional.linear(x, m.w).square().sum().backward()
        torch.optim.SGD(m.parameters(), 0.01).step()

    step(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert other.w.sequence_parallel
    if name == "delayed":
        other.w._quantizer = module.w._quantizer
    if name == "hybrid":
        other.w._quantizer = module.w._quantizer.copy()
    step(module)
    step(other)
    assert_same_tensor(other.w, module.w)
    fresh = torch.nn.Module()
    fresh.w = torch.nn.Parameter(made(name, device, 16, 40))
    fresh.load_state_dict(by_torch(module.state_dict()))
    assert_same_tensor(fresh.w, module.w)
    plain = torch.nn.Module()
    plain.w = torch.nn.Parameter(torch.empty(16, 40, device=device))
    plain.load_state_dict(module.state_dict())
    assert_same_bits(plain.w, module.w.dequantize())


@every_format
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_through_dcp(device, name, tmp_path):
    state = {"w": made(name, device, 6, 48), "b": randn(3, device=device)}
    dcp.save(state, checkpoint_id=tmp_path)
    loaded = {"w": made(name, device, 6, 48), "b": torch.zeros(3, device=device)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert_same_tensor(loaded["w"], state["w"])
    plain = {"w": torch.full((6, 48), torch.nan, device=device)}
    dcp.load(plain, checkpoint_id=tmp_path)
    assert_same_bits(plain["w"], state["w"].dequantize())


# ---- files of plain tensors ----


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "hybrid"])
def test_through_safetensors(device, name, tmp_path):
    state = {"layer.w": made(name, device, 5, 7), "layer.w_other": randn(2, device=device), "b": randn(3)}
    tensors, metadata = pack_state_dict(state)
    assert all(type(t) is torch.Tensor for t in tensors.values())
    safetensors.torch.save_file(tensors, tmp_path / "f", metadata)
    with safetensors.safe_open(tmp_path / "f", "pt", device=str(state["layer.w"].device)) as file:
        got = unpack_state_dict({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118
    assert sorted(got) == sorted(state)
    assert_same_tensor(got["layer.w"], state["layer.w"])
    assert_same_bits(got["layer.w_other"], state["layer.w_other"])
    values = {"w": state["layer.w"].dequantize()}
    safetensors.torch.save_file(values, tmp_path / "values")
    assert_same_bits(safetensors.torch.load_file(tmp_path / "values")["w"], values["w"].cpu())


def test_safetensors_refuses_a_quantized_tensor(tmp_path):
    with refused(ValueError, "data_ptr", "Float8Tensor", "pack_state_dict"):
        safetensors.torch.save_file({"w": made("current", "cpu")}, tmp_path / "f")


def test_names_that_fall_together_and_formats_that_do_not_pack():
    t = made("current", "cpu")
    with refused(ValueError, "pack_state_dict", "'w._data'"):
        pack_state_dict({"w._data": torch.ones(1), "w": t})
    with refused(NotImplementedError, "pack_state_dict", "'w'", "HybridQuantizedTensor"):
        pack_state_dict({"w": made("hybrid", "cpu")})
    tensors, metadata = pack_state_dict({"w": t})
    for bad in ("{", "[]", '{"w": 3}', '{"w": {"class": "Float8Tensor"}}'):
        with refused(ValueError, "unpack_state_dict"):
            unpack_state_dict(tensors, dict.fromkeys(metadata, bad))
    with refused(ValueError, "unpack_state_dict", "'w'", "_scale_inv"):
        unpack_state_dict({"w._data": tensors["w._data"]}, metadata)
    assert unpack_state_dict({"b": tensors["w._data"]}, None).keys() == {"b"}


# ---- files that lie ----


def lies(parts, about):
    """(what, parts, description, words of the error)."""
    data = next(iter(parts))
    yield "class", parts, {**about, "class": "Module"}, ("Module",)
    yield "class kind", parts, {**about, "class": ["x"]}, ("class",)
    yield "shape", parts, {**about, "shape": [3, -1]}, ("shape",)
    yield "other shape", parts, {**about, "shape": [7, 5]}, (data, "(7, 5)" if "block" not in data else data)
    yield "huge shape", parts, {**about, "shape": [2**60, 2**60]}, ("shape",)
    yield "dtype", parts, {**about, "dtype": "int8"}, ("dtype", "int8")
    yield "usages", parts, {**about, "usages": {"rowwise": True}}, ("usages",)
    yield "details", parts, {**about, "details": None}, ("details",)
    yield "no fp8 dtype", parts, {**about, "details": {**about["details"], "_fp8_dtype": 3}}, ("fp8_dtype", "3")
    yield "data dtype", {**parts, data: parts[data].float()}, about, (data, "float32", "uint8")
    yield "data type", {**parts, data: [1]}, about, (data, "list")
    yield "no scale", {n: t for n, t in parts.items() if "scale" not in n}, about, ("scale_inv",)
    yield "no data", {n: t for n, t in parts.items() if "scale" in n}, about, ("none of",)
    yield "scale", {n: t.half() if "scale" in n else t for n, t in parts.items()}, about, ("scale_inv", "float16")
    yield "part", {**parts, "_evil": torch.ones(1)}, about, ("_evil",)
    yield "quantizer", parts, {**about, "quantizer": {"class": "HybridQuantizer"}}, ("quantizer", "HybridQuantizer")
    yield "quantizer text", parts, {**about, "quantizer": "rm"}, ("quantizer", "rm")
    plain = FORMATS["current"]()._plain()
    yield "settings", parts, {**about, "quantizer": {**plain, "amax_epsilon": "x"}}, ("amax_epsilon", "'x'")
    yield "too many settings", parts, {**about, "quantizer": {**plain, "hook": 1}}, ("hook",)
    yield "description", parts, 7, ("description",)


@every_fp8
def test_descriptions_that_lie_are_named(name):
    t = made(name, "cpu", 5, 7)
    parts, about = pickling.described(t)
    assert_same_tensor(pickling.rebuilt(parts, about), t)
    for what, bad_parts, bad_about, words in lies(parts, about):
        with pytest.raises(ValueError) as caught:
            pickling.rebuilt(bad_parts, bad_about)
        assert all(word in str(caught.value) for word in words), f"{what}: {caught.value}"


class Hostile:
    def __init__(self, parts, about):
        self.content = pickling.rebuilt_tensor, (parts, about, False, False, {})

    def __reduce__(self):
        return self.content


def test_hostile_and_truncated_files():
    t = made("block2d", "cpu", 5, 7)
    parts, about = pickling.described(t)
    for what, bad_parts, bad_about, _ in lies(parts, about):
        file = io.BytesIO()
        torch.save({"w": Hostile(bad_parts, bad_about)}, file)
        file.seek(0)
        with pytest.raises((ValueError, pickle.UnpicklingError)):
            torch.load(file, weights_only=True)
            raise AssertionError(what)
    file = io.BytesIO()
    torch.save(t, file)
    whole = file.getvalue()
    for length in (0, 10, len(whole) // 2, len(whole) - 10):
        with pytest.raises((RuntimeError, EOFError, pickle.UnpicklingError)):
            torch.load(io.BytesIO(whole[:length]), weights_only=True)
    stolen = io.BytesIO()
    torch.save({"w": t, "q": FORMATS["current"]()}, stolen)  # a bare quantizer is code, and not loaded
    stolen.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Float8CurrentScalingQuantizer"):
        torch.load(stolen, weights_only=True)


def test_an_empty_tensor_is_not_saved():
    t = made("current", "cpu")
    t.clear()
    with refused(RuntimeError, "Float8Tensor.save", "no data"):
        pickle.dumps(t)
