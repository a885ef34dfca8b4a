// The blocks of chunked attention. Order is fixed: sequences, blocks of queries, blocks of keys from the first to the
// last. A block of which no score is seen changes no bit: its factors are 1 and its sums 0, so skipping is free.
#include "ops/attention_chunked.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <limits>

#include "ops/attention_laws.h"
#include "ops/attention_passes.h"
#include "ops/attention_rows.h"

namespace te_torch {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Block {
  int64_t q, queries, k, keys;  // the first row and the number of rows, of each side
};

// One sequence of a call: what its scores are.
class Scores {
 public:
  Scores(const AttentionCall& call, int64_t number, const SequenceRows& queries, const SequenceRows& keys)
      : call_(call), number_(number), queries_(queries), keys_(keys), options_(call.q.options()) {
    if (!call.bottom_right) {
      diagonal_ = 0;
    } else if (queries.count().has_value() && keys.count().has_value()) {
      diagonal_ = *keys.count() - *queries.count();
    } else {
      const auto count = [](const SequenceRows& rows) {
        return rows.count().has_value() ? Tensor() : rows.device_count();
      };
      const Tensor nq = count(queries), nk = count(keys);
      device_diagonal_ = !nq.defined() ? nk - *queries.count() : !nk.defined() ? -nq + *keys.count() : nk - nq;
    }
  }

  // Calls f for each block of keys that a block of queries may see.
  template <class F>
  void for_keys(int64_t q, int64_t queries, const F& f) const {
    for (int64_t k = 0; k < keys_.length(); k += kAttentionKeyBlock) {
      const Block b{q, queries, k, std::min(kAttentionKeyBlock, keys_.length() - k)};
      if (!beyond_window(b)) f(b);
    }
  }

  // [h, queries, keys] with -inf where masked out. q [h, queries, d], k [g, keys, d]. cap: with a soft cap, the tanh.
  Tensor operator()(const Tensor& q, const Tensor& k, const Block& b, Tensor* cap = nullptr) const {
    Tensor s = by_group(q).bmm(k.transpose(1, 2)).mul_(call_.scale).view({q.size(0), b.queries, b.keys});
    if (call_.softcap > 0.0) {
      s.div_(call_.softcap).tanh_();
      if (cap != nullptr) *cap = s.clone();
      s.mul_(call_.softcap);
    }
    if (call_.bias.has_value()) s.add_(part(*call_.bias, b).to(s.scalar_type()).mul(call_.bias_scale));
    if (call_.slopes.has_value()) s.sub_(slopes() * distance(b).abs().to(s.scalar_type()));
    const Tensor seen = visible(b);
    if (seen.defined()) s.masked_fill_(seen.logical_not(), -kInfinity);
    return s;
  }

  // q [h, n, w] as [g, h / g * n, w]: the rows that share a head of k and v.
  Tensor by_group(const Tensor& t) const { return t.view({call_.groups(), -1, t.size(-1)}); }

  // The block of a tensor [1 or b, 1 or h, 1 or s, s_kv].
  Tensor part(const Tensor& t, const Block& b) const {
    const Tensor of = t.select(0, t.size(0) == 1 ? 0 : number_).narrow(2, b.k, b.keys);
    return of.size(1) == 1 ? of : of.narrow(1, b.q, b.queries);
  }

  // How far a key is after the diagonal: int64 [queries, keys].
  Tensor distance(const Block& b) const {
    const auto integers = options_.dtype(at::kLong);
    const Tensor rows = at::arange(b.q, b.q + b.queries, integers).unsqueeze(1);
    const Tensor ahead = at::arange(b.k, b.k + b.keys, integers) - rows;
    return device_diagonal_.defined() ? ahead - device_diagonal_ : ahead - diagonal_;
  }

  Tensor slope_row(const Tensor& slopes) const { return slopes.dim() == 2 ? slopes.select(0, number_) : slopes; }

 private:
  Tensor slopes() const { return slope_row(*call_.slopes).to(call_.compute_dtype()).view({-1, 1, 1}); }

  bool beyond_window(const Block& b) const {
    if (device_diagonal_.defined()) return false;
    const int64_t first = b.q + diagonal_, last = first + b.queries - 1;
    return (call_.right >= 0 && b.k > last + call_.right) || (call_.left >= 0 && b.k + b.keys - 1 < first - call_.left);
  }

  bool within_window(const Block& b) const {
    const int64_t first = b.q + diagonal_, last = first + b.queries - 1;
    return (call_.right < 0 || b.k + b.keys - 1 <= first + call_.right) && (call_.left < 0 || b.k >= last - call_.left);
  }

  // bool, of a shape that expands to [h, queries, keys]; undefined: everything.
  Tensor visible(const Block& b) const {
    Tensor seen;
    const auto narrow_to = [&seen](const Tensor& also) { seen = seen.defined() ? seen & also : also; };
    if ((call_.left >= 0 || call_.right >= 0) && (device_diagonal_.defined() || !within_window(b))) {
      const Tensor ahead = distance(b);
      if (call_.left >= 0) narrow_to(ahead >= -call_.left);
      if (call_.right >= 0) narrow_to(ahead <= call_.right);
    }
    const Tensor queries = queries_.tokens(b.q, b.queries), keys = keys_.tokens(b.k, b.keys);
    if (queries.defined()) narrow_to(queries.unsqueeze(1));
    if (keys.defined()) narrow_to(keys);
    if (call_.rows[kMask].defined()) narrow_to(part(call_.rows[kMask], b).logical_not());
    return seen;
  }

  const AttentionCall& call_;
  int64_t number_;
  const SequenceRows &queries_, &keys_;
  at::TensorOptions options_;
  int64_t diagonal_ = 0;
  Tensor device_diagonal_;  // in place of diagonal_, if only the device has a length
};

// A sum over the dimensions that `like` has once, shaped as it.
Tensor summed_as(const Tensor& t, const Tensor& like) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    if (like.size(dim) == 1 && t.size(dim) != 1) dims.push_back(dim);
  }
  return dims.empty() ? t : t.sum(dims, true);
}

}  // namespace

AttentionResult chunked_attention(const AttentionCall& call) {
  check_sequences(call);
  const SequenceSet queries(call, false), keys(call, true);
  const at::ScalarType dtype = call.compute_dtype();
  const auto floats = call.q.options().dtype(dtype);
  const int64_t h = call.heads(), width = call.v.size(-1);
  const Tensor out = queries.buffer(h, width, call.q.options()), lse = queries.buffer(h, 1, floats);
  Tensor max_logit = at::full({h}, -kInfinity, floats);
  for (int64_t number = 0; number < queries.size(); ++number) {
    const SequenceRows q_rows = queries[number], k_rows = keys[number];
    const Scores scores(call, number, q_rows, k_rows);
    for (int64_t first = 0; first < q_rows.length(); first += kAttentionQueryBlock) {
      const int64_t n = std::min(kAttentionQueryBlock, q_rows.length() - first);
      const Tensor q = q_rows.load(call.q, first, n, dtype);
      Tensor sum = at::zeros({h, n, 1}, floats), total = at::zeros({h, n, width}, floats);
      Tensor most = at::full({h, n, 1}, -kInfinity, floats);
      scores.for_keys(first, n, [&](const Block& b) {
        const Tensor k = k_rows.load(call.k, b.k, b.keys, dtype), v = k_rows.load(call.v, b.k, b.keys, dtype);
        Tensor p = scores(q, k, b);
        const Tensor larger = most.maximum(p.amax({-1}, true)), shift = finite_lse(larger);
        p.sub_(shift).exp_();
        const Tensor factor = (most - shift).exp_();
        sum.mul_(factor).add_(p.sum({-1}, true));
        total.mul_(factor).add_(scores.by_group(p).bmm(v).view_as(total));
        most = larger;
      });
      if (n > 0) max_logit = max_logit.maximum(most.amax({1, 2}));
      total.div_(sum.masked_fill(sum == 0.0, 1.0));
      Tensor block_lse = most + sum.log();
      if (call.sink.has_value()) apply_sink(total, block_lse, *call.sink);
      q_rows.store(out, first, total);
      q_rows.store(lse, first, block_lse);
    }
  }
  return {queries.values(out), queries.values(lse).squeeze(-1), max_logit};
}

namespace {

// The backward of a call: its gradients, filled one sequence after another.
class Backward {
 public:
  Backward(const AttentionCall& call, const AttentionResult& result, const Tensor& dout, const Tensor& dlse,
           AttentionWanted wanted)
      : call_(call),
        out_(result.out),
        lse_(result.lse.unsqueeze(-1)),
        dout_(dout),
        dlse_(dlse.defined() ? dlse.unsqueeze(-1) : dlse),
        wanted_(wanted),
        dtype_(call.compute_dtype()),
        floats_(call.q.options().dtype(dtype_)),
        queries_(call, false),
        keys_(call, true) {
    if (wanted[kQuery]) gradients_[kQuery] = queries_.buffer(call.heads(), call.q.size(-1), call.q.options());
    if (wanted[kKey]) gradients_[kKey] = keys_.buffer(call.groups(), call.k.size(-1), call.k.options());
    if (wanted[kValue]) gradients_[kValue] = keys_.buffer(call.groups(), call.v.size(-1), call.v.options());
    if (wanted[kScoreBias]) gradients_[kScoreBias] = at::zeros(call.bias->sizes(), floats_);
    if (wanted[kSlopes]) gradients_[kSlopes] = at::zeros(call.slopes->sizes(), floats_);
    if (wanted[kSink]) gradients_[kSink] = at::zeros(call.sink->sizes(), floats_);
  }

  AttentionGradients run() {
    for (int64_t number = 0; number < queries_.size(); ++number) sequence(number);
    if (wanted_[kQuery]) gradients_[kQuery] = queries_.values(gradients_[kQuery]);
    if (wanted_[kKey]) gradients_[kKey] = keys_.values(gradients_[kKey]);
    if (wanted_[kValue]) gradients_[kValue] = keys_.values(gradients_[kValue]);
    if (wanted_[kScoreBias]) gradients_[kScoreBias] = gradients_[kScoreBias].to(call_.bias->scalar_type());
    if (wanted_[kSlopes]) gradients_[kSlopes] = gradients_[kSlopes].to(call_.slopes->scalar_type());
    if (wanted_[kSink]) gradients_[kSink] = gradients_[kSink].to(call_.sink->scalar_type());
    return std::move(gradients_);
  }

 private:
  void sequence(int64_t number) {
    const SequenceRows q_rows = queries_[number], k_rows = keys_[number];
    const Scores scores(call_, number, q_rows, k_rows);
    const int64_t keys = k_rows.length();
    const Tensor dk = at::zeros({call_.groups(), keys, call_.k.size(-1)}, floats_);
    const Tensor dv = at::zeros({call_.groups(), keys, call_.v.size(-1)}, floats_);
    for (int64_t first = 0; first < q_rows.length(); first += kAttentionQueryBlock) {
      const int64_t n = std::min(kAttentionQueryBlock, q_rows.length() - first);
      const Tensor q = q_rows.load(call_.q, first, n, dtype_), dout = q_rows.load(dout_, first, n, dtype_);
      const Tensor lse = q_rows.load(lse_, first, n, dtype_), shift = finite_lse(lse);
      Tensor delta = (q_rows.load(out_, first, n, dtype_).mul_(dout)).sum({-1}, true);
      if (dlse_.defined()) delta.sub_(q_rows.load(dlse_, first, n, dtype_));
      if (wanted_[kSink]) gradients_[kSink].add_(sink_gradient(delta, lse, *call_.sink));
      const Tensor dq = at::zeros_like(q);
      scores.for_keys(first, n, [&](const Block& b) {
        const Tensor k = k_rows.load(call_.k, b.k, b.keys, dtype_), v = k_rows.load(call_.v, b.k, b.keys, dtype_);
        Tensor cap;
        const Tensor p = scores(q, k, b, &cap).sub_(shift).exp_();
        if (wanted_[kValue]) {
          dv.narrow(1, b.k, b.keys).add_(scores.by_group(p).transpose(1, 2).bmm(scores.by_group(dout)));
        }
        const Tensor ds = scores.by_group(dout).bmm(v.transpose(1, 2)).view_as(p).sub_(delta).mul_(p);
        additive(scores, b, ds);
        if (cap.defined()) ds.mul_(cap.square_().neg_().add_(1.0));
        ds.mul_(call_.scale);
        if (wanted_[kQuery]) dq.add_(scores.by_group(ds).bmm(k).view_as(dq));
        if (wanted_[kKey]) {
          dk.narrow(1, b.k, b.keys).add_(scores.by_group(ds).transpose(1, 2).bmm(scores.by_group(q)));
        }
      });
      if (wanted_[kQuery]) q_rows.store(gradients_[kQuery], first, dq);
    }
    if (wanted_[kKey]) k_rows.store(gradients_[kKey], 0, dk);
    if (wanted_[kValue]) k_rows.store(gradients_[kValue], 0, dv);
  }

  // The gradients of bias and slopes.
  void additive(const Scores& scores, const Block& b, const Tensor& ds) {
    if (wanted_[kScoreBias]) {
      const Tensor into = scores.part(gradients_[kScoreBias], b);
      into.add_(summed_as(ds, into), call_.bias_scale);
    }
    if (wanted_[kSlopes]) {
      const Tensor into = scores.slope_row(gradients_[kSlopes]);
      into.sub_((ds * scores.distance(b).abs().to(dtype_)).sum({1, 2}));
    }
  }

  const AttentionCall& call_;
  Tensor out_, lse_, dout_, dlse_;
  AttentionWanted wanted_;
  at::ScalarType dtype_;
  at::TensorOptions floats_;
  SequenceSet queries_, keys_;
  AttentionGradients gradients_;
};

}  // namespace

AttentionGradients chunked_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                              const Tensor& dout, const Tensor& dlse, AttentionWanted wanted) {
  return Backward(call, result, dout, dlse, wanted).run();
}

}  // namespace te_torch
