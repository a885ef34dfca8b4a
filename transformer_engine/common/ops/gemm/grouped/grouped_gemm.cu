// grouped gemm, CUDA path on the host: checks that TMA can read the operands, and encodes tensor maps. The kernels are
// in fprop.cu, dgrad.cu and wgrad.cu, those of FP8 operands in rows_fp8.cu and wgrad_fp8.cu.
#include <vector>

#include "core/device.h"
#include "core/fp8.h"
#include "core/vec.cuh"
#include "ops/gemm/grouped/check.h"
#include "ops/gemm/grouped/gpu.h"
#include "ops/gemm/grouped/launches.h"
#include "ops/gemm/grouped/launches_fp8.h"
#include "ops/gemm/grouped/problem.h"

namespace te::gemm::grouped::cuda {

namespace {

// TMA needs aligned addresses and pitches; a copy of other operands is left to the caller.
bool is_readable(const te_tensor& t) { return t.rows * t.cols == 0 || aligned16(t); }

void check_readable(const std::string& argument, const te_tensor& t) {
  if (is_readable(t)) return;
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  const size_t bytes = te_dtype_bytes(t.dtype);
  bad_argument(kOp, argument.c_str(),
               concat("at an address of 16 i + ", address % 16, " bytes with rows ", t.row_pitch, " elements apart"),
               concat("both to be multiples of 16 bytes: copy it into aligned memory, with a row pitch rounded up to ",
                      16 / bytes));
}

// Rows of panels are counted in 32 bits, and their scales are loaded in units of 16 bytes.
void check_panels(const te_grouped_gemm_problem& p, const ProblemShape& shape) {
  if (shape.n * shape.k == 0) return;
  for (const auto& [name, t] : {std::pair("rows", p.rows), std::pair("depth_rows", p.depth_rows)}) {
    if (t.rows > kMostRows) bad_argument(kOp, name, concat("of ", t.rows, " rows"), concat("at most ", kMostRows));
  }
  if (p.scaling == TE_SCALING_TENSOR) return;
  check_readable("rows_scale_inv", p.rows_scale_inv);
  check_readable("depth_rows_scale_inv", p.depth_rows_scale_inv);
}

void check_all(const te_grouped_gemm_problem& p, const ProblemShape& shape) {
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
  if (shape.rows > kMostRows)
    bad_argument(kOp, "rows", concat("of ", shape.rows, " rows"), concat("at most ", kMostRows));
  const char* mn = p.product == TE_GROUPED_WGRAD ? "results" : "weights";
  if (shape.n > kMostRows) bad_argument(kOp, mn, concat("of ", shape.n, " rows"), concat("at most ", kMostRows));
  if (shape.k > kMostRows) bad_argument(kOp, mn, concat("of ", shape.k, " columns"), concat("at most ", kMostRows));
  check_readable("rows", p.rows);
  if (p.product == TE_GROUPED_WGRAD) {
    if (is_fp8(p.rows.dtype)) check_panels(p, shape);
    return check_readable("depth_rows", p.depth_rows);
  }
  for (int32_t g = 0; g < p.groups; ++g) {
    if (!is_readable(p.weights[g])) check_readable(element_name("weights", g), p.weights[g]);
  }
}

CUtensorMapDataType map_dtype(te_dtype dtype) {
  if (is_fp8(dtype)) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (dtype == TE_FLOAT32) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return dtype == TE_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

constexpr uint32_t kResultRows = UINT32_MAX;  // box_rows of a map of results

int64_t pitch_bytes(const te_tensor& t) {
  const auto bytes = int64_t(te_dtype_bytes(t.dtype));
  return t.rows > 1 ? t.row_pitch * bytes : (t.cols * bytes + 15) / 16 * 16;  // any valid pitch for one row
}

// Extents and strides of a tensor map, innermost first.
struct MapShape {
  void* data;
  std::vector<cuuint64_t> sizes, strides;
  std::vector<cuuint32_t> box;
};
// A matrix in boxes of `box_rows` rows.
MapShape operand_shape(const te_tensor& t, uint32_t box_rows) {
  return {t.data, {cuuint64_t(t.cols), cuuint64_t(t.rows)}, {cuuint64_t(pitch_bytes(t))}, {0, box_rows}};
}
// A matrix of results in boxes that can end at any row: element (col, i, end) is in row end - kMmaAtomM + i. A box
// that begins at i = kMmaAtomM - n has the n rows before `end`; its other rows are beyond the map.
MapShape result_shape(const te_tensor& t) {
  const int64_t pitch = pitch_bytes(t);
  return {static_cast<char*>(t.data) - sm90::kMmaAtomM * pitch,
          {cuuint64_t(t.cols), cuuint64_t(sm90::kMmaAtomM), cuuint64_t(t.rows + 1)},
          {cuuint64_t(pitch), cuuint64_t(pitch)},
          {0, uint32_t(sm90::kMmaAtomM), 1}};
}

// A tensor map: swizzled boxes of 128 bytes by rows, zeros beyond the matrix.
CUtensorMap encoded(const te_tensor& t, uint32_t box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = reinterpret_cast<Encode>(library_symbol("cuda", "cuTensorMapEncodeTiled"));
  MapShape shape = box_rows == kResultRows ? result_shape(t) : operand_shape(t, box_rows);
  shape.box[0] = cuuint32_t(sm90::kSwizzleRow / int64_t(te_dtype_bytes(t.dtype)));
  const std::vector<cuuint32_t> steps(shape.box.size(), 1);
  CUtensorMap map;
  const auto make = [&] {
    return encode(&map, map_dtype(t.dtype), cuuint32_t(shape.box.size()), shape.data, shape.sizes.data(),
                  shape.strides.data(), shape.box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = make();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {  // the thread has no context yet, as threads of autograd
    check_cuda(cudaSetDevice(t.device), "te_grouped_gemm: cudaSetDevice");
    result = make();
  }
  if (result != CUDA_SUCCESS) {
    throw Error(TE_RUNTIME_ERROR, concat("te_grouped_gemm: cuTensorMapEncodeTiled of a ", shape_of(t), " of row pitch ",
                                         t.row_pitch, ": CUDA error ", int(result)));
  }
  return map;
}

// A cache of a thread's tensor maps. A map depends on its key alone, weights keep their addresses from step to step,
// and a lookup takes a fraction of the driver's call, of which a launch would need hundreds. The weights of a launch
// were mostly entered one after the other, so that the next entry is looked at first: it is in the processor's cache.
class Maps {
 public:
  const CUtensorMap& of(const te_tensor& t, uint32_t box_rows) {
    if (entries_.empty()) entries_.resize(kEntries), places_.resize(kEntries);
    const Key key{t.data, t.rows, t.cols, t.row_pitch, t.dtype, box_rows};
    if (!(entries_[next_].key == key)) next_ = found(key, t);
    const Entry& entry = entries_[next_];
    next_ = (next_ + 1) % kEntries;
    return entry.map;
  }

 private:
  static constexpr size_t kEntries = size_t(1) << 14;  // FPROP and DGRAD of 64 layers of 128 weights

  struct Key {
    const void* data = nullptr;
    int64_t rows = 0, columns = 0, pitch = 0;
    te_dtype dtype = TE_FLOAT32;
    uint32_t box_rows = 0;  // 0: a free entry

    bool operator==(const Key& o) const {
      return data == o.data && rows == o.rows && columns == o.columns && pitch == o.pitch && dtype == o.dtype &&
             box_rows == o.box_rows;
    }
  };
  struct Entry {
    Key key;
    CUtensorMap map;
  };

  // The oldest entry leaves. Colliding keys take one another's place, which costs time alone: the key is entered again.
  size_t found(const Key& key, const te_tensor& t) {
    uint16_t& place = places_[place_of(key)];
    if (entries_[place].key == key) return place;
    Entry& entry = entries_[oldest_];
    entry.key = {};
    entry.map = encoded(t, key.box_rows);
    entry.key = key;
    place = uint16_t(oldest_);
    oldest_ = (oldest_ + 1) % kEntries;
    return place;
  }

  static size_t place_of(const Key& key) {
    const uint64_t mixed = ((reinterpret_cast<uintptr_t>(key.data) >> 4) + key.box_rows) * 0x9E3779B97F4A7C15u;
    return size_t(mixed >> 50);
  }

  std::vector<Entry> entries_;    // in the order in which they were entered
  std::vector<uint16_t> places_;  // by keys: numbers of entries
  size_t next_ = 0, oldest_ = 0;
};

const CUtensorMap& map_of(const te_tensor& t, uint32_t box_rows) {
  thread_local Maps maps;
  return maps.of(t, box_rows);
}

}  // namespace

int32_t Gpu::sms() const { return sms_of(device_properties(device).sm_count); }
bool Gpu::wide(const te_tensor& t) const { return aligned16(t); }
CUtensorMap Gpu::map(const te_tensor& t, int box_rows) const { return map_of(t, uint32_t(box_rows)); }
CUtensorMap Gpu::result_map(const te_tensor& t) const { return map_of(t, kResultRows); }

void run(const te_grouped_gemm_problem& p, const ProblemShape& shape, te_stream stream) {
  check_all(p, shape);
  te_note_path("wgmma kernel, splits read on the device", "");
  const Gpu gpu{p.rows.device, stream, p.rows.dtype, p.scaling};
  const bool fp8 = is_fp8(p.rows.dtype);
  if (p.product == TE_GROUPED_WGRAD) return fp8 ? launch_wgrads_fp8(p, shape, gpu) : launch_wgrads(p, shape, gpu);
  fp8 ? launch_rows_fp8(p, shape, gpu) : launch_rows(p, shape, gpu);
}

}  // namespace te::gemm::grouped::cuda
