// The binding of attention: one autograd node over a kernel that returns out and lse (attention_kernels.h), with
// checks, schemas and the Python function. The node saves q, k, v, out and one value a row and head. Beside it, what a
// result of torch's own attention needs.
#include "ops/attention_call.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <transformer_engine/transformer_engine.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <memory>
#include <numeric>

#include "autograd/autograd.h"
#include "core/op_registration.h"
#include "ops/attention_kernels.h"
#include "ops/attention_passes.h"

namespace te_torch {

namespace {

constexpr const char* kOp = "attention";
constexpr SavedInfo kAttended{"attention input", "the backward computes the scores again", "checkpoint_core_attention",
                              false};
constexpr SavedInfo kContext{"attention output", "the scores' gradient reads its product with the incoming one",
                             "checkpoint_core_attention", false};
constexpr SavedInfo kLogSumExp{"log of the sum of exp", "the softmax again: one value a row and head",
                               "checkpoint_core_attention", false};
constexpr SavedInfo kScoreInput{"bias, slopes, sink, lengths or mask", "the backward computes the scores again",
                                kCallers, false};

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// pattern: left, right, bottom_right, max_seqlen_q, max_seqlen_kv (-1: not given). scores: scale, bias_scale, softcap.
constexpr size_t kPatternSize = 5, kScoresSize = 3;

AttentionCall call_of(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                      const OptionalTensor& slopes, const OptionalTensor& sink, const TensorsOrNone& rows,
                      std::string_view layout, at::IntArrayRef pattern, at::ArrayRef<double> scores) {
  TORCH_CHECK_VALUE(layout == "sbhd" || layout == "bshd" || layout == "thd", kOp, ": argument 'layout' is '", layout,
                    "', wanted 'sbhd', 'bshd' or 'thd'.");
  TORCH_CHECK_VALUE(rows.size() == kAttentionRows && pattern.size() == kPatternSize && scores.size() == kScoresSize,
                    kOp, ": arguments 'rows', 'pattern' and 'scores' have ", rows.size(), ", ", pattern.size(), " and ",
                    scores.size(), " elements, wanted ", +kAttentionRows, ", ", kPatternSize, " and ", kScoresSize,
                    "; call functional.attention, which makes them.");
  AttentionCall call;
  call.q = q, call.k = k, call.v = v, call.bias = bias, call.slopes = slopes, call.sink = sink;
  for (size_t i = 0; i < kAttentionRows; ++i) {
    const std::optional<Tensor> row = rows.get(i);
    if (row.has_value()) call.rows[i] = *row;
  }
  call.packed = layout == "thd", call.batch_first = layout == "bshd";
  call.left = pattern[0], call.right = pattern[1], call.bottom_right = pattern[2] != 0;
  for (size_t side = 0; side < 2; ++side) {
    if (pattern[3 + side] >= 0) call.max_lengths[side] = pattern[3 + side];
  }
  call.scale = scores[0], call.bias_scale = scores[1], call.softcap = scores[2];
  return call;
}

void check_tensor(const Tensor& t, const char* name, const AttentionCall& call) {
  TORCH_CHECK_VALUE(t.dim() == (call.packed ? 3 : 4), kOp, ": argument '", name, "' has shape ", t.sym_sizes(),
                    ", wanted ", call.packed ? "[tokens, heads, head_dim]" : "[., ., heads, head_dim]", ".");
  TORCH_CHECK_VALUE(t.scalar_type() == call.q.scalar_type() && t.device() == call.q.device(), kOp, ": argument '", name,
                    "' is ", t.scalar_type(), " on ", t.device(), ", wanted ", call.q.scalar_type(), " on ",
                    call.q.device(), " like 'q'.");
}

void check_heads(const AttentionCall& call) {
  const auto& q = call.q;
  const bool floats = q.scalar_type() == at::kDouble || q.scalar_type() == at::kFloat || q.scalar_type() == at::kHalf ||
                      q.scalar_type() == at::kBFloat16;
  TORCH_CHECK_VALUE(floats, kOp, ": argument 'q' is ", q.scalar_type(),
                    ", wanted float64, float32, float16 or bfloat16.");
  check_tensor(q, "q", call), check_tensor(call.k, "k", call), check_tensor(call.v, "v", call);
  const auto wrong = [](const char* name, const Tensor& t, const char* wanted) {
    TORCH_CHECK_VALUE(false, kOp, ": argument '", name, "' has shape ", t.sym_sizes(), ", wanted ", wanted, ".");
  };
  if (call.k.sym_size(-1) != q.sym_size(-1)) wrong("k", call.k, "the head_dim of 'q'");
  const auto groups = call.k.sym_size(-2);
  if (groups < 1 || q.sym_size(-2) % groups != 0) wrong("k", call.k, "a number of heads that divides that of 'q'");
  for (int64_t dim = 0; dim < q.dim() - 1; ++dim) {
    if (call.v.sym_size(dim) != call.k.sym_size(dim)) wrong("v", call.v, "the tokens and heads of 'k'");
  }
  const int64_t batch_dim = call.batch_first ? 0 : 1;
  if (!call.packed && call.k.sym_size(batch_dim) != q.sym_size(batch_dim)) wrong("k", call.k, "the batch of 'q'");
}

void check_lengths(const AttentionCall& call, AttentionRow place, const char* name, const Tensor& like) {
  const Tensor& t = call.rows[place];
  const bool fits = t.defined() && t.dim() == 1 && t.scalar_type() == at::kInt && t.device() == call.q.device() &&
                    (like.defined() ? t.sym_size(0) == like.sym_size(0) : t.sym_size(0) > 0);
  if (fits) return;
  std::ostringstream got;
  if (t.defined()) {
    got << t.scalar_type() << ' ' << t.sym_sizes() << " on " << t.device();
  } else {
    got << "None";
  }
  TORCH_CHECK_VALUE(false, kOp, ": argument '", name, "' is ", got.str(), ", wanted int32 [sequences + 1] on ",
                    call.q.device(), like.defined() ? ", as long as 'cu_seqlens_q'." : ".");
}

void check_per_head(const OptionalTensor& t, const char* name, const AttentionCall& call) {
  if (!t.has_value()) return;
  const bool fits = t->dim() == 1 && t->sym_size(0) == call.q.sym_size(-2) && t->scalar_type() == at::kFloat &&
                    t->device() == call.q.device();
  TORCH_CHECK_VALUE(fits, kOp, ": argument '", name, "' is ", t->scalar_type(), " ", t->sym_sizes(), " on ",
                    t->device(), ", wanted float32 [", call.q.sym_size(-2), "] on ", call.q.device(),
                    ", one for each head of 'q'.");
}

void check_slopes(const AttentionCall& call) {
  if (!call.slopes.has_value() || call.slopes->dim() != 2) return check_per_head(call.slopes, "alibi_slopes", call);
  const Tensor& t = *call.slopes;
  const c10::SymInt sequences =
      call.packed ? call.rows[kLengthsQ].sym_size(0) - 1 : call.q.sym_size(call.batch_first ? 0 : 1);
  const bool fits = t.sym_size(0) == sequences && t.sym_size(1) == call.q.sym_size(-2) &&
                    t.scalar_type() == at::kFloat && t.device() == call.q.device();
  TORCH_CHECK_VALUE(fits, kOp, ": argument 'alibi_slopes' is ", t.scalar_type(), " ", t.sym_sizes(), " on ", t.device(),
                    ", wanted float32 [", call.q.sym_size(-2), "] or [", sequences, ", ", call.q.sym_size(-2), "] on ",
                    call.q.device(), ".");
}

// Tensors of a batch: [b, s], or [1 or b, 1 or h, 1 or s, s_kv] for those of scores.
void check_dense(const AttentionCall& call) {
  const int64_t batch_dim = call.batch_first ? 0 : 1;
  const c10::SymInt batch = call.q.sym_size(batch_dim), heads = call.q.sym_size(2);
  const c10::SymInt seq = call.q.sym_size(1 - batch_dim), seq_kv = call.k.sym_size(1 - batch_dim);
  const auto check = [&](const Tensor& t, const char* name, bool floats, std::initializer_list<c10::SymInt> sizes) {
    if (!t.defined()) return;
    const bool scores = sizes.size() == 4;
    bool fits = t.dim() == static_cast<int64_t>(sizes.size()) && t.device() == call.q.device() &&
                (floats ? t.is_floating_point() : t.scalar_type() == at::kBool);
    int64_t dim = 0;
    for (const c10::SymInt& size : sizes) {
      fits = fits && (t.sym_size(dim) == size || (scores && dim < 3 && t.sym_size(dim) == 1));
      ++dim;
    }
    TORCH_CHECK_VALUE(fits, kOp, ": argument '", name, "' is ", t.scalar_type(), " ", t.sym_sizes(), " on ", t.device(),
                      ", wanted ", floats ? "floating point " : "bool ", c10::SymIntArrayRef(sizes),
                      scores ? " (or 1 in place of the first three)" : "", " on ", call.q.device(), ".");
  };
  check(call.rows[kMask], "mask", false, {batch, heads, seq, seq_kv});
  check(call.rows[kPresentQ], "present_q", false, {batch, seq});
  check(call.rows[kPresentKv], "present_kv", false, {batch, seq_kv});
  check(call.bias.value_or(Tensor()), "bias", true, {batch, heads, seq, seq_kv});
  const char* const names[] = {"cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"};
  for (int i = 0; i < 4; ++i) {
    TORCH_CHECK_VALUE(!call.rows[kLengthsQ + i].defined(), kOp, ": argument '", names[i],
                      "' is given for sequences in a batch, wanted None; pass present_q and present_kv, or layout "
                      "'thd'.");
  }
}

void check_numbers(const AttentionCall& call) {
  TORCH_CHECK_VALUE(std::isfinite(call.softcap) && call.softcap >= 0.0, kOp, ": argument 'softcap' is ", call.softcap,
                    ", wanted a finite number above 0, or 0 for none.");
  TORCH_CHECK_VALUE(std::isfinite(call.scale), kOp, ": argument 'scale' is ", call.scale, ", wanted a finite number.");
  TORCH_CHECK_VALUE(std::isfinite(call.bias_scale), kOp, ": argument 'bias_scale' is ", call.bias_scale,
                    ", wanted a finite number.");
  TORCH_CHECK_VALUE(call.left >= -1 && call.right >= -1, kOp, ": argument 'window' is (", call.left, ", ", call.right,
                    "), wanted numbers of keys, or -1 for all.");
}

void check_arguments(const AttentionCall& call) {
  check_heads(call);
  if (call.packed) {
    check_lengths(call, kLengthsQ, "cu_seqlens_q", {});
    check_lengths(call, kLengthsKv, "cu_seqlens_kv", call.rows[kLengthsQ]);
    if (call.rows[kStartsQ].defined()) check_lengths(call, kStartsQ, "cu_seqlens_q_padded", call.rows[kLengthsQ]);
    if (call.rows[kStartsKv].defined()) check_lengths(call, kStartsKv, "cu_seqlens_kv_padded", call.rows[kLengthsQ]);
    const bool of_dense = call.bias.has_value() || call.rows[kMask].defined() || call.rows[kPresentQ].defined() ||
                          call.rows[kPresentKv].defined();
    TORCH_CHECK_VALUE(!of_dense, kOp,
                      ": arguments 'bias', 'mask' and 'present' are given for packed sequences, wanted None; a bias "
                      "that is a tensor needs sequences in a batch.");
  } else {
    check_dense(call);
  }
  check_slopes(call);
  check_per_head(call.sink, "sink", call);
  check_numbers(call);
}

// Kernels read lengths as dense memory.
AttentionCall with_dense_lengths(AttentionCall call) {
  for (const AttentionRow row : {kLengthsQ, kLengthsKv, kStartsQ, kStartsKv}) {
    if (call.rows[row].defined()) call.rows[row] = call.rows[row].contiguous();
  }
  return call;
}

Three attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                    const OptionalTensor& slopes, const OptionalTensor& sink, const TensorsOrNone& rows,
                    std::string_view layout, std::string_view kernel, at::IntArrayRef pattern,
                    at::ArrayRef<double> scores) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const AttentionKernel& chosen = attention_kernel(kernel);
  const AttentionCall given = call_of(q, k, v, bias, slopes, sink, rows, layout, pattern, scores);
  check_arguments(given), chosen.check(given);
  const AttentionCall call = with_dense_lengths(given);
  check_memory(q, kOp, "q"), check_memory(k, kOp, "k"), check_memory(v, kOp, "v");
  const AttentionResult result = chosen.forward(call);
  te_note_path(nullptr, nullptr);  // te.explain names the kernel, not the passes beside it
  return {result.out, result.lse, chosen.has_max_logit ? result.max_logit : result.lse.new_empty({0})};
}

Three attention_fwd_meta(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                         const OptionalTensor& slopes, const OptionalTensor& sink, const TensorsOrNone& rows,
                         std::string_view layout, std::string_view kernel, at::IntArrayRef pattern,
                         at::ArrayRef<double> scores) {
  const AttentionCall call = call_of(q, k, v, bias, slopes, sink, rows, layout, pattern, scores);
  const AttentionKernel& chosen = attention_kernel(kernel);
  check_arguments(call), chosen.check(call);
  const auto floats = q.options().dtype(call.compute_dtype());
  c10::SymDimVector shape(q.sym_sizes().begin(), q.sym_sizes().end() - 1);
  const Tensor lse = q.new_empty_symint(shape, floats);
  shape.push_back(v.sym_size(-1));
  return {q.new_empty_symint(shape), lse, q.new_empty_symint({chosen.has_max_logit ? q.sym_size(-2) : 0}, floats)};
}

Six attention_bwd(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
                  const OptionalTensor& bias, const OptionalTensor& slopes, const OptionalTensor& sink,
                  const Tensor& out, const Tensor& lse, const TensorsOrNone& rows, std::string_view layout,
                  std::string_view kernel, at::IntArrayRef pattern, at::ArrayRef<double> scores,
                  AttentionWanted wanted) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const AttentionCall call = with_dense_lengths(call_of(q, k, v, bias, slopes, sink, rows, layout, pattern, scores));
  AttentionGradients g = attention_kernel(kernel).backward(call, {out, lse, {}}, dout, dlse.value_or(Tensor()), wanted);
  te_note_path(nullptr, nullptr);
  for (Tensor& gradient : g) {
    if (!gradient.defined()) gradient = q.new_empty({0});
  }
  return {g[kQuery], g[kKey], g[kValue], g[kScoreBias], g[kSlopes], g[kSink]};
}

Six attention_bwd_meta(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                       const Tensor& v, const OptionalTensor& bias, const OptionalTensor& slopes,
                       const OptionalTensor& sink, const Tensor& out, const Tensor& lse, const TensorsOrNone& rows,
                       std::string_view layout, std::string_view kernel, at::IntArrayRef pattern,
                       at::ArrayRef<double> scores, AttentionWanted wanted) {
  const auto like = [&](AttentionInput input, const OptionalTensor& t) {
    return wanted[input] ? t->new_empty_symint(t->sym_sizes()) : q.new_empty({0});
  };
  return {like(kQuery, q),        like(kKey, k),         like(kValue, v),
          like(kScoreBias, bias), like(kSlopes, slopes), like(kSink, sink)};
}

struct AttentionFamily {
  static constexpr const char* kName = kOp;
  struct State {
    std::string layout, kernel;
    std::vector<int64_t> pattern;
    std::vector<double> scores;
  };
  enum Saved { kOut = kAttentionInputs, kLse, kRows };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& q, const Tensor& k, const Tensor& v,
                               const OptionalTensor& bias, const OptionalTensor& slopes, const OptionalTensor& sink,
                               const TensorsOrNone& rows, std::string_view layout, std::string_view kernel,
                               at::IntArrayRef pattern, at::ArrayRef<double> scores) {
    state = {std::string(layout), std::string(kernel), pattern.vec(), scores.vec()};
    auto [out, lse, max_logit] = Mode::template call<attention_fwd>("te::attention_fwd", q, k, v, bias, slopes, sink,
                                                                    rows, layout, kernel, pattern, scores);
    save.keep(kQuery, q, kAttended), save.keep(kKey, k, kAttended), save.keep(kValue, v, kAttended);
    save.keep(kScoreBias, bias, kScoreInput), save.keep(kSlopes, slopes, kScoreInput);
    save.keep(kSink, sink, kScoreInput);
    save.keep(kOut, out, kContext), save.keep(kLse, lse, kLogSumExp);
    for (size_t i = 0; i < rows.size(); ++i) {
      save.keep(kRows + static_cast<int>(i), std::optional<Tensor>(rows.get(i)), kScoreInput);
    }
    return {out, lse, max_logit};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& inputs, const NamedTensors& saved,
                                const variable_list& grads) {
    if (!grads[0].defined() && !grads[1].defined()) return {};
    AttentionWanted wanted{};
    for (size_t i = 0; i < kAttentionInputs; ++i) wanted[i] = inputs[i];
    const Tensor dout = grads[0].defined() ? grads[0] : saved[kOut].new_zeros_symint(saved[kOut].sym_sizes());
    const OptionalTensor dlse = grads[1].defined() ? OptionalTensor(grads[1]) : std::nullopt;
    TensorsOrNone rows;
    for (int i = 0; i < kAttentionRows; ++i) rows.push_back(saved.optional(kRows + i));
    const Six g = Mode::template call<attention_bwd>(
        "te::attention_bwd", dout, dlse, saved[kQuery], saved[kKey], saved[kValue], saved.optional(kScoreBias),
        saved.optional(kSlopes), saved.optional(kSink), saved[kOut], saved[kLse], rows, std::string_view(state.layout),
        std::string_view(state.kernel), at::IntArrayRef(state.pattern), at::ArrayRef<double>(state.scores), wanted);
    variable_list out{std::get<0>(g), std::get<1>(g), std::get<2>(g), std::get<3>(g), std::get<4>(g), std::get<5>(g)};
    for (size_t i = 0; i < kAttentionInputs; ++i) {
      if (!wanted[i]) out[i] = Tensor();
    }
    return out;
  }
};

Three attention_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                         const OptionalTensor& slopes, const OptionalTensor& sink, const TensorsOrNone& rows,
                         std::string_view layout, std::string_view kernel, at::IntArrayRef pattern,
                         at::ArrayRef<double> scores) {
  const variable_list out =
      Node<AttentionFamily, Dispatched>::run(q, k, v, bias, slopes, sink, rows, layout, kernel, pattern, scores);
  return {out[0], out[1], out[2].detach()};  // the largest logit has no gradient
}

Three attention_dispatched(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                           const OptionalTensor& slopes, const OptionalTensor& sink, const TensorsOrNone& rows,
                           std::string_view layout, std::string_view kernel, at::IntArrayRef pattern,
                           at::ArrayRef<double> scores) {
  return Dispatched::call<attention_fwd>("te::attention_fwd", q, k, v, bias, slopes, sink, rows, layout, kernel,
                                         pattern, scores);
}

// Called by Python in eager mode.
Three attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                const OptionalTensor& slopes, const OptionalTensor& sink,
                const std::vector<OptionalTensor>& row_tensors, const std::string& layout, const std::string& kernel,
                const std::vector<int64_t>& pattern, const std::vector<double>& scores) {
  TensorsOrNone rows;
  std::vector<const Tensor*> given{&q, &k, &v, pointer_to(bias), pointer_to(slopes), pointer_to(sink)};
  for (const OptionalTensor& t : row_tensors) rows.push_back(t), given.push_back(pointer_to(t));
  if (must_dispatch(given)) {
    return Dispatched::call<attention_autograd>("te::attention", q, k, v, bias, slopes, sink, rows,
                                                std::string_view(layout), std::string_view(kernel),
                                                at::IntArrayRef(pattern), at::ArrayRef<double>(scores));
  }
  if (!needs_graph({&q, &k, &v, pointer_to(bias), pointer_to(slopes), pointer_to(sink)})) {
    return attention_fwd(q, k, v, bias, slopes, sink, rows, layout, kernel, pattern, scores);
  }
  const variable_list out = Node<AttentionFamily, Direct>::run(q, k, v, bias, slopes, sink, rows,
                                                               std::string_view(layout), std::string_view(kernel),
                                                               at::IntArrayRef(pattern), at::ArrayRef<double>(scores));
  return {out[0], out[1], out[2].detach()};  // the largest logit has no gradient
}

// ---- padding of a batch ----

std::vector<Tensor> without_padding_meta(at::TensorList tensors, const Tensor&, bool) {
  std::vector<Tensor> copies;
  for (const Tensor& t : tensors) copies.push_back(at::empty_symint(t.sym_sizes(), t.options()));
  return copies;
}

// ---- the result of torch's kernels ----

constexpr uintptr_t kAlignment = 16;  // bytes

// A copy with these strides. An op, so that compilers do not see through it: they give the intermediates of a graph
// strides and places of their own, and leave out a clone that seems to change neither.
Tensor attention_gradient(const Tensor& grad, c10::SymIntArrayRef strides) {
  return at::empty_strided_symint(grad.sym_sizes(), strides, grad.options()).copy_(grad);
}

Tensor attention_gradient_meta(const Tensor& grad, c10::SymIntArrayRef strides) {
  return at::empty_strided_symint(grad.sym_sizes(), strides, grad.options());
}

// In a tracer's graph, where the strides of a gradient are not yet known: always a copy for same_strides.
Tensor traced_gradient(const Tensor& grad, c10::SymIntArrayRef strides, bool same_strides) {
  const c10::SymInt offset = grad.sym_storage_offset() * static_cast<int64_t>(grad.element_size());
  if (!same_strides && offset % static_cast<int64_t>(kAlignment) == 0) return grad;
  return Dispatched::call<attention_gradient>("te::attention_gradient", grad, strides);
}

// The gradient as the kernel's backward reads it, itself or a copy. Tensors of torch.func have no addresses.
Tensor readable_gradient(const Tensor& grad, c10::SymIntArrayRef strides, bool same_strides) {
  const bool of_func = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  if (!of_func && must_dispatch({&grad})) return traced_gradient(grad, strides, same_strides);
  bool readable = of_func || reinterpret_cast<uintptr_t>(grad.const_data_ptr()) % kAlignment == 0;
  for (int64_t dim = 0; same_strides && dim < grad.dim(); ++dim) {
    readable = readable && (grad.sym_size(dim) == 1 || grad.sym_stride(dim) == strides[dim]);
  }
  if (readable) return grad;
  std::vector<int64_t> order(strides.size()), back(strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  for (size_t i = 0; i < order.size(); ++i) back[order[i]] = static_cast<int64_t>(i);
  return grad.permute(order).clone(at::MemoryFormat::Contiguous).permute(back);
}

// Before the node of a result; compiled autograd calls it too, which it does not for a hook by register_hook() in C++.
class GradientReader final : public torch::autograd::FunctionPreHook {
 public:
  GradientReader(const Tensor& out, bool same_strides) : output_(out.output_nr()) {
    const auto of = out.sym_strides();
    read_ = [strides = std::vector<c10::SymInt>(of.begin(), of.end()), same_strides](const at::TensorBase& grad) {
      return grad.defined() ? at::TensorBase(readable_gradient(Tensor(grad), strides, same_strides)) : grad;
    };
  }
  variable_list operator()(const variable_list& grads) override {
    variable_list read = grads;
    read[output_] = Tensor(read_(grads[output_]));
    return read;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.add_cpp_single_tensor_pre_hook(read_, output_);
  }

 private:
  size_t output_;
  std::function<at::TensorBase(const at::TensorBase&)> read_;
};

// A result [b, h, s, d] of torch's kernels in another order of dimensions; a hook in C++, which tracers follow, makes
// its gradient one that they read: at addresses of whole 16 bytes, which none of them checks, and, with same_strides,
// with the strides of the result: torch keeps cuDNN's plans by the strides of q, k and v alone, so a backward by a plan
// of other strides returns wrong gradients.
Tensor attention_result(const Tensor& out, at::IntArrayRef order, bool same_strides) {
  if (needs_graph({&out}) && out.grad_fn() != nullptr) {
    out.grad_fn()->add_tensor_pre_hook(std::make_unique<GradientReader>(out, same_strides));
  }
  return out.permute(order);
}

}  // namespace

#define TE_INPUTS "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? slopes, Tensor? sink, "
#define TE_CALL "Tensor?[] rows, str layout, str kernel, int[] pattern, float[] scores"

TE_OP_REGISTRATION(attention, ops) {
  ops.op("attention_fwd(" TE_INPUTS TE_CALL ") -> (Tensor, Tensor, Tensor)")
      .kernel(attention_fwd)
      .meta(attention_fwd_meta);
  ops.op("attention_bwd(Tensor dout, Tensor? dlse, " TE_INPUTS "Tensor out, Tensor lse, " TE_CALL
         ", bool[6] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
      .kernel(attention_bwd)
      .meta(attention_bwd_meta);
  ops.op("attention(" TE_INPUTS TE_CALL ") -> (Tensor, Tensor, Tensor)")
      .composite(attention_dispatched)
      .autograd(attention_autograd)
      .python(attention);
  ops.op("attention_without_padding(Tensor[] tensors, Tensor cumulative, bool batch_first) -> Tensor[]")
      .kernel(without_padding)
      .meta(without_padding_meta)
      .python([](const std::vector<Tensor>& tensors, const Tensor& cumulative, bool batch_first) {
        if (!must_dispatch({&tensors.at(0), &cumulative})) return without_padding(tensors, cumulative, batch_first);
        return Dispatched::call<without_padding>("te::attention_without_padding", at::TensorList(tensors), cumulative,
                                                 batch_first);
      });
  ops.op("attention_gradient(Tensor grad, SymInt[] strides) -> Tensor")
      .kernel(attention_gradient)
      .meta(attention_gradient_meta);
  ops.op("attention_result(Tensor(a) out, int[] order, bool same_strides) -> Tensor(a)")
      .composite_implicit(attention_result)
      .python([](const Tensor& out, const std::vector<int64_t>& order, bool same_strides) {
        return attention_result(out, order, same_strides);
      });
}

#undef TE_INPUTS
#undef TE_CALL

}  // namespace te_torch
