# Programs over one quantized tensor, its views, aliases and copies, beside plain tensors that hold the values of torch.
# Values are compared after every line: values that were not written have their bits, those that a line wrote equal the
# written ones, by one rounding of the format. A line may be refused; then nothing has changed.
import copy
import io
import pickle

import torch
from generated import refused
from quantized_cases import E4M3, E5M2, FORMATS

import transformer_engine.pytorch as te

SHAPES = [(6, 40), (6, 40), (4, 3, 32), (16, 16), (8, 130), (130, 20), (256, 16), (24,), (1, 48)]
SCALE = 3.7  # of the delayed quantizers of quantized_cases
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


class Held:
    """One name of the program: a tensor and, of the same shape, what it should hold by rows and by columns. The two are
    views of one family's values as the tensor is of the family's memory."""

    def __init__(self, name, tensor, rows, columns, family, root=False):
        self.name, self.tensor, self.rows, self.columns = name, tensor, rows, columns
        self.family, self.root, self.closed = family, root, False

    def viewed(self, name, tensor, view):
        return Held(name, tensor, view(self.rows), view(self.columns), self.family)


class Family:
    """Memory that several names share. largest: of all values that it has held, as rows may keep an older scale."""

    largest = 0.0


def quantized(t):
    return isinstance(t, te.QuantizedTensorStorage)


@torch.no_grad()
def held_by(t):
    """{direction: values} of the directions that are there."""
    if not quantized(t):
        return {"rows": t.detach().double()}
    usages, found = t.get_usages(), {}
    for kind, name in (("rowwise", "rows"), ("columnwise", "columns")):
        if usages[kind]:
            one = t.detach()._twin()
            one.update_usage(**{f"{other}_usage": other == kind for other in usages})
            found[name] = one.dequantize().double()
    return found


class Tensors:
    """The tensors of a program."""

    def __init__(self, program, format_name):
        self.p, self.format = program, format_name
        self.fp8 = program.choice((E4M3, E4M3, E5M2))
        self.usages = program.choice(({"rowwise": True, "columnwise": False}, {"rowwise": True, "columnwise": True}))
        self.names = []
        self.count = 0
        shape = program.choice(SHAPES)
        program.say(f"{format_name} {self.fp8} {self.usages} {shape}")
        self.new(self.quantizer()(self.values(shape)), "quantize")

    def quantizer(self):
        return FORMATS[self.format](self.fp8, **self.usages)

    def generator(self):
        return torch.Generator().manual_seed(self.p.getrandbits(31))

    def values(self, shape, *, dtype=torch.float32):
        """Rows of different magnitude, now and then zeros; within what the delayed scale holds."""
        generator = self.generator()
        x = torch.randn(shape, generator=generator)
        if x.dim() > 1 and self.p.chance(0.3):
            x = x * torch.logspace(-2, 1, x.shape[0]).view(-1, *[1] * (x.dim() - 1))
        if self.p.chance(0.1):
            x = x * 0
        return x.clamp(-20, 20).to(dtype)

    def called(self):
        self.count += 1
        return f"t{self.count}"

    def new(self, tensor, how):
        """A name of memory of its own, with the values that it holds: the caller checks whether these are right."""
        found = held_by(tensor)
        rows = found.get("rows", found.get("columns"))
        name = self.called()
        self.p.say(f"{name} = {how}")
        self.names.append(Held(name, tensor, rows.clone(), found.get("columns", rows).clone(), Family(), root=True))
        return self.names[-1]

    def join(self, held):
        self.names.append(held)
        if len(self.names) > 7:
            self.names.pop(self.p.randrange(len(self.names)))

    # ---- what is compared ----

    def tolerance(self, wanted, amax, direction):
        """Of one rounding to the format: half a unit of the last place, near 0 half the smallest number, whose scale is
        at most twice (powers of two) that of the largest value; an eighth more for values rounded before, in bf16."""
        if self.format == "identity":
            return wanted.abs() * 2.0**-7 + 1e-30
        fp8 = E5M2 if self.format == "hybrid" and direction == "columns" else self.fp8
        half, smallest = (2.0**-4, 2.0**-10) if fp8 is E4M3 else (2.0**-3, 2.0**-17)
        unit = 1 / SCALE if self.format == "delayed" else 2 * amax / LARGEST[fp8]
        return (wanted.abs() * half).clamp(min=float(unit * smallest)) * 1.125

    def check(self, written=None):
        """Everything; `written`: (family, of its memory by rows before, by columns, whether an element was written)."""
        for held in self.names:
            for direction, got in held_by(held.tensor).items():
                wanted = getattr(held, direction)
                assert got.shape == wanted.shape, f"{held.name} has shape {tuple(got.shape)}"
                if written is None or held.family is not written:
                    off = got != wanted
                    what = "changed, and no line wrote it"
                else:
                    amax = max(float(held.rows.abs().max()), float(got.abs().max())) if got.numel() else 0.0
                    sizes = [float(h.rows.abs().max()) for h in self.names if h.family is written and h.rows.numel()]
                    base = written.largest = max(written.largest, *sizes)
                    candidates = (held.rows, held.columns)
                    near = [(got - c).abs() <= self.tolerance(c, max(amax, base), direction) for c in candidates]
                    off, what = ~(near[0] | near[1]), "differs from the written values"
                if off.any():
                    at = int(off.flatten().nonzero()[0])
                    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
                    raise AssertionError(
                        f"{held.name} {direction} {what}: {int(off.sum())} of {off.numel()} elements, first {index} is "
                        f"{got.flatten()[at].item():.6g}, wanted {wanted.flatten()[at].item():.6g}"
                    )

    def settle(self, family):
        """The values of the written family from now on: names of a part first, the widest last. A direction that none
        of them has is taken to be as the other one."""
        names = sorted((h for h in self.names if h.family is family), key=lambda h: h.rows.numel())
        holds = [(held, held_by(held.tensor)) for held in names]
        for held, found in holds:
            held.rows.copy_(found.get("rows", found.get("columns")))
            held.columns.copy_(found.get("columns", found.get("rows")))
        for held, found in holds:
            for direction, values in found.items():
                getattr(held, direction).copy_(values)

    # ---- lines ----

    def read(self, held, how, call):
        """A line that gives a new tensor of the same values."""
        name = self.called()
        self.p.say(f"{name} = {held.name}{how}")
        result = call(held.tensor)
        found = held_by(result)
        rows = held.rows.clone() if "rows" in found else held.columns.clone()
        made = Held(name, result, rows, held.columns.clone(), Family(), root=True)
        self.join(made)

    def view(self, held, how, view):
        """A line that gives a view, for torch at least."""
        name = self.called()
        self.p.say(f"{name} = {held.name}{how}")
        got = []
        error = refused(lambda: got.append(view(held.tensor)))
        if error is not None:
            self.p.say(f"  refused: {error}")
            return
        made = held.viewed(name, got[0], view)
        if type(got[0]).__name__ == "ValuesView":  # a copy of values that cannot be written, and follows no tensor
            made.family, made.rows, made.columns, made.closed = Family(), made.rows.clone(), made.rows.clone(), True
        self.join(made)

    def write(self, held, how, call, *, strict=False, mirror=None):
        """A line that writes: torch's own effect on the values, one rounding aside, or an error and no effect."""
        self.p.say(f"{held.name}{how}")
        wanted = [held.rows.clone(), held.columns.clone()]
        for values, given in zip(wanted, mirror or wanted):
            if refused(call, values) if mirror is None else refused(values.copy_, given):
                return  # torch has no such line either
        error = refused(call, held.tensor)
        if error is not None:
            self.p.say(f"  refused: {error}")
            alone = self.format in ("block1d", "hybrid") and "an alias of it holds" in str(error)
            assert alone or not (strict and held.root), f"{held.name}{how} is refused: {error}"
            self.check()
            return
        assert not held.closed, f"{held.name}{how} is lost: {held.name} is a copy of values"
        if self.format == "delayed":
            largest = LARGEST[self.fp8] / SCALE
            wanted = [values.clamp(-largest, largest) for values in wanted]
        sizes = [float(h.rows.abs().max()) for h in self.names if h.family is held.family and h.rows.numel()]
        held.family.largest = max(held.family.largest, *sizes)
        held.rows.copy_(wanted[0])
        held.columns.copy_(wanted[1])
        self.check(held.family)
        self.settle(held.family)

    def partner(self, held):
        """A quantized tensor of the same shape, that shares no memory with it."""
        found = [h for h in self.names if h.rows.shape == held.rows.shape and h.family is not held.family]
        found = [h for h in found if quantized(h.tensor)]
        return self.p.choice(found) if found else None


def saved(t):
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def rows_of(p, n):
    if n == 256 and p.chance(0.6):
        return p.choice(((0, 128), (128, n), (0, n)))
    first = p.randrange(n)
    return first, p.randint(first + 1, n)


def reading(w, held):
    reads = {
        ".clone()": lambda t: t.clone(),
        ".detach().clone()": lambda t: t.detach().clone(),
        " copied deeply": copy.deepcopy,
        " through a file": saved,
        " pickled": lambda t: pickle.loads(pickle.dumps(t)),
        ".dequantize().clone()": lambda t: t.dequantize().clone(),
        " + 0": lambda t: t + 0,
        ".float().clone()": lambda t: t.float().clone(),
    }
    how = w.p.choice([*reads])
    w.read(held, how, reads[how])


def viewing(w, held):
    p, shape = w.p, tuple(held.rows.shape)
    first, last = rows_of(p, shape[0])
    rows, cols = shape[0], shape[-1]
    a, b = rows_of(p, cols)
    views = {
        ".detach()": lambda t: t.detach(),
        f"[{first}:{last}]": lambda t: t[first:last],
        f"[{first}]": lambda t: t[first],
        f".narrow(0, {first}, {last - first})": lambda t: t.narrow(0, first, last - first),
        ".view(-1, last)": lambda t: t.view(-1, cols),
        ".view(1, ...)": lambda t: t.view(1, *shape),
        ".view(-1)": lambda t: t.view(-1),
        ".unsqueeze(0)": lambda t: t.unsqueeze(0),
        ".view_as()": lambda t: t.view_as(t),
        "[None]": lambda t: t[None],
    }
    for n in {k for k in (2, 3) if k <= rows}:
        i = p.randrange(2)
        views[f".chunk({n})[{i}]"] = lambda t, n=n, i=i: t.chunk(n)[i]
        views[f".split({n})[0]"] = lambda t, n=n: t.split(n)[0]
        views[".split([1, rest])[1]"] = lambda t: t.split([1, rows - 1])[1]
    if len(shape) > 1:
        views[f"[:, {a}:{b}]"] = lambda t: t[:, a:b] if len(shape) == 2 else t[..., a:b]
        views[".transpose(0, 1)"] = lambda t: t.transpose(0, 1)
    if len(shape) == 2:
        views[".t()"] = lambda t: t.t()
    how = p.choice([*views])
    w.view(held, how, views[how])


def writing(w, held):
    p, shape = w.p, tuple(held.rows.shape)
    x, number = w.values(shape), p.choice((0.0, 1.0, -0.5, 3.0))
    first, last = rows_of(p, shape[0])
    a, b = rows_of(p, shape[-1])
    some = torch.rand(shape, generator=w.generator()) < 0.3
    index = torch.tensor(sorted(p.sample(range(shape[0]), p.randint(1, shape[0]))))

    def to(t, values):
        return values.to(t.dtype) if not quantized(t) else values

    def put(t, at, values):
        t[at] = to(t, values)

    whole = {
        ".zero_()": lambda t: t.zero_(),
        f".fill_({number})": lambda t: t.fill_(number),
        ".copy_(x)": lambda t: t.copy_(x),
        ".copy_(x in bf16)": lambda t: t.copy_(x.bfloat16()),
        ".copy_(one row)": lambda t: t.copy_(x[:1]),
        ".mul_(0.5)": lambda t: t.mul_(0.5),
        ".add_(x)": lambda t: t.add_(to(t, x)),
        ".clamp_(-1, 1)": lambda t: t.clamp_(-1, 1),
        ".neg_()": lambda t: t.neg_(),
        " by _foreach_mul_": lambda t: torch._foreach_mul_([t], 0.5),
        ".data.copy_(x)": lambda t: t.data.copy_(x),
        ".detach().copy_(x)": lambda t: t.detach().copy_(x),
        "[:] = x": lambda t: put(t, slice(None), x),
        "[...] = number": lambda t: put(t, ..., torch.tensor(number)),
        " as out of add": lambda t: torch.add(to(t, x), 1, out=t),
    }
    parts = {
        f"[{first}:{last}] = x": lambda t: put(t, slice(first, last), x[first:last]),
        f"[{first}:{last}] = {number}": lambda t: t.__setitem__(slice(first, last), number),
        f"[{first}] = x": lambda t: put(t, first, x[first]),
        f".narrow(0, {first}, {last - first}).zero_()": lambda t: t.narrow(0, first, last - first).zero_(),
        f"[{first}:{last}].copy_(x)": lambda t: t[first:last].copy_(x[first:last]),
        f"[{first}:{last}].mul_(0.5)": lambda t: t[first:last].mul_(0.5),
        f".data[{first}:{last}] = x": lambda t: put(t.data, slice(first, last), x[first:last]),
        f"[..., {a}:{b}] = x": lambda t: put(t, (..., slice(a, b)), x[..., a:b]),
        f"[..., {a}:{b}].zero_()": lambda t: t[..., a:b].zero_(),
        "[mask] = number": lambda t: t.__setitem__(some, number),
        ".masked_fill_(mask, number)": lambda t: t.masked_fill_(some, number),
        "[rows] = x": lambda t: put(t, index, x[index]),
        ".index_fill_(rows)": lambda t: t.index_fill_(0, index, number),
        ".index_copy_(rows)": lambda t: t.index_copy_(0, index, to(t, x[index])),
        ".chunk(2)[0].zero_()": lambda t: t.chunk(2)[0].zero_(),
        ".unbind()[0].zero_()": lambda t: t.unbind()[0].zero_(),
        ".view(-1).zero_()": lambda t: t.view(-1).zero_(),
        ".view(-1, last).copy_(x)": lambda t: t.view(-1, shape[-1]).copy_(x.view(-1, shape[-1])),
    }
    if len(shape) == 2:
        parts[".t().zero_()"] = lambda t: t.t().zero_()
        parts[".t().copy_(x)"] = lambda t: t.t().copy_(x.t())
    if p.chance(0.5):
        how = p.choice([*parts])
        w.write(held, how, parts[how])
        return
    if not quantized(held.tensor):
        how = p.choice([*whole])
        w.write(held, how, whole[how])
        return
    by_itself = {
        ".quantize_(x)": lambda t: t.quantize_(x),
        ".quantize_(x) by a flag of 0": lambda t: t.quantize_(x, noop_flag=torch.zeros(1)),
        ".quantize_(x) by a flag of 1": lambda t: t.quantize_(x, noop_flag=torch.ones(1)),
        " by its quantizer": lambda t: t._quantizer.update_quantized(x, t),
        " as out of its quantizer": lambda t: t._quantizer(x, out=t),
        ".data = x": lambda t: setattr(t, "data", x),
    }
    how = p.choice([*whole, *by_itself])
    has = held.tensor._quantizer is not None or not how.startswith((" by its", " as out of its"))
    if not has:
        return
    if how in by_itself:
        kept = how.endswith("of 1")
        w.write(held, how, by_itself[how], strict=True, mirror=(held.rows, held.columns) if kept else (x, x))
    else:
        w.write(held, how, whole[how], strict=True)


def taking(w, held):
    """Another tensor's data."""
    other = w.partner(held)
    if other is None or not quantized(held.tensor):
        return
    ways = {
        f".copy_({other.name})": lambda t: t.copy_(other.tensor),
        f".quantize_({other.name})": lambda t: t.quantize_(other.tensor),
        f".data.copy_({other.name})": lambda t: t.data.copy_(other.tensor),
    }
    how = w.p.choice([*ways])
    w.write(held, how, ways[how], mirror=(other.rows, other.columns))


def using(w, held):
    """Another set of directions: the values stay. Others that share its memory keep the set that they have."""
    if not quantized(held.tensor):
        return
    row, column = w.p.choice(((True, None), (None, True), (True, True), (True, False), (None, False)))
    if row is None and column is False and not held.tensor.get_usages()["rowwise"]:
        return
    w.p.say(f"{held.name}.update_usage({row}, {column})")
    if error := refused(lambda: held.tensor.update_usage(row, column)):
        w.p.say(f"  refused: {error}")
    else:
        found = held_by(held.tensor)
        if column and "columns" in found and w.format in ("delayed", "current"):
            held.columns.copy_(found["columns"])
            assert torch.equal(found["columns"], held.rows), "made columns differ from the rows"
    w.check()


LINES = {reading: 2, viewing: 4, writing: 6, taking: 1, using: 2}


def run(program, format_name, length=12):
    w = Tensors(program, format_name)
    for _ in range(length):
        line = program.choices([*LINES], [*LINES.values()])[0]
        with torch.no_grad():
            line(w, program.choice([held for held in w.names if held.rows.dim()]))
            w.check()
