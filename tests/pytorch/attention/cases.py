# Helpers of the suites of attention masks: inputs, visibility written out score by score, padding given in each way,
# and the comparison with `attend`. No test is here, and nothing of the library.
import torch
from plain_modules import attend, compare, run
from support import randn, wide

HEADS, HEAD, BATCH = 4, 8, 3
TIGHT = 3 * 16  # products in a row (scores, softmax, context) times the longest sum
LENGTHS = {(7, 7): ([7, 3, 0], [7, 3, 0]), (5, 9): ([5, 2, 1], [9, 4, 0]), (9, 5): ([9, 0, 4], [5, 3, 2])}


def shape(layout, *rest, seq):
    return (seq, BATCH, *rest) if layout == "sbhd" else (BATCH, seq, *rest)


def qkv(device, dtype=torch.float32, *, layout="sbhd", groups=HEADS, seqs=(7, 7), head=HEAD):
    return (
        randn(*shape(layout, HEADS, head, seq=seqs[0]), dtype=dtype, device=device),
        randn(*shape(layout, groups, head, seq=seqs[1]), dtype=dtype, device=device),
        randn(*shape(layout, groups, head, seq=seqs[1]), dtype=dtype, device=device),
    )


def lower_right(mask, bottom_right=None):
    """Where the diagonal ends, as the API has it."""
    if "causal" in mask:
        return mask.endswith("bottom_right")
    return bottom_right is None or bottom_right


def by_hand(mask, seqs, *, window=None, bottom_right=None, lengths=None, arbitrary=None):
    """[BATCH, HEADS, s, s_kv], True where a query sees a key: one score at a time."""
    left, right = window or (-1, -1)
    seen = torch.zeros(BATCH, HEADS, *seqs, dtype=torch.bool)
    for b in range(BATCH):
        n_q, n_kv = (lengths[0][b], lengths[1][b]) if "padding" in mask else seqs
        for i in range(n_q):
            for j in range(n_kv):
                ahead = j - i - (n_kv - n_q if lower_right(mask, bottom_right) else 0)
                if ("causal" in mask and ahead > 0) or (left >= 0 and -ahead > left) or (0 <= right < ahead):
                    continue
                seen[b, :, i, j] = True
    return seen if arbitrary is None else seen & ~arbitrary


def padding_mask(lengths, seq, device):
    return (torch.arange(seq) >= torch.tensor(lengths)[:, None])[:, None, None, :].to(device)


def cumulative(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def padding_arguments(how, lengths, seqs, device):
    if how == "lengths":
        return {f"cu_seqlens_{name}": cumulative(n, device) for name, n in zip(("q", "kv"), lengths, strict=True)}
    masks = tuple(padding_mask(n, seq, device) for n, seq in zip(lengths, seqs, strict=True))
    return {"attention_mask": masks[0] if how == "one mask" else masks}


def check(module, tensors, arguments, visible, *, bias=None, layout="sbhd", scale=None):
    """The module against `attend`, which sees `visible` and adds bias(tensors..., extra inputs) to the scaled scores.
    Inputs after q, k, v are the bias, whose gradient counts too."""
    q = tensors[0]

    def ours(m, q, k, v, *rest):
        return m(q, k, v, **arguments, **({"core_attention_bias": rest[0]} if rest else {}))

    def plain(_, q, k, v, *rest):
        added = None if bias is None else bias(*rest).to(q.device, q.dtype).expand(visible.shape)
        options = {"causal": None, "batch_first": layout == "bshd", "scale": scale}
        return attend(q, k, v, visible=visible.to(q.device), bias=added, **options)

    got, near = run(module, *tensors, call=ours), run(module, *tensors, call=plain)
    exact = run(module, *(wide(t) for t in tensors), call=plain)
    compare(got, near, exact, q.dtype, TIGHT)
    return got


def check_zeros(got, visible, layout, lengths=None):
    """Queries without a visible key give zeros and get zero gradients; unseen keys and padding get zero gradients."""

    def by_position(t):
        return t.transpose(0, 1) if layout == "sbhd" else t

    blind = (~visible.any(-1)).all(1).to(got["output 0"].device)  # [b, s]
    unseen = (~visible.any(-2)).all(1).to(blind.device)
    for name, rows in (("output 0", blind), ("gradient of input 0", blind), ("gradient of input 1", unseen)):
        assert by_position(got[name])[rows].eq(0).all(), name
    assert by_position(got["gradient of input 2"])[unseen].eq(0).all()
    assert all(t.isfinite().all() for t in got.values())
