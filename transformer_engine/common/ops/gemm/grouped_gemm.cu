// grouped gemm, CUDA path on the host: what TMA can read, and its tensor maps. Offsets are never looked at here. The
// kernels are in grouped_fprop.cu, grouped_dgrad.cu and grouped_wgrad.cu.
#include "core/device.h"
#include "core/fp8.h"
#include "core/vec.cuh"
#include "ops/gemm/grouped.h"
#include "ops/gemm/grouped_check.h"
#include "ops/gemm/grouped_plan.h"

namespace te::gemm::grouped::cuda {

namespace {

// Operands that TMA reads: it has no way of reading others, and a copy is the caller's decision.
void check_readable(const std::string& argument, const te_tensor& t) {
  if (t.rows * t.cols == 0 || aligned16(t)) return;
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  bad_argument(kOp, argument.c_str(),
               concat("at an address of 16 i + ", address % 16, " bytes with rows ", t.row_pitch, " elements apart"),
               "both to be multiples of 16 bytes: copy it to where they are, with a row pitch rounded up to 8");
}

void check_all(const te_grouped_gemm_problem& p, const Extents& e) {
  if (is_fp8(p.rows.dtype)) throw Error(TE_NOT_IMPLEMENTED, "te_grouped_gemm: FP8 operands on CUDA.");
  if (p.rows.dtype == TE_FLOAT32) {
    throw Error(TE_NOT_IMPLEMENTED,
                "te_grouped_gemm: float32 operands whose splits are on the device; pass m_splits as a list (host "
                "splits), or bfloat16 or float16 operands.");
  }
  const int32_t capability = device_properties(p.rows.device).capability;
  if (capability != 90) {
    throw Error(TE_NOT_IMPLEMENTED,
                concat("te_grouped_gemm: a GPU of compute capability ", capability / 10, ".", capability % 10,
                       "; splits on the device need Hopper (9.0). Pass m_splits "
                       "as a list (host splits)."));
  }
  // The last pair of tiles ends within 32 bits.
  constexpr int64_t kMost = INT32_MAX - 256;
  if (e.rows > kMost) bad_argument(kOp, "rows", concat("of ", e.rows, " rows"), concat("at most ", kMost));
  const char* across = p.product == TE_GROUPED_WGRAD ? "results" : "weights";
  if (e.n > kMost) bad_argument(kOp, across, concat("of ", e.n, " rows"), concat("at most ", kMost));
  if (e.k > kMost) bad_argument(kOp, across, concat("of ", e.k, " columns"), concat("at most ", kMost));
  check_readable("rows", p.rows);
  if (p.product == TE_GROUPED_WGRAD) return check_readable("depth_rows", p.depth_rows);
  for (int32_t g = 0; g < p.groups; ++g) check_readable(concat("weights[", g, "]"), p.weights[g]);
}

// A matrix as boxes of 64 columns and `lines` rows, swizzled, zeros beyond its end.
CUtensorMap map_of(const te_tensor& t, uint32_t lines) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = reinterpret_cast<Encode>(library_symbol("cuda", "cuTensorMapEncodeTiled"));
  const cuuint64_t sizes[2] = {cuuint64_t(t.cols), cuuint64_t(t.rows)};
  const int64_t pitch = t.rows > 1 ? t.row_pitch : (t.cols + 7) / 8 * 8;  // of one row, any that TMA takes
  const cuuint64_t strides[1] = {cuuint64_t(pitch) * 2};
  const cuuint32_t box[2] = {wgmma::kBoxCols, lines}, steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, t.dtype == TE_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
             t.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(TE_RUNTIME_ERROR, concat("te_grouped_gemm: cuTensorMapEncodeTiled of a ", shape_of(t), " of row pitch ",
                                         t.row_pitch, ": CUDA error ", int(result)));
  }
  return map;
}

struct Gpu {
  int32_t device;
  te_stream stream;
  te_dtype operands;

  int32_t sms() const { return device_properties(device).sm_count; }
  bool wide(const te_tensor& t) const { return aligned16(t); }
  CUtensorMap map(const te_tensor& t, int lines) const { return map_of(t, uint32_t(lines)); }
  void fprop(const RowParams& params, int32_t blocks) const { launch_fprop(operands, params, launch(blocks)); }
  void dgrad(const RowParams& params, int32_t blocks) const { launch_dgrad(operands, params, launch(blocks)); }
  void wgrad(const WeightParams& params, bool float_results, int32_t blocks) const {
    launch_wgrad(operands, float_results, params, launch(blocks));
  }

 private:
  Launch launch(int32_t blocks) const { return {blocks, device, stream}; }
};

}  // namespace

void run(const te_grouped_gemm_problem& p, const Extents& e, te_stream stream) {
  check_all(p, e);
  te_note_path("wgmma kernel, splits read on the device", "");
  launch_all(p, e, Gpu{p.rows.device, stream, p.rows.dtype});
}

}  // namespace te::gemm::grouped::cuda
