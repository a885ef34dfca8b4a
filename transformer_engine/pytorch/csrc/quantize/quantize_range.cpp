// The binding of range quantization: quantizes a part of a weight with the scales of the whole weight, into tensors of
// the caller.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "core/op_registration.h"
#include "quantize/quantize.h"

namespace te_torch {

namespace {

te_dtype float_dtype(at::ScalarType dtype, const char* op) {
  switch (dtype) {
    case at::kFloat:
      return TE_FLOAT32;
    case at::kHalf:
      return TE_FLOAT16;
    case at::kBFloat16:
      return TE_BFLOAT16;
    default:
      TORCH_CHECK_VALUE(false, op, ": argument 'rounded_to' is ", dtype, ", wanted float32, float16 or bfloat16.");
  }
}

te_quantize_range range_of(const Tensor& x, int64_t rows, int64_t cols, int64_t start, at::ScalarType rounded_to,
                           const char* op) {
  check_float(x, op, "x");
  TORCH_CHECK_VALUE(x.dim() == 1 && x.is_contiguous(), op, ": argument 'x' has shape ", x.sizes(), " and strides ",
                    x.strides(), ", wanted one dense dimension; pass .contiguous().view(-1).");
  return {rows, cols, start, view_2d(x, op, "x"), float_dtype(rounded_to, op)};
}

te_tensor maybe(const OptionalTensor& t, const char* op, const char* argument) {
  return t.has_value() && t->defined() ? view_2d(*t, op, argument) : absent();
}

te_quantize_range_plan plan_of(const QuantizeSpec& spec, const OptionalTensor& amaxes, const OptionalTensor& scale,
                               const OptionalTensor& amax, const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(spec.kind != QuantizeSpec::kNone && spec.kind != QuantizeSpec::kPython, op,
                              ": argument 'spec' is of a quantizer that is not built in, wanted delayed, current or "
                              "block2d.");
  TORCH_CHECK_VALUE((spec.kind == QuantizeSpec::kDelayed) == (scale.has_value() && scale->defined()), op,
                    ": argument 'scale' is ", scale.has_value() ? "given" : "missing",
                    ", wanted a scale for delayed scaling and None for other kinds.");
  return {spec.scaling(),          maybe(scale, op, "scale"), maybe(amaxes, op, "amaxes"),
          maybe(amax, op, "amax"), int(spec.pow_2_scales),    spec.amax_epsilon};
}

te_tensor data_of(const Tensor& data, const QuantizeSpec& spec, const char* op) {
  return bytes_view(data.dim() == 1 ? data.unsqueeze(0) : data, spec.dtype(), op, "data");
}

void quantize_range_amax(const Tensor& x, const Tensor& amaxes, int64_t rows, int64_t cols, int64_t start,
                         at::ScalarType rounded_to, int64_t scaling) {
  const char* op = "quantize_range_amax";
  const te_quantize_range range = range_of(x, rows, cols, start, rounded_to, op);
  check(te_quantize_range_amax(&range, scaling_of(scaling), view_2d(amaxes, op, "amaxes"), current_stream(x)));
  note_written(amaxes);
}

void quantize_range_cast(const Tensor& x, const Tensor& data, const Tensor& scale_inv, const OptionalTensor& amaxes,
                         const OptionalTensor& scale, const OptionalTensor& amax, int64_t rows, int64_t cols,
                         int64_t start, at::ScalarType rounded_to, at::ArrayRef<int64_t> packed) {
  const char* op = "quantize_range_cast";
  const te_quantize_range range = range_of(x, rows, cols, start, rounded_to, op);
  const QuantizeSpec spec = QuantizeSpec::unpack(packed);
  const te_quantize_range_plan plan = plan_of(spec, amaxes, scale, amax, op);
  check(te_quantize_range_cast(&range, &plan, data_of(data, spec, op), view_2d(scale_inv, op, "scale_inv"),
                               current_stream(x)));
  note_written(data);
  note_written(scale_inv);
  if (amax.has_value()) note_written(*amax);
}

// Parts of masters that are cast into many weights, in the same memory in every step: one call of Python, and few
// launches, for all.
class RangeCasts {
 public:
  // The arguments of quantize_range_cast. amaxes: zeros when note_amaxes() is called.
  void add(const Tensor& x, const Tensor& data, const Tensor& scale_inv, const Tensor& amaxes,
           const OptionalTensor& scale, const OptionalTensor& amax, int64_t rows, int64_t cols, int64_t start,
           at::ScalarType rounded_to, const std::vector<int64_t>& packed) {
    const char* op = "quantize_master_weights";
    const QuantizeSpec spec = QuantizeSpec::unpack(packed);
    ranges_.push_back(range_of(x, rows, cols, start, rounded_to, op));
    plans_.push_back(plan_of(spec, amaxes, scale, amax, op));
    data_.push_back(data_of(data, spec, op));
    scale_invs_.push_back(view_2d(scale_inv, op, "scale_inv"));
    kept_.insert(kept_.end(), {x, amaxes});
    written_.insert(written_.end(), {data, scale_inv, amax.value_or(Tensor())});
    if (scale.has_value()) kept_.push_back(*scale);
  }

  void note_amaxes() const {
    if (ranges_.empty()) return;
    const te_quantize_range_list_problem list = problem();
    check(te_quantize_range_list_amaxes(&list, current_stream(kept_[0])));
  }

  void cast() const {
    if (ranges_.empty()) return;
    const te_quantize_range_list_problem list = problem();
    check(te_quantize_range_list_cast(&list, current_stream(kept_[0])));
    for (const Tensor& t : written_) note_written(t);
  }

 private:
  te_quantize_range_list_problem problem() const {
    return {int32_t(ranges_.size()), ranges_.data(), plans_.data(), data_.data(), scale_invs_.data()};
  }

  std::vector<te_quantize_range> ranges_;
  std::vector<te_quantize_range_plan> plans_;
  std::vector<te_tensor> data_, scale_invs_;
  std::vector<Tensor> kept_, written_;
};

// Columnwise data of many weights that are made of rowwise data in the same memory again and again, by one launch.
class ColumnCopies {
 public:
  // scales, column_scales: those of the blocks, one the transpose of the other; none where one scale serves both
  // directions.
  void add(const Tensor& rows, const Tensor& columns, const OptionalTensor& scales,
           const OptionalTensor& column_scales) {
    const char* op = "post_all_gather_processing";
    rows_.push_back(bytes_view(rows, TE_UINT8, op, "rows"));
    columns_.push_back(bytes_view(columns, TE_UINT8, op, "columns"));
    scales_.push_back(maybe(scales, op, "scales"));
    column_scales_.push_back(maybe(column_scales, op, "column_scales"));
    kept_.insert(kept_.end(), {rows, scales.value_or(Tensor())});
    written_.insert(written_.end(), {columns, column_scales.value_or(Tensor())});
  }

  void make() const {
    if (rows_.empty()) return;
    const te_quantize_transpose_list_problem list{int32_t(rows_.size()), rows_.data(), columns_.data(), scales_.data(),
                                                  column_scales_.data()};
    check(te_quantize_transpose_list(&list, current_stream(kept_[0])));
    for (const Tensor& t : written_) note_written(t);
  }

 private:
  std::vector<te_tensor> rows_, columns_, scales_, column_scales_;
  std::vector<Tensor> kept_, written_;
};

void amax_meta(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt, at::ScalarType, int64_t) {}
void cast_meta(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
               const OptionalTensor&, c10::SymInt, c10::SymInt, c10::SymInt, at::ScalarType, at::ArrayRef<int64_t>) {}

}  // namespace

TE_OP_REGISTRATION(quantize_range, ops) {
  ops.op("quantize_range_amax(Tensor x, Tensor(a!) amaxes, SymInt rows, SymInt cols, SymInt start, ScalarType "
         "rounded_to, int scaling) -> ()")
      .kernel(quantize_range_amax)
      .meta(amax_meta)
      .python(quantize_range_amax);
  ops.op("quantize_range_cast(Tensor x, Tensor(a!) data, Tensor(b!) scale_inv, Tensor? amaxes, Tensor? scale, "
         "Tensor(c!)? amax, SymInt rows, SymInt cols, SymInt start, ScalarType rounded_to, int[] spec) -> ()")
      .kernel(quantize_range_cast)
      .meta(cast_meta)
      .python([](const Tensor& x, const Tensor& data, const Tensor& scale_inv, const OptionalTensor& amaxes,
                 const OptionalTensor& scale, const OptionalTensor& amax, int64_t rows, int64_t cols, int64_t start,
                 at::ScalarType rounded_to, const std::vector<int64_t>& spec) {
        quantize_range_cast(x, data, scale_inv, amaxes, scale, amax, rows, cols, start, rounded_to, spec);
      });
}

void register_range_casts(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<RangeCasts>(m, "RangeCasts", "Casts of parts of masters into weights, all by one call.")
      .def(py::init<>())
      .def("add", torch::wrap_pybind_function(&RangeCasts::add), py::arg("x"), py::arg("data"), py::arg("scale_inv"),
           py::arg("amaxes"), py::arg("scale"), py::arg("amax"), py::arg("rows"), py::arg("cols"), py::arg("start"),
           py::arg("rounded_to"), py::arg("spec"))
      .def("note_amaxes", torch::wrap_pybind_function_no_gil(&RangeCasts::note_amaxes))
      .def("cast", torch::wrap_pybind_function_no_gil(&RangeCasts::cast));
  py::class_<ColumnCopies>(m, "ColumnCopies", "Columnwise data of weights, all by one call.")
      .def(py::init<>())
      .def("add", torch::wrap_pybind_function(&ColumnCopies::add), py::arg("rows"), py::arg("columns"),
           py::arg("scales"), py::arg("column_scales"))
      .def("make", torch::wrap_pybind_function_no_gil(&ColumnCopies::make));
}

}  // namespace te_torch
