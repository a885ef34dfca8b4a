// See gemm_policy_device.h.
#include "layer/gemm_policy_device.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <map>

#include "core/rows_view.h"
#include "gemm/gemm.h"
#include "gemm/gemm_fp8.h"
#include "gemm/gemm_path.h"
#include "gemm/grouped_gemm.h"
#include "gemm/grouped_gemm_fp8.h"
#include "quantize/grouped_quantize.h"

namespace te_torch::layer {

namespace {

constexpr int64_t kPanelRows = 128;

int64_t code_of(const Quantized& q) { return fp8_code(q.scaling, q.e5m2); }

// Rows as they are, or what rowwise FP8 data mean.
Tensor plain_rows(const DispatchMode& dispatch, const Operand& t, const Tensor& offsets, at::ScalarType dtype) {
  if (!t.quantized()) return matrix_of(t.plain);
  TORCH_INTERNAL_ASSERT(t.fp8.rowwise.defined());  // panels are not dequantized
  if (t.fp8.scaling != TE_SCALING_TENSOR) return plain_of(dispatch, t, dtype);
  return grouped_dequantize(t.fp8.rowwise, t.fp8.rowwise_scale_inv, offsets, t.fp8.e5m2, dtype);
}

// The reason that te.explain shows for groups whose sizes are on the host too.
const char* why_of(const Grouping& grouping) {
  if (grouping.splits.empty()) return nullptr;
  return grouping.bits_of_loop ? kListAtOnce : kListAsDevice;
}

// The targets of each call of te::grouped_wgrad_accumulate, as its `how`. listed: targets that share memory go to
// different calls, in the order of the groups.
std::vector<std::vector<int64_t>> rounds_of(at::ArrayRef<WeightTarget> targets, bool listed) {
  std::vector<std::vector<int64_t>> rounds(1, std::vector<int64_t>(targets.size(), -1));
  std::map<const void*, size_t> met;
  for (size_t g = 0; g < targets.size(); ++g) {
    if (!targets[g].out.defined()) continue;
    const size_t round = listed ? met[targets[g].out.const_data_ptr()]++ : 0;
    if (round == rounds.size()) rounds.emplace_back(targets.size(), -1);
    rounds[round][g] = targets[g].overwrite ? 1 : 0;
  }
  return rounds;
}

Tensor sums_of(const DispatchMode& dispatch, const Tensor& dy, const Tensor& offsets, bool as_quantized) {
  return dispatch.call<grouped_sums>("te::grouped_sums", matrix_of(dy), offsets, as_quantized);
}

class DeviceWeightProduct final : public GroupsWgrad {
 public:
  // Targets may share memory if the sizes of the groups are on the host too.
  DeviceWeightProduct(Gradient gradient, Operand x, at::ScalarType dtype, const Grouping& grouping)
      : dy_(std::move(gradient.dy)),
        x_(std::move(x)),
        dbias_(std::move(gradient.dbias)),
        offsets_(grouping.offsets),
        dtype_(dtype),
        splits_(grouping.splits),
        bits_of_loop_(grouping.bits_of_loop),
        why_(why_of(grouping)) {}

  WeightGrads compute(const DispatchMode& dispatch, bool with_bias) const override {
    const probe::PathReason because(why_);
    WeightGrads grads;
    const std::vector<Tensor> weights = in_fp8() ? fp8_gradients(dispatch) : plain_gradients(dispatch);
    grads.weights.assign(weights.begin(), weights.end());
    grads.biases = with_bias ? each_row(dispatch, sums(dispatch)) : Sums(weights.size());
    return grads;
  }

  WeightGrads compute_stacked(const DispatchMode& dispatch, bool with_bias) const override {
    const probe::PathReason because(why_);
    WeightGrads grads;
    grads.weights = {in_fp8() ? fp8_gradient(dispatch) : plain_gradient(dispatch)};
    grads.biases = with_bias ? each_row(dispatch, sums(dispatch)) : Sums(matrices());
    return grads;
  }

  int64_t features() const override {
    return (dy_.quantized() ? dy_.fp8.columnwise.sym_size(1) : dy_.plain.sym_size(-1)).guard_int(__FILE__, __LINE__);
  }

  std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const override {
    const Tensor& read = dy_.quantized() ? dy_.fp8.columnwise : dy_.plain;
    const DispatchMode dispatch = must_dispatch({&read}) ? DispatchMode(Dispatched{})
                                                         : DispatchMode(Direct{});  // a traced gradient accumulator's
    each_is_added(targets) ? add_each(targets) : add_together(dispatch, targets);
    if (!with_bias) return {};
    const Sums rows = each_row(dispatch, sums(dispatch));
    return {rows.begin(), rows.end()};
  }

  std::vector<Tensor> reads() const override {
    std::vector<Tensor> plain;
    for (const Operand* t : {&dy_, &x_}) {
      if (!t->quantized()) plain.push_back(t->plain);
    }
    return plain;
  }
  at::ScalarType dtype() const override { return dtype_; }
  size_t matrices() const override { return size_t(offsets_.size(0) - 1); }

 private:
  void add_together(const DispatchMode& dispatch, at::ArrayRef<WeightTarget> targets) const {
    const probe::PathReason because(why_);
    for (const std::vector<int64_t>& modes : rounds_of(targets, listed())) {
      std::vector<Tensor> list;
      for (size_t g = 0; g < modes.size(); ++g) {
        if (modes[g] >= 0) list.push_back(targets[g].out);
      }
      const at::TensorList outs(list);
      const at::ArrayRef<int64_t> numbers(modes);
      if (in_fp8()) {
        const Quantized &dy = dy_.fp8, &x = x_.fp8;
        dispatch.call<grouped_fp8_wgrad_accumulate>("te::grouped_fp8_wgrad_accumulate", dy.columnwise,
                                                    dy.columnwise_scale_inv, code_of(dy), x.columnwise,
                                                    x.columnwise_scale_inv, code_of(x), offsets_, outs, numbers);
      } else {
        dispatch.call<grouped_wgrad_accumulate>("te::grouped_wgrad_accumulate",
                                                plain_rows(dispatch, dy_, offsets_, dtype_),
                                                plain_rows(dispatch, x_, offsets_, dtype_), offsets_, outs, numbers);
      }
    }
  }
  // A product of a group of its own is rounded before it is added to 16 bits; the kernels' is not.
  bool each_is_added(at::ArrayRef<WeightTarget> targets) const {
    return bits_of_loop_ && in_fp8() && std::any_of(targets.begin(), targets.end(), [](const WeightTarget& target) {
             return target.out.defined() && !target.overwrite && target.out.scalar_type() != at::kFloat;
           });
  }
  void add_each(at::ArrayRef<WeightTarget> targets) const {
    int64_t panel = 0;
    for (size_t g = 0; g < splits_.size(); ++g) {
      const Rows panels{panel, (splits_[g] + kPanelRows - 1) / kPanelRows};
      const auto columns = [&](const Operand& all) { return Operand{{}, columns_of(all.fp8, panels, splits_[g])}; };
      MatrixWgrad(columns(dy_), columns(x_), {}, dtype_, true).accumulate(targets.slice(g, 1), false);
      panel += panels.count;
    }
  }
  // The columnwise data of one group, of its panels.
  static Quantized columns_of(const Quantized& all, const Rows& panels, int64_t rows) {
    const int64_t features = all.columnwise.size(1);
    const Tensor own = all.columnwise.narrow(0, panels.first, panels.count).permute({1, 0, 2});
    Quantized one{all.scaling, all.e5m2, {}, {}, {}, {}};
    one.columnwise = own.reshape({features, panels.count * kPanelRows}).narrow(1, 0, rows);
    one.columnwise_scale_inv = all.columnwise_scale_inv.narrow(0, panels.first, panels.count);
    return one;
  }
  bool listed() const { return !splits_.empty(); }
  bool in_fp8() const { return dy_.quantized() && x_.quantized(); }
  Tensor sums(const DispatchMode& dispatch) const {
    return dbias_.defined() ? dbias_ : sums_of(dispatch, dy_.plain, offsets_, false);
  }
  std::vector<Tensor> plain_gradients(const DispatchMode& dispatch) const {
    const Tensor dy = plain_rows(dispatch, dy_, offsets_, dtype_), x = plain_rows(dispatch, x_, offsets_, dtype_);
    return dispatch.direct() ? Direct::call<grouped_wgrad_together>("te::grouped_wgrad", dy, x, offsets_)
                             : Dispatched::call<grouped_wgrad>("te::grouped_wgrad", dy, x, offsets_);
  }
  Tensor plain_gradient(const DispatchMode& dispatch) const {
    return dispatch.call<grouped_wgrad_stacked>("te::grouped_wgrad_stacked",
                                                plain_rows(dispatch, dy_, offsets_, dtype_),
                                                plain_rows(dispatch, x_, offsets_, dtype_), offsets_);
  }
  Tensor fp8_gradient(const DispatchMode& dispatch) const {
    const Quantized &dy = dy_.fp8, &x = x_.fp8;
    return dispatch.call<grouped_fp8_wgrad_stacked>("te::grouped_fp8_wgrad_stacked", dy.columnwise,
                                                    dy.columnwise_scale_inv, code_of(dy), x.columnwise,
                                                    x.columnwise_scale_inv, code_of(x), offsets_, dtype_);
  }
  std::vector<Tensor> fp8_gradients(const DispatchMode& dispatch) const {
    const Quantized &dy = dy_.fp8, &x = x_.fp8;
    const auto gemm_policy = [&](auto&& call) {
      return call("te::grouped_fp8_wgrad", dy.columnwise, dy.columnwise_scale_inv, code_of(dy), x.columnwise,
                  x.columnwise_scale_inv, code_of(x), offsets_, dtype_);
    };
    return dispatch.direct() ? gemm_policy([](auto&&... a) { return Direct::call<grouped_fp8_wgrad_together>(a...); })
                             : gemm_policy([](auto&&... a) { return Dispatched::call<grouped_fp8_wgrad>(a...); });
  }

  Operand dy_, x_;
  Tensor dbias_, offsets_;  // dbias: summed already, where dy is FP8 and a bias needs a gradient
  at::ScalarType dtype_;
  std::vector<int64_t> splits_;
  bool bits_of_loop_;
  const char* why_;
};

// One direction of the weights, as lists of data and of scales.
struct WeightLists {
  std::vector<Tensor> data, scales;

  WeightLists(const WeightSet& w, bool columnwise, const Quantized& rows) {
    const te_scaling wanted = rows.scaling == TE_SCALING_TENSOR ? TE_SCALING_TENSOR : TE_SCALING_BLOCK_2D;
    data.reserve(w.weights.size());
    scales.reserve(w.weights.size());
    for (const Operand& weight : w.weights) {
      const Fp8Operand one(weight.fp8, columnwise, "weight");
      TORCH_CHECK_NOT_IMPLEMENTED(weight.fp8.scaling == wanted && !weight.fp8.e5m2,
                                  "grouped_linear: weights that are not E4M3 in scales of a tensor, or of 128 x 128 "
                                  "beside rows in blocks, with groups whose sizes are on the device alone, are not "
                                  "available in this version; pass 'm_splits' as a list of integers.");
      data.push_back(one.data);
      scales.push_back(one.scale_inv);
    }
  }
};

class DeviceGroups final : public GemmPolicy {
 public:
  explicit DeviceGroups(Grouping grouping) : grouping_(std::move(grouping)) {}

  const ProductQuantization* quantization(const ProductQuantization* all, size_t i) const override {
    return grouping_.quantizations.size() < 2 ? all : grouping_.quantizations[i].get();
  }
  bool quantizes_groups(const ProductQuantization* all) const override { return all != nullptr; }

  Operand quantized_groups(const DispatchMode& dispatch, Pass pass, const Operand& plain, QuantizeUsage usage,
                           Tensor* dbias) const override {
    const auto quantizer_of = [&](const Quantization& q) {
      return pass == Pass::kFprop ? &q->x : gradient_quantizer(q.get(), usage);
    };
    const bool any = usage.rowwise || usage.columnwise, quantizes = quantizer_of(grouping_.quantizations[0]) != nullptr;
    if (quantizes && dbias != nullptr) *dbias = sums_as_quantized(dispatch, gathered_rows(dispatch, plain));
    if (!quantizes || !any) return {gathered_rows(dispatch, plain), {}};
    const Tensor rows = matrix_of(plain.plain);
    const OptionalTensor row_map = plain.row_map.defined() ? OptionalTensor(plain.row_map) : OptionalTensor();
    c10::SmallVector<const Quantizer*, 8> quantizers;
    for (const Quantization& q : grouping_.quantizations) quantizers.push_back(quantizer_of(q));
    if (dispatch.direct()) {
      return {{},
              Direct::call<grouped_quantize>("te::grouped_quantize", at::ArrayRef<const Quantizer*>(quantizers), rows,
                                             grouping_.offsets, usage, row_map)};
    }
    const QuantizeSpec& spec = quantizers[0]->spec;
    refuse_state(*quantizers[0]);
    std::vector<int64_t> packed;
    spec.pack(packed);
    const auto [rowwise, rowwise_scales, panels, panel_scales] =
        Dispatched::call<grouped_quantize_op>("te::grouped_quantize", rows, grouping_.offsets,
                                              at::ArrayRef<int64_t>(packed), usage.rowwise, usage.columnwise, row_map);
    Quantized q{spec.scaling(), spec.e5m2, {}, {}, {}, {}};
    if (usage.rowwise) q.rowwise = rowwise, q.rowwise_scale_inv = rowwise_scales;
    if (usage.columnwise) q.columnwise = panels, q.columnwise_scale_inv = panel_scales;
    return {{}, q};
  }

  // Rows of no group have no part in a scale, so that quantizing the same rows again finds it. Delayed scaling alone
  // may have another one by then.
  std::vector<Tensor> used_scales(const Operand&) const override {
    const auto& quantizations = grouping_.quantizations;  // of one kind
    if (quantizations.empty() || quantizations[0]->x.spec.kind != QuantizeSpec::kDelayed) return {};
    std::vector<Tensor> scales;
    for (const Quantization& q : grouping_.quantizations) scales.push_back(q->x.scale);
    return {at::cat(scales)};
  }
  LiveCounters live_counters(const Operand& kept) const override {
    if (listed()) return {};
    return {live_rows_of(grouping_), kept.fp8.columnwise.defined() ? grouped_panels(grouping_.offsets) : Tensor()};
  }
  std::shared_ptr<const GemmPolicy> with_scales(at::TensorList used) const override {
    Grouping grouping = grouping_;
    for (size_t g = 0; g < grouping.quantizations.size(); ++g) {
      auto q = std::make_shared<ProductQuantization>(*grouping_.quantizations[g]);
      q->x.amax = Tensor();
      q->x.scale = used[0].narrow(0, int64_t(g), 1);
      grouping.quantizations[g] = std::move(q);
    }
    return std::make_shared<DeviceGroups>(std::move(grouping));
  }
  Operand quantized_again(const DispatchMode& dispatch, const Operand& plain, QuantizeUsage usage,
                          at::TensorList used) const override {
    if (used.empty()) return quantized_groups(dispatch, Pass::kFprop, plain, usage, nullptr);
    return with_scales(used)->quantized_groups(dispatch, Pass::kFprop, plain, usage, nullptr);
  }

  Tensor fprop(const DispatchMode& dispatch, const Operand& x, const Rows*, const WeightSet& w, const Tensor& like,
               bool) const override {
    const probe::PathReason because(why_of(grouping_));
    check_apart(grouping_.out, "out", x);
    const Tensor &offsets = grouping_.offsets, &given = grouping_.out;
    if (x.quantized() && all_quantized(w)) {
      const WeightLists lists(w, false, x.fp8);
      const at::TensorList data(lists.data), scales(lists.scales);
      const Tensor &rows = x.fp8.rowwise, &scale_inv = x.fp8.rowwise_scale_inv;
      const Tensor out =
          output_buffer(dispatch, given, grouping_.tail_unread, rows, data[0].size(0), like.scalar_type());
      Tensor y = out;
      if (!out.defined()) {
        y = dispatch.call<grouped_fp8_fprop>("te::grouped_fp8_fprop", rows, scale_inv, code_of(x.fp8), data, scales,
                                             w.biases, offsets, like.scalar_type());
      } else {
        Direct::call<grouped_fp8_fprop_into>("te::grouped_fp8_fprop", rows, scale_inv, code_of(x.fp8), data, scales,
                                             w.biases, offsets, out);
      }
      for_each(grouping_.fprop_each, x, y, [&](size_t g, const Operand& part, const Tensor& into) {
        fprop_of(dispatch, part, w.weights[g], w.bias(g), into, true, into);
      });
      return given.defined() ? result_in(given, like) : with_rows_of(y, like);
    }
    const std::vector<Tensor> weights = plain_weights(dispatch, w, like.scalar_type());
    const Tensor rows = plain_rows(dispatch, x, offsets, like.scalar_type());
    const Tensor out =
        output_buffer(dispatch, given, grouping_.tail_unread, rows, weights[0].size(-2), rows.scalar_type());
    const Tensor y =
        dispatch.direct()
            ? Direct::call<grouped_rows>("te::grouped_fprop", TE_GROUPED_FPROP, rows, weights, w.biases, offsets, out)
            : Dispatched::call<grouped_fprop>("te::grouped_fprop", rows, weights, w.biases, offsets);
    return given.defined() ? result_in(given, like) : with_rows_of(y, like);
  }

  Tensor dgrad(const DispatchMode& dispatch, const Operand& dy, const Rows*, const WeightSet& w, const Tensor& like,
               bool) const override {
    const probe::PathReason because(why_of(grouping_));
    check_apart(grouping_.dgrad_out, "dgrad_out", dy);
    const Tensor &offsets = grouping_.offsets, &given = grouping_.dgrad_out;
    if (dy.quantized() && all_quantized(w)) {
      const WeightLists lists(w, true, dy.fp8);
      const at::TensorList data(lists.data), scales(lists.scales);
      const Tensor &rows = dy.fp8.rowwise, &scale_inv = dy.fp8.rowwise_scale_inv;
      const Tensor out =
          output_buffer(dispatch, given, grouping_.dgrad_tail_unread, rows, data[0].size(0), like.scalar_type());
      Tensor dx = out;
      if (!out.defined()) {
        dx = dispatch.call<grouped_fp8_dgrad>("te::grouped_fp8_dgrad", rows, scale_inv, code_of(dy.fp8), data, scales,
                                              offsets, like.scalar_type());
      } else {
        Direct::call<grouped_fp8_dgrad_into>("te::grouped_fp8_dgrad", rows, scale_inv, code_of(dy.fp8), data, scales,
                                             offsets, out);
      }
      for_each(grouping_.dgrad_each, dy, dx, [&](size_t g, const Operand& part, const Tensor& into) {
        dgrad_of(dispatch, part, w.weights[g], into, true, into);
      });
      return given.defined() ? result_in(given, like) : with_rows_of(dx, like);
    }
    const std::vector<Tensor> weights = plain_weights(dispatch, w, like.scalar_type());
    const Tensor rows = plain_rows(dispatch, dy, offsets, like.scalar_type());
    const Tensor out =
        output_buffer(dispatch, given, grouping_.dgrad_tail_unread, rows, weights[0].size(-1), rows.scalar_type());
    const at::TensorList no_biases;
    const Tensor dx = dispatch.direct() ? Direct::call<grouped_rows>("te::grouped_dgrad", TE_GROUPED_DGRAD, rows,
                                                                     weights, no_biases, offsets, out)
                                        : Dispatched::call<grouped_dgrad>("te::grouped_dgrad", rows, weights, offsets);
    return given.defined() ? result_in(given, like) : with_rows_of(dx, like);
  }

  std::shared_ptr<WgradTask> wgrad_task(const DispatchMode&, Gradient gradient, Operand x, at::ScalarType dtype,
                                        bool) const override {
    return wgrad_of(std::make_shared<DeviceWeightProduct>(std::move(gradient), std::move(x), dtype, grouping_),
                    grouping_.stacked);
  }

  Sums bias_gradients(const DispatchMode& dispatch, const Tensor& dy, const Tensor& sums) const override {
    if (grouping_.bits_of_loop && !sums.defined())
      return column_sums_of(dispatch, dy, rows_of_groups(grouping_.splits));
    return each_row(dispatch, sums.defined() ? sums : sums_of(dispatch, dy, grouping_.offsets, false));
  }

 private:
  bool listed() const { return !grouping_.splits.empty(); }
  // Where a result goes: the caller's buffer, or memory in which rows of no group are not written; undefined: a tensor
  // that the product makes, with zeros there.
  static Tensor output_buffer(const DispatchMode& dispatch, const Tensor& given, bool tail_unread, const Tensor& rows,
                              int64_t features, at::ScalarType dtype) {
    if (given.defined() || !tail_unread || !dispatch.direct()) return given;
    return at::empty({rows.size(0), features}, rows.options().dtype(dtype));
  }
  // With bits_of_loop: summed in the order of a separate layer for each group.
  Tensor sums_as_quantized(const DispatchMode& dispatch, const Tensor& t) const {
    if (!grouping_.bits_of_loop) return sums_of(dispatch, t, grouping_.offsets, true);
    const Tensor rows = matrix_of(t);
    const Quantizer* summing = gradient_quantizer(grouping_.quantizations[0].get(), {});
    std::vector<Tensor> sums;
    for (const Rows& group : rows_of_groups(grouping_.splits)) {
      operand_of(dispatch, summing, rows_of_matrix(dispatch, rows, group), {}, &sums.emplace_back());
    }
    return at::stack(sums);
  }
  // product(group, its operand, its rows of the result) of those that are left to products of their own, which write
  // over what the kernel made of them.
  template <class Product>
  void for_each(const std::vector<uint8_t>& marks, const Operand& t, const Tensor& d, Product&& product) const {
    if (std::find(marks.begin(), marks.end(), 1) == marks.end()) return;
    const OneWorkspace for_all;
    const auto groups = rows_of_groups(grouping_.splits);
    for (size_t g = 0; g < marks.size(); ++g) {
      if (marks[g] != 0) product(g, rows_of(t, groups[g]), rows_view(d, groups[g].first, groups[g].count));
    }
  }
  static bool all_quantized(const WeightSet& w) {
    return std::all_of(w.weights.begin(), w.weights.end(), [](const Operand& weight) { return weight.quantized(); });
  }
  static std::vector<Tensor> plain_weights(const DispatchMode& dispatch, const WeightSet& w, at::ScalarType dtype) {
    std::vector<Tensor> weights;
    weights.reserve(w.weights.size());
    for (const Operand& weight : w.weights) weights.push_back(plain_of(dispatch, weight, dtype));
    return weights;
  }

  Grouping grouping_;
};

bool alike(const Quantizer& a, const Quantizer& b) { return a.spec == b.spec; }

}  // namespace

const char* device_refuses(at::ArrayRef<Quantization> quantizations, size_t groups) {
  if (quantizations.empty()) return nullptr;
  if (groups > kMostQuantizedGroups) return "more than 1024 groups";
  const ProductQuantization& first = *quantizations[0];
  for (const Quantization& q : quantizations) {
    if (!alike(q->x, first.x) || !alike(q->weight, first.weight) || !alike(q->dy, first.dy)) {
      return "quantizers that differ from group to group";
    }
  }
  const auto kind = first.x.spec.kind;
  if (kind != QuantizeSpec::kDelayed && kind != QuantizeSpec::kCurrent && kind != QuantizeSpec::kBlock1d) {
    return "inputs that are not quantized by delayed, current or 1 x 128 block scaling";
  }
  if (first.backward == BackwardReads::kQuantized && first.dy.spec.kind != kind) {
    return "gradients that are quantized otherwise than inputs";
  }
  if (!first.weight.active() || first.x.spec.e5m2 || first.weight.spec.e5m2)
    return "weights or inputs that are not E4M3";
  const bool per_tensor = first.x.spec.scaling() == TE_SCALING_TENSOR;
  const bool python = first.weight.spec.kind == QuantizeSpec::kPython;
  if (python || first.weight.spec.scaling() != (per_tensor ? TE_SCALING_TENSOR : TE_SCALING_BLOCK_2D)) {
    return "weights that are not quantized as wholes, beside inputs in blocks in 128 x 128 ones";
  }
  return nullptr;
}

std::shared_ptr<const GemmPolicy> device_groups(Grouping grouping) {
  const size_t starts = grouping.offsets.dim() == 1 ? size_t(grouping.offsets.size(0)) : 0;  // else refused by products
  const char* why = device_refuses(grouping.quantizations, starts > 0 ? starts - 1 : 0);
  TORCH_CHECK_NOT_IMPLEMENTED(why == nullptr,
                              "grouped_linear: FP8 products of groups whose sizes are on the device alone with ", why,
                              " are not available in this version; pass 'm_splits' as a list of integers.");
  return std::make_shared<DeviceGroups>(std::move(grouping));
}

}  // namespace te_torch::layer
