// See product.h.
#include "gemm/product.h"

#include <torch/csrc/utils/pybind.h>

#include "gemm/gemm_fp8.h"
#include "quantize/list_quantize.h"

namespace te_torch {

std::vector<int64_t> ProductQuantization::pack() const {
  std::vector<int64_t> packed;
  packed.reserve(kPacked);
  for (const Quantizer* q : {&x, &weight, &dy}) q->spec.pack(packed);
  for (const bool split : {split_fprop, split_dgrad, split_wgrad}) packed.push_back(split);
  packed.push_back(int64_t(backward));
  return packed;
}

static BackwardReads reads_of(int64_t number, const char* op) {
  TORCH_CHECK_VALUE(number >= 0 && number <= int64_t(BackwardReads::kDequantized), op,
                    ": argument 'quantization' ends with ", number,
                    ", wanted what the backward reads: 0 (quantized), 1 (high precision) or 2 (dequantized).");
  return static_cast<BackwardReads>(number);
}

Quantization quantization_of(at::ArrayRef<int64_t> packed, const char* op) {
  if (packed.empty()) return {};
  TORCH_CHECK_VALUE(packed.size() == ProductQuantization::kPacked, op, ": argument 'quantization' has ", packed.size(),
                    " integers, wanted ", ProductQuantization::kPacked, " or none.");
  auto q = std::make_shared<ProductQuantization>();
  for (Quantizer* quantizer : {&q->x, &q->weight, &q->dy}) {
    quantizer->spec = QuantizeSpec::unpack(packed.slice(0, QuantizeSpec::kPacked));
    packed = packed.slice(QuantizeSpec::kPacked);
  }
  q->split_fprop = packed[0] != 0;
  q->split_dgrad = packed[1] != 0;
  q->split_wgrad = packed[2] != 0;
  q->backward = reads_of(packed[3], op);
  return q;
}

const char* why_override(const ProductQuantization* q) {
  switch (backward_reads(q)) {
    case BackwardReads::kHighPrecision:
      return "backward_override is 'high_precision': the backward reads the operands unquantized";
    case BackwardReads::kDequantized:
      return "backward_override is 'dequantized': the backward reads what the forward's FP8 operands mean";
    default:
      return nullptr;
  }
}

namespace {

std::vector<int64_t> packed(const QuantizeSpec& spec) {
  std::vector<int64_t> integers;
  spec.pack(integers);
  return integers;
}

// quantize() and quantize_again() by way of the dispatcher.
Quantized quantize_dispatched(const QuantizeSpec& spec, const Tensor& x, QuantizeUsage usage, Tensor* dbias) {
  const auto [rowwise, rowwise_scale_inv, columnwise, columnwise_scale_inv, sums] = Dispatched::call<quantize_op>(
      "te::quantize", x, at::ArrayRef<int64_t>(packed(spec)), usage.rowwise, usage.columnwise, dbias != nullptr);
  if (dbias != nullptr) *dbias = sums;
  Quantized q{spec.scaling(), spec.e5m2, {}, {}, {}, {}};
  if (usage.rowwise) q.rowwise = rowwise, q.rowwise_scale_inv = rowwise_scale_inv;
  if (usage.columnwise) q.columnwise = columnwise, q.columnwise_scale_inv = columnwise_scale_inv;
  return q;
}

Quantized quantize_again_dispatched(const QuantizeSpec& spec, const Tensor& used_scales, const Tensor& x,
                                    QuantizeUsage usage) {
  if (spec.scaling() != TE_SCALING_TENSOR) return quantize_dispatched(spec, x, usage, nullptr);
  const auto [rowwise, rowwise_scale_inv, columnwise, columnwise_scale_inv] = Dispatched::call<quantize_again_op>(
      "te::quantize_again", x, at::ArrayRef<int64_t>(packed(spec)), used_scales, usage.rowwise, usage.columnwise);
  Quantized q{spec.scaling(), spec.e5m2, {}, {}, {}, {}};
  if (usage.rowwise) q.rowwise = rowwise, q.rowwise_scale_inv = rowwise_scale_inv;
  if (usage.columnwise) q.columnwise = columnwise, q.columnwise_scale_inv = columnwise_scale_inv;
  return q;
}

}  // namespace

void refuse_state(const Quantizer& quantizer) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !quantizer.active() || quantizer.spec.stateless(),
      "quantize: delayed scaling and quantizers written in Python work on plain tensors in eager mode, not under "
      "torch.compile, FakeTensorMode, functorch or with tensor subclasses; use Float8CurrentScaling or "
      "Float8BlockScaling there.");
}

Quantization with_scales(const ProductQuantization& q, const Tensor& used_scales) {
  auto same_scales = std::make_shared<ProductQuantization>(q);
  const auto kind = q.x.spec.kind;
  if (used_scales.defined() && (kind == QuantizeSpec::kDelayed || kind == QuantizeSpec::kCurrent)) {
    same_scales->x.spec.kind = QuantizeSpec::kDelayed;
    same_scales->x.scale = used_scales.narrow(0, 1, 1);
    same_scales->x.amax = Tensor();
  }
  return same_scales;
}

const Quantizer* gradient_quantizer(const ProductQuantization* q, QuantizeUsage usage) {
  static const Quantizer sums{{QuantizeSpec::kBlock1d, false, false, 0.f}, {}, {}, {}};  // which needs no amax
  if (q == nullptr || !q->dy.active() || q->backward != BackwardReads::kQuantized) return nullptr;
  return usage.rowwise || usage.columnwise ? &q->dy : &sums;
}

Operand operand_of(const DispatchMode& dispatch, const Quantizer* quantizer, const Tensor& x, QuantizeUsage usage,
                   Tensor* dbias) {
  if (quantizer == nullptr || !quantizer->active()) return {x, {}};
  if (dispatch.direct()) {
    const Quantized q = Direct::call<quantize>("te::quantize", *quantizer, x, usage, dbias);
    return q.defined() ? Operand{{}, q} : Operand{x, {}};
  }
  refuse_state(*quantizer);
  return {{}, quantize_dispatched(quantizer->spec, x, usage, dbias)};
}

c10::SmallVector<Operand, 1> operands_of(const DispatchMode& dispatch, at::ArrayRef<const Quantizer*> quantizers,
                                         at::TensorList xs, QuantizeUsage usage) {
  c10::SmallVector<Operand, 1> operands;
  operands.reserve(xs.size());
  if (dispatch.direct() && takes_list(quantizers, xs)) {
    for (Quantized& q : Direct::call<quantize_list>("te::quantize", quantizers, xs, usage)) {
      operands.push_back({{}, std::move(q)});
    }
    return operands;
  }
  for (size_t i = 0; i < xs.size(); ++i) operands.push_back(operand_of(dispatch, quantizers[i], xs[i], usage));
  return operands;
}

Operand recomputed_operand(const DispatchMode& dispatch, const Quantizer* quantizer, const Tensor& used_scales,
                           const Tensor& x, QuantizeUsage usage) {
  if (quantizer == nullptr || !quantizer->active()) return {x, {}};
  if (!dispatch.direct()) return {{}, quantize_again_dispatched(quantizer->spec, used_scales, x, usage)};
  if (quantizer->python != nullptr) return operand_of(dispatch, quantizer, x, usage);
  return {{}, Direct::call<quantize_again>("te::quantize", quantizer->spec, used_scales, x, usage)};
}

Tensor plain_of(const DispatchMode& dispatch, const Operand& t, at::ScalarType dtype) {
  if (!t.quantized()) return t.plain;
  const Quantized& q = t.fp8;
  const bool columnwise = !q.rowwise.defined();
  return dispatch.call<dequantize_op>("te::dequantize", columnwise ? q.columnwise : q.rowwise,
                                      columnwise ? q.columnwise_scale_inv : q.rowwise_scale_inv, int64_t(q.scaling),
                                      q.e5m2, columnwise, dtype);
}

Operand rows_of(const Operand& t, const Rows& rows) {
  if (!t.quantized()) {
    const Tensor folded = t.plain.dim() == 1 ? t.plain.unsqueeze(0) : t.plain.flatten(0, -2);
    return {folded.narrow(0, rows.first, rows.count), {}};
  }
  const Quantized& q = t.fp8;
  Quantized part{q.scaling, q.e5m2, q.rowwise.narrow(0, rows.first, rows.count), q.rowwise_scale_inv, {}, {}};
  const Tensor& scales = q.rowwise_scale_inv;
  const te::ScalingRow& blocks = te::scaling_row(q.scaling);
  if (blocks.across) {  // as a matrix of their own, whose pitch is a multiple of 4
    part.rowwise_scale_inv = scales.new_zeros({scales.size(0), (rows.count + 3) / 4 * 4});
    part.rowwise_scale_inv.narrow(1, 0, rows.count).copy_(scales.narrow(1, rows.first, rows.count));
  } else if (!blocks.is_per_tensor()) {
    const int64_t last = rows.first + rows.count;
    TORCH_INTERNAL_ASSERT(rows.first % blocks.block_rows == 0 &&
                          (last % blocks.block_rows == 0 || last == q.rowwise.size(0)));
    part.rowwise_scale_inv =
        scales.narrow(0, rows.first / blocks.block_rows, (rows.count + blocks.block_rows - 1) / blocks.block_rows);
  }
  return {{}, part};
}

namespace {

// Parts of an FP8 operand among saved tensors: its format, four for each, the direction, data before scales.
enum Part { kRowwise, kRowwiseScale, kColumnwise, kColumnwiseScale };
uint8_t part_of(const Quantized& q, Part part) {
  return static_cast<uint8_t>(1 + 4 * fp8_code(q.scaling, q.e5m2) + part);
}

}  // namespace

Operand off_pool(const Operand& t) {
  Operand own = t;
  for (Tensor* part :
       {&own.plain, &own.fp8.rowwise, &own.fp8.columnwise, &own.fp8.rowwise_scale_inv, &own.fp8.columnwise_scale_inv}) {
    if (is_pooled(*part)) *part = part->clone();
  }
  return own;
}

void refuse_pooled(const Operand& t, const char* op) {
  for (const Tensor* part :
       {&t.plain, &t.fp8.rowwise, &t.fp8.columnwise, &t.fp8.rowwise_scale_inv, &t.fp8.columnwise_scale_inv}) {
    refuse_pooled(*part, op, "what is stored of it");
  }
  for (const Operand& group : t.groups) refuse_pooled(group, op);
}

namespace {

SavedInfo with_tokens(SavedInfo info, bool tokens) {
  info.tokens = tokens;
  return info;
}

// Saves a part of an FP8 operand. live: for data of tokens.
void keep_part(SaveContext& save, int name, const Tensor& t, const SavedInfo& info, uint8_t part, LiveRows live) {
  if (t.defined() && live.counter.defined() && !t.is_contiguous()) live.counter.reset();
  save.keep(name, t, with_tokens(info, false), part, info.tokens ? &live : nullptr);
}

}  // namespace

void keep_operand(SaveContext& save, int name, const Operand& t, QuantizeUsage usage, const SavedInfo& what) {
  // The sizes of such groups are on the host: all their rows are live.
  for (const Operand& group : t.groups) keep_operand(save, name, group, usage, with_tokens(what, false));
  if (!t.quantized()) {
    save.keep(name, t.plain, what);
    return;
  }
  const Quantized& q = t.fp8;
  const bool blocks = q.scaling != TE_SCALING_TENSOR;
  if (usage.rowwise) {
    const auto& [counter, panels, of_group] = save.live();
    const LiveRows rows{counter, 1, LiveUnits::kRows, of_group}, columns{counter, 1, LiveUnits::kColumns, of_group};
    const bool across = te::scaling_row(q.scaling).across;
    keep_part(save, name, q.rowwise, what, part_of(q, kRowwise), rows);
    keep_part(save, name, q.rowwise_scale_inv, with_tokens(kScales, what.tokens && blocks), part_of(q, kRowwiseScale),
              across ? columns : LiveRows{});
  }
  if (usage.columnwise) {
    const LiveRows panels{save.live().panels, 1, LiveUnits::kPanels};
    keep_part(save, name, q.columnwise, what, part_of(q, kColumnwise), panels);
    keep_part(save, name, q.columnwise_scale_inv, with_tokens(kScales, what.tokens && blocks),
              part_of(q, kColumnwiseScale), panels);
  }
}

c10::SmallVector<Operand, 1> kept_operands(const NamedTensors& saved, int name) {
  c10::SmallVector<Operand, 1> list;
  list.reserve(saved.list(name).size());
  for (size_t place = saved.find(name); place < saved.size() && saved.labels()[place].name == name; ++place) {
    const Tensor& tensor = saved.tensors()[place];
    const uint8_t label = saved.labels()[place].part;
    if (label == 0) {
      list.push_back({tensor, {}});
      continue;
    }
    const auto slot = [&](Operand& t) -> Tensor& {
      Quantized& q = t.fp8;
      Tensor* const parts[] = {&q.rowwise, &q.rowwise_scale_inv, &q.columnwise, &q.columnwise_scale_inv};
      return *parts[(label - 1) % 4];
    };
    // The parts of the next operand begin.
    if (list.empty() || list.back().plain.defined() || slot(list.back()).defined()) list.emplace_back();
    const int code = (label - 1) / 4;
    list.back().fp8.scaling = static_cast<te_scaling>(code / 2);
    list.back().fp8.e5m2 = code % 2 != 0;
    slot(list.back()) = tensor;
  }
  return list;
}

Operand kept_operand(const NamedTensors& saved, int name) {
  const auto list = kept_operands(saved, name);
  if (list.size() < 2) return list.empty() ? Operand() : list[0];
  Operand operand;
  operand.groups.assign(list.begin(), list.end());
  return operand;
}

void register_product(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<ProductQuantization, std::shared_ptr<ProductQuantization>>(m, "ProductQuantization")
      .def(py::init([](const Quantizer& x, const Quantizer& weight, const Quantizer& dy, bool split_fprop,
                       bool split_dgrad, bool split_wgrad, int64_t backward) {
             return std::make_shared<ProductQuantization>(ProductQuantization{
                 x, weight, dy, split_fprop, split_dgrad, split_wgrad, reads_of(backward, "ProductQuantization")});
           }),
           py::arg("x"), py::arg("weight"), py::arg("dy"), py::arg("split_fprop"), py::arg("split_dgrad"),
           py::arg("split_wgrad"), py::arg("backward") = 0)
      .def_property_readonly("spec", &ProductQuantization::pack);
}

}  // namespace te_torch
