# Where parameters lie: the tables that the contract gives, and what holds for any sizes, dtypes, marks and ranks.
import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_engine.pytorch.data_parallel.layout import ParamSpec, buffer_layouts, default_bucket_size

F32, BF16 = torch.float32, torch.bfloat16


def squares(shared=None):
    return [ParamSpec(f"p{i}", 95 * 95, F32, F32, shared=i == shared) for i in range(10)]


def table(specs, **given):
    (buffer,) = buffer_layouts(specs, sharded=True, expert_ranks=1, **given)
    return buffer, [(bucket.numel_unpadded, bucket.end - bucket.start) for bucket in buffer.buckets]


def start_of(buffer, param):
    return next(slot.start for slot in buffer.slots if slot.param == param)


def test_buckets_of_two_parameters():
    buffer, buckets = table(squares(), ranks=2, bucket_size=9050)
    assert buckets == [(18113, 18176)] * 5
    assert start_of(buffer, 0) == 81792
    buffer, buckets = table(squares(), ranks=3, bucket_size=9050)
    assert buckets == [(18113, 18432)] * 5
    assert start_of(buffer, 0) == 82816


def test_the_last_bucket_is_smaller():
    _, buckets = table(squares(), ranks=2, bucket_size=20000)
    assert buckets == [(27201, 27264)] * 3 + [(9025, 9088)]


def test_a_shared_embedding_has_its_own_bucket():
    _, buckets = table(squares(shared=9), ranks=2, bucket_size=18000)
    assert buckets == [(9025, 9088)] + [(18113, 18176)] * 4 + [(9025, 9088)]


def test_ends_for_high_bandwidth():
    _, buckets = table(squares(), ranks=2, bucket_size=9050, high_busbw=True)
    assert buckets == [(18113, 65536)] * 5


def test_number_of_buckets():
    _, buckets = table(squares(), ranks=2, num_buckets=5)
    assert buckets == [(18113, 18176)] * 5


def test_one_bucket_and_no_padding_without_shards():
    (buffer,) = buffer_layouts(squares(), sharded=False, ranks=2, expert_ranks=1, one_bucket=True)
    assert [(b.numel_unpadded, b.end) for b in buffer.buckets] == [(90250, 90250)]
    assert [slot.param for slot in buffer.slots] == list(range(9, -1, -1))
    assert default_bucket_size(2) == 40_000_000 and default_bucket_size(64) == 64_000_000


def test_a_unit_keeps_its_own_order_without_gaps():
    q, k, v = (ParamSpec(name, 100, F32, F32, unit=(7, i)) for i, name in enumerate("qkv"))
    specs = [ParamSpec("a", 10, F32, F32), q, k, v, ParamSpec("b", 10, F32, F32)]
    (buffer,) = buffer_layouts(specs, sharded=True, ranks=2, expert_ranks=1, bucket_size=100)
    places = [(specs[s.param].name, s.start, s.end) for s in buffer.slots]
    assert places == [("b", 0, 10), ("q", 64, 164), ("k", 164, 264), ("v", 264, 364), ("a", 384, 394)]
    assert len(buffer.buckets) == 2


spec = st.builds(
    ParamSpec,
    st.just("p"),
    st.integers(1, 3000),
    st.sampled_from([F32, BF16, torch.uint8]),
    st.sampled_from([F32, BF16]),
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(0, 10**6))),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(spec, min_size=1, max_size=30),
    st.booleans(),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 3), (6, 2), (8, 4)]),
    st.one_of(st.none(), st.integers(1, 10_000)),
    st.booleans(),
)
def test_every_element_is_in_one_bucket_and_one_shard(specs, sharded, ranks, size, one_bucket):
    given_ranks = {"ranks": ranks[0], "expert_ranks": ranks[1]}
    layouts = buffer_layouts(specs, sharded=sharded, **given_ranks, bucket_size=size, one_bucket=one_bucket)
    found = sorted(slot.param for layout in layouts for slot in layout.slots)
    assert found == list(range(len(specs)))
    for layout in layouts:
        n = ranks[layout.expert]
        assert layout.buckets[0].start == 0
        assert all(a.end == b.start for a, b in zip(layout.buckets, layout.buckets[1:]))
        for bucket in layout.buckets:
            end = bucket.start
            for slot in bucket.slots:
                kind = specs[slot.param]
                assert (kind.param_dtype, kind.grad_dtype, kind.expert) == layout[:3]
                assert slot.end - slot.start == kind.numel and end <= slot.start < end + 64
                end = slot.end
            assert end - bucket.start == bucket.numel_unpadded
            if not sharded:
                assert bucket.end == end
                continue
            assert (bucket.end - bucket.start) % math.lcm(n, 128) == 0 and bucket.end - end < math.lcm(n, 128)
            cuts = [bucket.shard(rank, n) for rank in range(n)]
            assert cuts[0][0] == bucket.start and cuts[-1][1] == bucket.end
            assert len({last - first for first, last in cuts}) == 1
            assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    if one_bucket and not (sharded and any(s.shared for s in specs)):
        assert all(len(layout.buckets) == 1 for layout in layouts)
