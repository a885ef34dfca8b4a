// See product.h.
#include "product.h"

#include <torch/csrc/utils/pybind.h>

namespace te_torch {

std::vector<int64_t> ProductQuantization::pack() const {
  std::vector<int64_t> packed;
  packed.reserve(kPacked);
  for (const Quantizer* q : {&x, &weight, &dy}) q->spec.pack(packed);
  for (const bool split : {split_fprop, split_dgrad, split_wgrad}) packed.push_back(split);
  return packed;
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
  return q;
}

namespace {

std::vector<int64_t> packed(const QuantizeSpec& spec) {
  std::vector<int64_t> integers;
  spec.pack(integers);
  return integers;
}

}  // namespace

Quantized quantize_dispatched(const QuantizeSpec& spec, const Tensor& x, Directions directions, Tensor* dbias) {
  const auto [rowwise, rowwise_scale_inv, columnwise, columnwise_scale_inv, sums] =
      Dispatched::call<quantize_op>("te::quantize", x, at::ArrayRef<int64_t>(packed(spec)), directions.rowwise,
                                    directions.columnwise, dbias != nullptr);
  if (dbias != nullptr) *dbias = sums;
  Quantized q{spec.scaling(), spec.e5m2, {}, {}, {}, {}};
  if (directions.rowwise) q.rowwise = rowwise, q.rowwise_scale_inv = rowwise_scale_inv;
  if (directions.columnwise) q.columnwise = columnwise, q.columnwise_scale_inv = columnwise_scale_inv;
  return q;
}

Quantized quantize_again_dispatched(const QuantizeSpec& spec, const Tensor& used_scales, const Tensor& x,
                                    Directions directions) {
  if (spec.scaling() != TE_SCALING_TENSOR) return quantize_dispatched(spec, x, directions, nullptr);
  const auto [rowwise, rowwise_scale_inv, columnwise, columnwise_scale_inv] =
      Dispatched::call<quantize_again_op>("te::quantize_again", x, at::ArrayRef<int64_t>(packed(spec)), used_scales,
                                          directions.rowwise, directions.columnwise);
  Quantized q{spec.scaling(), spec.e5m2, {}, {}, {}, {}};
  if (directions.rowwise) q.rowwise = rowwise, q.rowwise_scale_inv = rowwise_scale_inv;
  if (directions.columnwise) q.columnwise = columnwise, q.columnwise_scale_inv = columnwise_scale_inv;
  return q;
}

void refuse_state(const Quantizer& quantizer) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      quantizer.spec.kind != QuantizeSpec::kDelayed && quantizer.spec.kind != QuantizeSpec::kPython,
      "quantize: delayed scaling and quantizers written in Python work on plain tensors in eager mode, not under "
      "torch.compile, FakeTensorMode, functorch or with tensor subclasses; use Float8CurrentScaling or "
      "Float8BlockScaling there.");
}

Quantization with_scales(const ProductQuantization& q, const Tensor& used_scales) {
  auto again = std::make_shared<ProductQuantization>(q);
  const auto kind = q.x.spec.kind;
  if (used_scales.defined() && (kind == QuantizeSpec::kDelayed || kind == QuantizeSpec::kCurrent)) {
    again->x.spec.kind = QuantizeSpec::kDelayed;
    again->x.scale = used_scales.narrow(0, 1, 1);
    again->x.amax = Tensor();
  }
  return again;
}

const Quantizer* gradient_quantizer(const ProductQuantization* q, Directions directions) {
  static const Quantizer sums{{QuantizeSpec::kBlock1d, false, false, 0.f}, {}, {}, {}};  // which needs no amax
  if (q == nullptr || !q->dy.active()) return nullptr;
  return directions.rowwise || directions.columnwise ? &q->dy : &sums;
}

void register_product(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<ProductQuantization, std::shared_ptr<ProductQuantization>>(m, "ProductQuantization")
      .def(py::init([](const Quantizer& x, const Quantizer& weight, const Quantizer& dy, bool split_fprop,
                       bool split_dgrad, bool split_wgrad) {
             return std::make_shared<ProductQuantization>(
                 ProductQuantization{x, weight, dy, split_fprop, split_dgrad, split_wgrad});
           }),
           py::arg("x"), py::arg("weight"), py::arg("dy"), py::arg("split_fprop"), py::arg("split_dgrad"),
           py::arg("split_wgrad"))
      .def_property_readonly("spec", &ProductQuantization::pack);
}

}  // namespace te_torch
