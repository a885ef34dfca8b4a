# te.tune: what it may not touch, what it chooses, its file, and its errors. On the GPU: tuned products stay within the
# bounds of untuned ones and repeat their bits; gradients, main_grad and random states are as before. On a GPU a
# Tuner._install that does not call gemm_choose turns test_a_tuned_product_runs_what_was_chosen red.
import json

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.probe.tune import FORMAT, _accumulated, _Scratch, _tune_one

from ..gemm.fp8_operands import BLOCK_1D, BLOCK_2D, TENSOR, Operand


@pytest.fixture(autouse=True)
def nothing_chosen():
    yield
    te.tune.clear()


def key(**changes):
    fields = dict.fromkeys(_C.gemm_key_fields(), 0)
    fields |= {"rows": 16, "cols": 24, "depth": 32, "a_pitch": 32, "b_pitch": 32, "d_pitch": 24, "dtype": 5}
    fields |= {"b_dtype": 5, "d_dtype": 5, "bias_dtype": -1, "a_alignment": 16, "b_alignment": 16, "d_alignment": 16}
    return fields | changes


def table(**changes):
    problem = {field: value for field, value in key().items() if field != "device"}
    entry = {"problem": problem, "algorithm": "00" * 72, "heuristic_us": 2.0, "chosen_us": 1.0, "candidates": 3}
    return {"format": FORMAT, "gpu": "NVIDIA H200", "cublaslt": 1, "problems": [entry]} | changes


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_module_on_the_cpu_has_nothing_to_tune():
    with pytest.raises(ValueError, match=r"tune: the module and its sample are on the CPU.*Move both"):
        te.tune(te.Linear(8, 8, device="cpu"), torch.randn(4, 8))


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="tune: argument 'module' is a int"):
        te.tune(3)
    for wrong in (0, -1, 2.5, "all"):
        with pytest.raises(ValueError, match="tune: argument 'candidates' is"):
            te.tune(te.Linear(8, 8, device="cpu"), torch.randn(4, 8), candidates=wrong)


def test_nothing_tuned_is_nothing_to_save(tmp_path):
    with pytest.raises(RuntimeError, match=r"tune.save: nothing was tuned in this process; call te.tune"):
        te.tune.save(tmp_path / "table.json")
    assert not (tmp_path / "table.json").exists()


def broken_tables():
    problem = table()["problems"][0]
    yield "", "was not written by"
    yield "{", "was not written by"
    yield b"\xff\xfe".decode("latin1"), "was not written by"
    yield [], "was not written by"
    yield {}, "was not written by"
    yield table(format="something else"), "its format is 'something else'"
    yield table(problems=3), "was not written by"
    yield table(problems=[{}]), "was not written by"
    yield table(problems=[problem | {"algorithm": "00"}]), "wrong fields or length"
    yield table(problems=[problem | {"algorithm": "zz"}]), "was not written by"
    yield table(problems=[problem | {"problem": problem["problem"] | {"more": 1}}]), "wrong fields or length"
    yield table(problems=[problem | {"problem": problem["problem"] | {"dtype": 2}}]), "a dtype that no GEMM accepts"
    yield table(problems=[problem | {"problem": problem["problem"] | {"d_dtype": 6}}]), "a dtype that no GEMM accepts"
    yield table(problems=[problem | {"problem": problem["problem"] | {"a_scaling": 3}}]), "a scaling that no GEMM"
    yield table(problems=[problem | {"problem": problem["problem"] | {"layout": 3}}]), "a layout or an epilogue"
    yield table(problems=[problem | {"problem": problem["problem"] | {"rows": "many"}}]), "was not written by"
    yield table(cublaslt=None), "was not written by"


@pytest.mark.parametrize(("content", "why"), list(broken_tables()))
def test_a_broken_table_is_named_and_not_loaded(tmp_path, content, why):
    path = write(tmp_path / "table.json", content)
    with pytest.raises(ValueError, match=r"tune.load: '.*table.json' was not written by te.tune.save") as error:
        te.tune.load(path)
    assert why in str(error.value)
    with pytest.raises(RuntimeError, match="nothing was tuned"):
        te.tune.save(tmp_path / "again.json")


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        te.tune.load(tmp_path / "none.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_a_good_table_needs_a_gpu(tmp_path):
    with pytest.raises(RuntimeError, match=r"tune\.load: there is no CUDA device"):
        te.tune.load(write(tmp_path / "table.json", table()))


@pytest.mark.parametrize(("field", "value"), [("gpu", "NVIDIA H100"), ("cublaslt", 2)])
def test_a_table_of_another_gpu_or_version_is_ignored_with_one_warning(tmp_path, monkeypatch, field, value):
    monkeypatch.setattr("transformer_engine.pytorch.probe.tune._need_gpu", lambda op: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(_C, "gemm_library_version", lambda: 1)
    monkeypatch.setattr(_C, "gemm_choose", pytest.fail)
    path = write(tmp_path / "table.json", table(**{field: value}))
    with pytest.warns(match=f"was tuned on .* {value}, but this is .*: it is ignored. Tune again") as warned:
        assert te.tune.load(path).rows == [] and te.tune.load(path).rows == []
    assert len(warned) == 1
    with pytest.raises(RuntimeError, match="nothing was tuned"):
        te.tune.save(tmp_path / "again.json")


def test_the_engine_names_what_it_is_not_asked_for():
    with pytest.raises(ValueError, match="te_gemm_candidates: argument 'device' is the CPU"):
        _C.gemm_candidates(key(device=-1), 4)
    with pytest.raises(ValueError, match="te_gemm_candidates: argument 'most' is 0"):
        _C.gemm_candidates(key(), 0)
    with pytest.raises(ValueError, match="a choice has 3 bytes, wanted 72"):
        _C.gemm_choose([key()], [b"abc"])
    with pytest.raises(ValueError, match="1 keys and 0 choices"):
        _C.gemm_choose([key()], [])


def test_fused_accumulation_adds_its_products():
    linear = te.Linear(24, 16, bias=False, device="cpu", fuse_wgrad_accumulation=True)
    wgrad, fprop = key(layout=2, epilogue=4, bias_dtype=5), key()
    more = _accumulated(linear, [fprop, wgrad])
    assert [(k["accumulate"], k["d_dtype"], k["epilogue"], k["bias_dtype"]) for k in more] == [
        (0, 3, 0, -1),
        (1, 3, 0, -1),
    ]
    assert _accumulated(te.Linear(24, 16, device="cpu"), [fprop, wgrad]) == []


def test_fp8_weight_gradients_are_accumulated_too():
    linear = te.Linear(24, 16, bias=False, device="cpu", fuse_wgrad_accumulation=True)
    fp8 = {"dtype": 6, "b_dtype": 7}
    squares, wgrad = key(**fp8, a_scaling=2, b_scaling=1), key(**fp8, a_scaling=1, b_scaling=1)
    fast, whole = key(**fp8, fast_accumulation=1), key(**fp8)
    more = _accumulated(linear, [squares, wgrad, fast, whole])
    assert [(k["accumulate"], k["d_dtype"], k["a_scaling"]) for k in more] == [
        (0, 3, 1),
        (1, 3, 1),
        (0, 3, 0),
        (1, 3, 0),
    ]


# ---- on a GPU ----


def linear_step(module, x, dy):
    x = x.detach().requires_grad_()
    y = module(x)
    grads = torch.autograd.grad(y, (x, *module.parameters()), dy)
    return [y.detach(), *grads]


@pytest.fixture
def layer():
    torch.manual_seed(5)
    module = te.Linear(512, 768, bias=True, device="cuda", params_dtype=torch.bfloat16)
    return module, torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
def test_tuned_products_keep_their_bounds_and_repeat_their_bits(layer):
    module, x = layer
    dy = torch.randn(256, 768, device="cuda", dtype=torch.bfloat16)
    untuned = linear_step(module, x, dy)
    tuning = te.tune(module, x.requires_grad_(), candidates=16)
    assert len(tuning.rows) == 3 and all(r.gain >= 1 for r in tuning.rows)
    assert "heuristic us" in str(tuning)
    tuned = linear_step(module, x, dy)
    for again in range(3):
        for a, b in zip(tuned, linear_step(module, x, dy), strict=True):
            assert torch.equal(a, b), again
    w, b = (p.detach().double() for p in (module.weight, module.bias))
    xd, dyd = x.detach().double(), dy.double()
    exact = [xd @ w.T + b, dyd @ w, dyd.T @ xd, dyd.sum(0)]
    sizes = [xd.abs() @ w.abs().T + b.abs(), dyd.abs() @ w.abs(), dyd.abs().T @ xd.abs(), dyd.abs().sum(0)]
    # As in the tests of gemm: 2 u per term (tensor cores truncate), K at most 768; and half a unit for the store, twice
    # if cuBLASLt rounds before the bias.
    for got, old, want, size in zip(tuned, untuned, exact, sizes, strict=True):
        bound = 2 * 768 * 2.0**-24 * size + 2 * 2.0**-8 * want.abs() + 1e-30
        assert ((got.double() - want).abs() <= bound).all()
        assert ((old.double() - want).abs() <= bound).all()


@pytest.mark.gpu
def test_a_tuned_product_runs_what_was_chosen(layer):
    """With the slowest candidate chosen by hand, the GEMM takes its time."""
    module, x = te.Linear(4096, 4096, bias=False, device="cuda", params_dtype=torch.bfloat16), None
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    _C.tune_start()
    with torch.no_grad():
        module(x)
    (met,) = _C.tune_stop()
    choices = _C.gemm_candidates(met, 64)
    scratch = _Scratch(met)
    scratch.workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    for choice in choices:
        scratch.run(choice)
    times = {choice: min(scratch.sample(choice, 3) for _ in range(3)) for choice in choices}
    slowest = max(choices, key=times.get)
    assert times[slowest] > 1.3 * times[choices[0]], "no candidate is slow enough to differ"

    def product_us():
        with torch.no_grad():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            module(x)
            start.record()
            for _ in range(5):
                module(x)
            stop.record()
            stop.synchronize()
        return 1e3 * start.elapsed_time(stop) / 5

    before = min(product_us() for _ in range(3))
    _C.gemm_choose([met], [slowest])
    chosen = min(product_us() for _ in range(3))
    te.tune.clear()
    after = min(product_us() for _ in range(3))
    assert chosen > 1.15 * max(before, after)


@pytest.mark.gpu
def test_nothing_of_the_module_changes(layer):
    module, x = layer
    module.weight.grad = torch.full_like(module.weight, 3)
    fused = te.Linear(512, 768, bias=False, device="cuda", params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.full((768, 512), 7.0, device="cuda")
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    before = [p.detach().clone() for p in (*module.parameters(), *fused.parameters())]
    te.tune(module, x.requires_grad_(), candidates=4)
    tuning = te.tune(fused, x, candidates=4)
    assert any(r.problem["accumulate"] and r.problem["d_dtype"] == 3 for r in tuning.rows)
    for p, value in zip((*module.parameters(), *fused.parameters()), before, strict=True):
        assert torch.equal(p, value)
    assert x.grad is None and (module.weight.grad == 3).all() and module.bias.grad is None
    assert fused.weight.grad is None and (fused.weight.main_grad == 7).all()
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], torch.cuda.get_rng_state())


@pytest.mark.gpu
def test_a_table_survives_its_file(layer, tmp_path):
    module, x = layer
    tuned = te.tune(module, x.requires_grad_(), candidates=8)
    te.tune.save(tmp_path / "table.json")
    y = module(x)
    te.tune.clear()
    loaded = te.tune.load(tmp_path / "table.json")
    assert loaded.rows == tuned.rows and torch.equal(y, module(x))
    text = json.loads((tmp_path / "table.json").read_text())
    for field, value in (("gpu", "another"), ("cublaslt", 1)):
        te.tune.clear()
        with pytest.warns(match=r"was tuned on .*, but this is .*: it is ignored. Tune again"):
            assert te.tune.load(write(tmp_path / "other.json", text | {field: value})).rows == []
        with pytest.raises(RuntimeError, match="nothing was tuned"):
            te.tune.save(tmp_path / "again.json")
    text["problems"][-1]["algorithm"] = "ff" * 72
    with pytest.raises(ValueError, match="te_gemm_choose: argument 'choice' is refused by cuBLASLt"):
        te.tune.load(write(tmp_path / "other.json", text))
    with pytest.raises(RuntimeError, match="nothing was tuned"):
        te.tune.save(tmp_path / "again.json")


@pytest.mark.gpu
def test_a_capture_is_refused(layer):
    module, x = layer
    module(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="tune: called inside of a CUDA graph capture"):
            te.tune(module, x)
        y = module(x)
    graph.replay()
    assert torch.equal(y, module(x))


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", [(TENSOR, TENSOR), (BLOCK_2D, BLOCK_1D), (BLOCK_1D, BLOCK_1D)])
def test_fp8_products_are_tuned(tmp_path, scaling):
    a, b = Operand(256, 1024, scaling[0], False, "cuda"), Operand(512, 1024, scaling[1], True, "cuda")

    def product():
        return torch.ops.te.gemm_fp8(*a.arguments, *b.arguments, torch.float32, None, False)

    _C.tune_start()
    untuned = product()
    (met,) = _C.tune_stop()
    row = _tune_one(met, 8)
    te.tune._install([row])
    assert "float8_e4m3fn x float8_e5m2" in str(row) and torch.equal(product(), untuned)
    te.tune.save(tmp_path / "table.json")
    te.tune.clear()
    assert te.tune.load(tmp_path / "table.json").rows[0].algorithm == row.algorithm
