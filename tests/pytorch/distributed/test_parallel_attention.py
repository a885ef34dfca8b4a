# Attention and transformer layers on several ranks against the same modules whole. Mutants: the gradients of q_norm and
# k_norm not marked, ALiBi's slopes of the first heads on every rank, rotary positions checked against
# a rank's tokens, the dropout of divided tensors drawn without a fork, turn these red.
import pytest
import torch
from ranks import found_by, on_ranks

from . import parallel_attention_workers as workers

pytestmark = pytest.mark.dist
found = found_by(workers.everything)


@pytest.mark.parametrize(
    "worker", ["attention", "layer", "by_head", "contexts", "kinds_of_state", "gathered_norms", "compiled"]
)
def test_divided_is_whole(found, worker):
    for wrong in found[worker]:
        assert not wrong, "\n".join(wrong[:5])


def test_divided_over_four_is_whole():
    for wrong in on_ranks(workers.cases, "layer", ranks=4):
        assert not wrong, "\n".join(wrong[:5])


def test_copies_keep_group_and_marks(found):
    for copies in found["copies"]:
        modules = [(True, {True}, 2, sequence) for sequence in (True, True, False, False)]
        assert copies == [*modules * 2, *[(True, {True}, 2, True)] * 2]


def test_a_group_that_comes_later(found):
    for equal, inner, reached in found["late_group"]:
        assert equal and reached
        # The layer, two attentions with core, proj, q_norm, k_norm, projections of one and of two, and the MLP.
        assert inner == 1 + 2 * 5 + 3 + 1


def test_dropout_differs_where_something_is_divided(found):
    one, other = found["draws"]
    for sequence, forks in one:
        (attended, dropped), (attended2, dropped2) = one[sequence, forks], other[sequence, forks]
        # Heads are always divided; under sequence parallelism only the caller's fork makes the ranks differ.
        assert torch.equal(attended, attended2) == (sequence and not forks), (sequence, forks)
        assert torch.equal(dropped, dropped2) == (not sequence and not forks), (sequence, forks)
        assert 0.3 < (dropped == 0).float().mean() < 0.7


def test_refusals_are_the_same_on_every_rank(found):
    (said, works), other = found["refusals"]
    assert all(works) and other == (said, works)
    wanted = [
        ("ValueError", "DotProductAttention: argument 'num_attention_heads' is 3", "2 ranks", "multiple"),
        ("ValueError", "DotProductAttention: argument 'num_gqa_groups' is 1", "2 ranks", "multiple"),
        ("ValueError", "MultiheadAttention: argument 'num_attention_heads' is 3", "2 ranks", "multiple"),
        ("ValueError", "MultiheadAttention: argument 'num_gqa_groups' is 1", "2 ranks", "multiple"),
        ("ValueError", "argument 'num_attention_heads' is 3", "2 ranks", "multiple"),
        ("ValueError", "argument 'ffn_hidden_size' is 49", "2 ranks", "multiple"),
        ("ValueError", "TransformerLayer: argument 'set_parallel_mode' is False", "2 ranks", "wanted True"),
        ("ValueError", "TransformerLayer: argument 'tp_overlap' is 'fast'", "'auto'"),
        ("ValueError", "MultiheadAttention: argument 'tp_overlap' is 'fast'", "'auto'"),
        ("ValueError", "TransformerLayer: argument 'seq_length' is 7", "2 ranks", "multiple"),
        ("RuntimeError", "DotProductAttention: argument 'alibi_slopes' is None", "set_tensor_parallel_group()"),
        ("ValueError", "DotProductAttention: argument 'query_layer' has shape (4, 2, 4, 8)", "wanted [., ., 2, 8]"),
        ("RuntimeError", "tp_size", "set_tensor_parallel_group()"),
        ("ValueError", "DotProductAttention: argument 'tp_group' has 1 ranks", "divided by 2"),
        ("ValueError", "TransformerLayer: argument 'tp_group' has 1 ranks", "divided by 2"),
        ("ValueError", "MultiheadAttention: argument 'tp_group' has 1 ranks", "divided by 2"),
        ("ValueError", "TransformerLayer: argument 'hidden_states' has shape (8, 2, 32)", "wanted 4", "seq_length 8"),
        ("ValueError", "TransformerLayer: argument 'hidden_states' has shape (2, 4, 32)", "wanted (4, 2)", "'bshd'"),
        ("ValueError", "MultiheadAttention: argument 'rotary_pos_emb' has 4 positions", "length 8"),
    ]
    assert len(said) == len(wanted)
    for words, parts in zip(said, wanted):
        assert words.startswith(parts[0]) and all(part in words for part in parts), words
