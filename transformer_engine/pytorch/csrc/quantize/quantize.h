// Kernel wrappers of quantization and their types: a Quantizer describes how a tensor becomes FP8; a Quantized is the
// result as plain tensors, which autograd saves like any others.
#pragma once

#include <c10/util/FunctionRef.h>
#include <transformer_engine/quantize.h>
#include <transformer_engine/scaling.h>

#include <memory>

#include "core/common.h"

namespace te_torch {

// The kinds of quantizers by their names in Python, and their scaling. none: does not quantize. delayed: by a given
// scale. current: by the tensor's own amax. python: by a quantizer written in Python, in eager mode alone.
// X(enumerator, name, scaling, stateless: a spec of integers describes all of it, so that a schema can carry it)
#define TE_QUANTIZER_TABLE(X)            \
  X(kNone, "none", TENSOR, false)        \
  X(kDelayed, "delayed", TENSOR, false)  \
  X(kCurrent, "current", TENSOR, true)   \
  X(kBlock1d, "block1d", BLOCK_1D, true) \
  X(kBlock2d, "block2d", BLOCK_2D, true) \
  X(kPython, "python", TENSOR, false)

struct QuantizerKind {
  const char* name;
  te_scaling scaling;
  bool stateless;
};
inline constexpr QuantizerKind kQuantizerKinds[] = {
#define TE_QUANTIZER_KIND(enumerator, name, scaling, stateless) {name, TE_SCALING_##scaling, stateless},
    TE_QUANTIZER_TABLE(TE_QUANTIZER_KIND)
#undef TE_QUANTIZER_KIND
};

// How a tensor is quantized, as plain values that a schema can carry.
struct QuantizeSpec {
  enum Kind : int8_t {
#define TE_QUANTIZER_ENUMERATOR(enumerator, ...) enumerator,
    TE_QUANTIZER_TABLE(TE_QUANTIZER_ENUMERATOR)
#undef TE_QUANTIZER_ENUMERATOR
  } kind = kNone;
  bool e5m2 = false;
  bool pow_2_scales = false;
  float amax_epsilon = 0;

  te_scaling scaling() const { return kQuantizerKinds[kind].scaling; }
  bool stateless() const { return kQuantizerKinds[kind].stateless; }
  bool operator==(const QuantizeSpec&) const = default;
  te_dtype dtype() const { return e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3; }
  // Four integers: kind, e5m2, pow_2_scales, the bits of amax_epsilon.
  static constexpr size_t kPacked = 4;
  void pack(std::vector<int64_t>& into) const;
  static QuantizeSpec unpack(at::ArrayRef<int64_t> values);
};

// An FP8 matrix: uint8 data [rows, cols] and [cols, rows], float32 scales as in transformer_engine/quantize.h (those of
// TENSOR hold two: scale_inv and scale). Undefined for a missing direction.
struct Quantized {
  te_scaling scaling = TE_SCALING_TENSOR;
  bool e5m2 = false;
  Tensor rowwise, rowwise_scale_inv, columnwise, columnwise_scale_inv;

  bool defined() const { return rowwise.defined() || columnwise.defined(); }
  te_dtype dtype() const { return e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3; }
};

// The directions to quantize.
struct QuantizeUsage {
  bool rowwise = false;
  bool columnwise = false;
};

// A quantizer of a module: the spec, and the state of delayed scaling between steps.
struct Quantizer {
  QuantizeSpec spec;
  Tensor scale;                            // float32 [1], kDelayed: read
  Tensor amax;                             // float32 [1], kDelayed: updated with the maximum; undefined: not computed
  std::shared_ptr<const PyObject> python;  // kPython

  bool active() const { return spec.kind != QuantizeSpec::kNone; }
};

// FP8 data of one direction: uint8 [rows, cols], a view of a buffer whose rows and pitch are rounded up to 16, as FP8
// GEMMs need. The additional rows are zeroed, the others not initialized.
Tensor empty_fp8_data(int64_t rows, int64_t cols, const at::TensorOptions& like);

// The data and scales of the requested directions of a [rows, cols] matrix: [rows, cols] and [cols, rows].
Quantized empty_quantized(const QuantizeSpec& spec, int64_t rows, int64_t cols, QuantizeUsage usage,
                          const at::TensorOptions& like);

// The same for several equal matrices: one buffer for all data of a direction, one for its scales.
std::vector<Quantized> empty_quantized_list(size_t count, const QuantizeSpec& spec, int64_t rows, int64_t cols,
                                            QuantizeUsage usage, const at::TensorOptions& like);

// A view for the C API.
te_quantized view_of(const Quantized& q, const char* op, const char* argument);

// The quantization of a fused producer's output: a te_quantize_plan with the tensors that it points to.
struct OutputQuantization {
  te_quantize_plan plan{};
  Tensor amax_parts, column_sums;

  // By a built-in quantizer. Under current scaling, fill_parts(parts) is called to compute the partial amaxes.
  OutputQuantization(const Quantizer& quantizer, const at::TensorOptions& like,
                     c10::function_ref<void(te_tensor parts)> fill_parts);
  // With the scale of an earlier quantization (TENSOR: in `used_scales`; blocks need none). Changes no amax.
  OutputQuantization(const QuantizeSpec& spec, const Tensor& used_scales);

  void want_column_sums(int64_t rows, int64_t cols, const at::TensorOptions& like);
  Tensor bias_gradient(at::ScalarType dtype) const;  // from the column sums of the call
};

// Quantizes x with its leading dimensions folded into rows; undefined where a Python quantizer leaves x as it is. dbias
// gets the sums of x's columns, in its dtype.
Quantized quantize(const Quantizer& quantizer, const Tensor& x, QuantizeUsage usage, Tensor* dbias = nullptr);

// With the scale of an earlier quantization: gives the same bits and changes no amax.
Quantized quantize_again(const QuantizeSpec& spec, const Tensor& used_scales, const Tensor& x, QuantizeUsage usage);

// Like quantize(), into `out`. noop: float32 [1]. amax: used in place of x's own under current scaling. Both may be
// undefined.
Quantized quantize_into(const Quantizer& quantizer, const Tensor& x, const Quantized& out, const Tensor& noop,
                        const Tensor& amax);

// A view of FP8 data, a uint8 matrix with contiguous rows, for the C API; absent() where undefined.
te_tensor bytes_view(const Tensor& t, te_dtype dtype, const char* op, const char* argument);

// The transpose [cols, rows] of bytes [rows, cols], in `out` or in a new buffer as of empty_quantized().
Tensor fp8_transpose(const Tensor& data, const OptionalTensor& out);

// float32 [1]: the largest |x|.
Tensor quantize_amax(const Tensor& x);

te_scaling scaling_of(int64_t number);

// [rows, cols] in `dtype`.
Tensor dequantize(const Quantized& q, at::ScalarType dtype);

// The quantizer of a stateless spec: current, block1d or block2d.
Quantizer stateless_quantizer(at::ArrayRef<int64_t> spec);

// The registered op te::quantize, for quantizers without state: (rowwise, rowwise_scale_inv, columnwise,
// columnwise_scale_inv, dbias), empty where not requested.
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
FiveTensors quantize_op(const Tensor& x, at::ArrayRef<int64_t> spec, bool rowwise, bool columnwise, bool dbias);

// The registered op te::quantize_again, for scales of the whole tensor, without dbias.
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
FourTensors quantize_again_op(const Tensor& x, at::ArrayRef<int64_t> spec, const Tensor& used_scales, bool rowwise,
                              bool columnwise);

Tensor dequantize_op(const Tensor& data, const Tensor& scale_inv, int64_t scaling, bool e5m2, bool columnwise,
                     at::ScalarType dtype);

}  // namespace te_torch
