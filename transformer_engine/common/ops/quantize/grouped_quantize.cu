// grouped quantize, CUDA path. A panel of a group is a matrix of up to 128 rows, which the tiles of tile.cuh and
// emit.cuh quantize like any other: its columnwise data has a pitch of 128. Each block computes the groups' panels from
// the offsets once, in shared memory, and then processes tiles of them. For current scaling, an earlier launch computes
// the groups' amaxes, as parts with one writer each (AmaxRuns), so that no memory has to be zeroed first.
#include "ops/quantize/grouped_panels.cuh"
#include "ops/quantize/grouped_walk.h"
#include "ops/quantize/source.cuh"

namespace te::quantize::grouped::cuda {

namespace {

using quantize::cuda::is_wide;
using quantize::cuda::Source;

constexpr const char* kOp = "te_grouped_quantize";
constexpr int kGroupsOfThread = kMostGroups / kThreads;
static_assert(kGroupsOfThread * kThreads == kMostGroups && kPanelRows == kTile);

// The input and its division. `most`: the capacity of panels. `row_map`: of the rows, to those of x, which are
// `tokens`.
template <class T>
struct Input {
  Source<T> x;
  const int32_t* row_map;
  int32_t tokens;
  const int32_t* offsets;
  int32_t groups, rows, most;
  int64_t cols;
  bool wide;
};

struct Groups {
  int32_t first[kMostGroups + 1];   // of x's rows, for any offsets
  int32_t before[kMostGroups + 1];  // panels; limited to the capacity
  int32_t warps[kWarps];
};

__device__ __forceinline__ int32_t at_most(int32_t n, int32_t most) { return n < most ? n : most; }

// Sums of panels saturate at the capacity, in any order alike.
template <class T>
__device__ __forceinline__ void find_groups(const Input<T>& in, Groups& s) {
  const int tid = int(threadIdx.x), lane = tid % kWarp, warp = tid / kWarp;
  for (int g = tid; g <= in.groups; g += kThreads) s.first[g] = clamp_row(in.offsets[g], in.rows);
  __syncthreads();
  int32_t sums[kGroupsOfThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kGroupsOfThread; ++i) {
    const int g = tid * kGroupsOfThread + i;
    if (g < in.groups) sum = at_most(sum + panels_of(s.first[g + 1] - s.first[g]), in.most);
    sums[i] = sum;
  }
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t left = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum = at_most(sum + left, in.most);
  }
  if (lane == kWarp - 1) s.warps[warp] = sum;
  __syncthreads();
  int32_t left = __shfl_up_sync(0xffffffffu, sum, 1);
  if (lane == 0) left = 0;
#pragma unroll 1
  for (int w = 0; w < warp; ++w) left = at_most(left + s.warps[w], in.most);
#pragma unroll
  for (int i = 0; i < kGroupsOfThread; ++i) {
    const int g = tid * kGroupsOfThread + i;
    if (g < in.groups) s.before[g + 1] = at_most(left + sums[i], in.most);
  }
  if (tid == 0) s.before[0] = 0;
  __syncthreads();
}

// Panel `in_group` of a group as a matrix.
struct Panel {
  int64_t row;   // its first row in x
  int32_t rows;  // 1 to 128

  __device__ __forceinline__ Panel(const Groups& s, int32_t group, int32_t in_group)
      : row(s.first[group] + in_group * kPanelRows), rows(at_most(s.first[group + 1] - int32_t(row), kPanelRows)) {}
};

// A thread's values of a panel's tile, 0 where there are none. All rows are loaded at once: groups mostly end within a
// panel, so rows after the last one are read too, instead of testing each row.
template <class T>
__device__ __forceinline__ void load_tile(const Input<T>& in, const Panel& panel, const Place& at,
                                          Vector<T> (&values)[kRows]) {
  if (!in.wide) {
    Source<T> x = in.x;
    x.x += panel.row * x.row_pitch;
    return for_some_rows<true>(x, Domain{panel.rows, in.cols, 1, 1, false}, at,
                               [&](int i, const Vector<T>(&row)[1]) { values[i] = row[0]; });
  }
  const int rows = at.col() < in.cols ? panel.rows - int(at.row()) : 0;  // `wide`: all of the thread's columns exist
  if (rows > 0) {
    const T* source = in.x.input(0, panel.row + at.row(), at.col());
#pragma unroll
    for (int i = 0; i < kRows; ++i) values[i] = load_packed<T, kColumns>(source + min(i, rows - 1) * in.x.row_pitch);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= rows) values[i] = Vector<T>{};
  }
}

// The same of rows that a map names, 0 where it names none.
template <class T>
__device__ __forceinline__ void load_mapped_tile(const Input<T>& in, const Panel& panel, const Place& at,
                                                 Vector<T> (&values)[kRows]) {
  const int n = int(min(int64_t(kColumns), in.cols - at.col()));
  const int rows = n > 0 ? panel.rows - int(at.row()) : 0;
  int32_t from[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) from[i] = i < rows ? in.row_map[panel.row + at.row() + i] : -1;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool live = from[i] >= 0 && from[i] < in.tokens;
    values[i] = live ? load_some(in.x, 0, from[i], at.col(), n, in.wide) : Vector<T>{};
  }
}

template <bool kMapped, class T>
__device__ __forceinline__ void load(const Input<T>& in, const Panel& panel, const Place& at,
                                     Vector<T> (&values)[kRows]) {
  if constexpr (kMapped) {
    load_mapped_tile(in, panel, at, values);
  } else {
    load_tile(in, panel, at, values);
  }
}

// ---- scales ----

// BLOCK_1D: each panel has its own.
struct BlockScales {
  static constexpr te_scaling kScaling = TE_SCALING_BLOCK_1D;

  __device__ __forceinline__ bool backwards() const { return false; }
  // Columns after the last row of x.
  __device__ __forceinline__ void put_others(const Groups&, const Dest& full, int32_t, bool) const {
    const te_tensor& scales = full.rowwise_scale_inv;
    for (int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x; row < scales.rows;
         row += int64_t(gridDim.x) * kThreads) {
#pragma unroll 1
      for (int64_t col = full.rows; col < scales.cols; ++col) put_scale(scales, row, col, 0.f);
    }
  }
  __device__ __forceinline__ void set(Dest& dest, const Groups&, int32_t, PanelAt, int32_t number,
                                      const Panel& panel) const {
    dest.rowwise_scale_inv.data = static_cast<float*>(dest.rowwise_scale_inv.data) + panel.row;
    dest.rowwise_scale_inv.cols = panel.rows;  // no padding: the next group follows
    dest.columnwise_scale_inv.data =
        static_cast<float*>(dest.columnwise_scale_inv.data) + number * dest.columnwise_scale_inv.row_pitch;
    dest.columnwise_scale_inv.rows = 1;
  }
};

// TENSOR: given, or computed from parts.
struct GroupScales {
  static constexpr te_scaling kScaling = TE_SCALING_TENSOR;

  const float* parts;
  int32_t part_blocks, part_cols;  // blocks of the amax pass, and its tiles in a panel
  const float* given[kMostGroups];
  float* amaxes[kMostGroups];

  // After the amax pass the last tiles are processed first: they may still be in the L2.
  __device__ __forceinline__ bool backwards() const { return parts != nullptr; }
  // Scales of groups without a tile.
  __device__ __forceinline__ void put_others(const Groups& s, const Dest& full, int32_t groups, bool no_tiles) const {
    for (int g = int(blockIdx.x * kThreads + threadIdx.x); g < groups; g += int(gridDim.x) * kThreads) {
      if (s.before[g] < s.before[g + 1] && !no_tiles) continue;
      const float scale_inv = 1.f / (parts == nullptr ? *given[g] : full.scale_for(0.f));
      put_scale(full.rowwise_scale_inv, 0, g, scale_inv);
      put_scale(full.columnwise_scale_inv, 0, g, scale_inv);
      if (parts != nullptr && amaxes[g] != nullptr) *amaxes[g] = 0.f;
    }
  }
  __device__ __forceinline__ void set(Dest& dest, const Groups& s, int32_t groups, PanelAt at, int32_t,
                                      const Panel&) const {
    const auto scale_of_group = [&](te_tensor& scales) {  // written by its first panel
      scales.data = static_cast<float*>(scales.data) + at.group;
      scales.rows = at.in_group == 0 ? scales.rows : 0;
      scales.cols = 1;
    };
    scale_of_group(dest.rowwise_scale_inv);
    scale_of_group(dest.columnwise_scale_inv);
    dest.scale = given[at.group];
    dest.amax = parts == nullptr || at.in_group == 0 ? amaxes[at.group] : nullptr;
    if (parts == nullptr) return;
    const int32_t *before = s.before + at.group, first = before[0] * part_cols, end = before[1] * part_cols;
    const AmaxRuns runs(s.before[groups] * part_cols, part_blocks);
    dest.amax_parts = parts + runs.first_part(at.group, first);
    dest.n_parts = runs.last_part(at.group, end) - runs.first_part(at.group, first) + 1;
  }
};

// ---- kernels ----

// A panel's part of the outputs; the other outputs of te_quantize do not exist here.
template <class Scales>
__device__ __forceinline__ Dest dest_of(const Dest& full, const Scales& scales, const Groups& s, int32_t groups,
                                        PanelAt at, int32_t number, const Panel& panel) {
  Dest dest = full;
  dest.rows = panel.rows;
  dest.first_col = 0;
  dest.limit = INT64_MAX;
  dest.scaling = Scales::kScaling;
  dest.column_sums.data = nullptr;
  dest.noop = nullptr;
  if (dest.rowwise != nullptr) dest.rowwise += panel.row * dest.row_pitch;
  if (dest.columnwise != nullptr) dest.columnwise += number * dest.cols * kPanelRows;
  scales.set(dest, s, groups, at, number, panel);
  return dest;
}

template <bool kMapped, class T, class Scales>
__global__ void __launch_bounds__(kThreads, Source<T>::kBlocksPerSm)
    grouped_kernel(const __grid_constant__ Input<T> in, const __grid_constant__ Dest full,
                   const __grid_constant__ Scales scales, int32_t tile_cols) {
  __shared__ Shared shared;
  __shared__ Groups groups;
  find_groups(in, groups);
  scales.put_others(groups, full, in.groups, tile_cols == 0);
  const unsigned tiles = unsigned(groups.before[in.groups]) * unsigned(tile_cols);
  for (unsigned i = blockIdx.x; i < tiles; i += gridDim.x) {
    const unsigned tile = scales.backwards() ? tiles - 1 - i : i;
    const auto number = int32_t(tile / unsigned(tile_cols));
    const PanelAt at = panel_at(groups.before, in.groups, number);
    const Panel panel(groups, at.group, at.in_group);
    const Place place(0, int64_t(tile - unsigned(number) * unsigned(tile_cols)));
    Vector<T> values[kRows];
    load<kMapped>(in, panel, place, values);
    emit<T>(dest_of(full, scales, groups, in.groups, at, number, panel), values, place, shared);
    __syncthreads();  // for the readers of `shared`
  }
}

template <bool kMapped, class T>
__global__ void __launch_bounds__(kThreads, Source<T>::kBlocksPerSm)
    grouped_amax_kernel(const __grid_constant__ Input<T> in, float* parts, int32_t tile_cols) {
  __shared__ Shared shared;
  __shared__ Groups groups;
  find_groups(in, groups);
  const int32_t tiles = groups.before[in.groups] * tile_cols;
  const AmaxRuns runs(tiles, int32_t(gridDim.x));
  int32_t tile = int32_t(blockIdx.x) * runs.step;
  const int32_t end = at_most(tile + runs.step, tiles);
  while (tile < end) {
    const int32_t group = panel_at(groups.before, in.groups, tile / tile_cols).group;
    const int32_t group_end = at_most(groups.before[group + 1] * tile_cols, end);
    Vector<T> largest = {};
    for (; tile < group_end; ++tile) {
      const int32_t number = tile / tile_cols;
      Vector<T> values[kRows];
      const Panel panel(groups, group, number - groups.before[group]);
      load<kMapped>(in, panel, Place(0, tile - number * tile_cols), values);
#pragma unroll
      for (int i = 0; i < kRows; ++i) take_magnitudes<T>(largest, values[i]);
    }
    const float amax = block_max(largest_of<T>(largest), shared);
    if (threadIdx.x == 0) parts[int32_t(blockIdx.x) + group] = amax;
    __syncthreads();  // for the readers of `shared`
  }
}

// ---- host side ----

te_quantized full_quantized(const te_grouped_quantize_problem& p) {
  te_quantized out{p.scaling, p.rowwise, p.panels, p.rowwise_scale_inv, p.panels_scale_inv};
  if (is_absent(p.panels)) out.columnwise.dtype = p.rowwise.dtype;  // which is read if rowwise is absent
  return out;
}

GroupScales scales_of(const te_grouped_quantize_problem& p) {
  GroupScales scales{};
  scales.parts = static_cast<const float*>(p.amax_parts.data);
  for (int32_t g = 0; g < p.groups; ++g) {
    if (p.scales != nullptr) scales.given[g] = p.scales[g];
    if (p.amaxes != nullptr) scales.amaxes[g] = p.amaxes[g];
  }
  return scales;
}

template <bool kMapped, class T>
void run_as(const te_grouped_quantize_problem& p, cudaStream_t stream) {
  const int64_t rows = kMapped ? p.row_map.cols : p.x.rows;
  const auto most = int32_t(most_panels(rows, p.groups));
  const auto* row_map = static_cast<const int32_t*>(p.row_map.data);
  const Input<T> in{Source<T>(p.x), row_map, int32_t(p.x.rows), p.offsets,   p.groups,
                    int32_t(rows),  most,    p.x.cols,          is_wide(p.x)};
  const te_quantize_plan plan{{}, {}, {}, {}, {}, p.pow_2_scales, p.amax_epsilon};
  const Dest full(plan, full_quantized(p), rows, p.x.cols);
  const int64_t wide_cols = full.rowwise != nullptr && full.row_pitch > p.x.cols ? full.row_pitch : p.x.cols;
  const int64_t tile_cols = tiles_of(wide_cols), part_cols = tiles_of(p.x.cols);
  const unsigned tiles = grid_of(kOp, most * tile_cols);
  const auto at_once = unsigned(device_properties(p.x.device).sm_count * Source<T>::kBlocksPerSm);
  const unsigned blocks = tiles < at_once ? tiles : at_once;
  if (p.scaling == TE_SCALING_BLOCK_1D) {
    grouped_kernel<kMapped><<<blocks, kThreads, 0, stream>>>(in, full, BlockScales{}, int32_t(tile_cols));
    return check_launch(kOp);
  }
  GroupScales scales = scales_of(p);
  if (scales.parts != nullptr) {
    const unsigned part_blocks = tiles < TE_GROUPED_QUANTIZE_PARTS ? tiles : TE_GROUPED_QUANTIZE_PARTS;
    scales.part_blocks = int32_t(part_blocks);
    scales.part_cols = int32_t(part_cols);
    grouped_amax_kernel<kMapped>
        <<<part_blocks, kThreads, 0, stream>>>(in, static_cast<float*>(p.amax_parts.data), int32_t(part_cols));
    check_launch(kOp);
  }
  grouped_kernel<kMapped><<<blocks, kThreads, 0, stream>>>(in, full, scales, int32_t(tile_cols));
  check_launch(kOp);
}

}  // namespace

void run(const te_grouped_quantize_problem& problem, te_stream stream) {
  dispatch_float(problem.x.dtype, kOp, "x", [&](auto t) {
    using T = decltype(t);
    if (is_absent(problem.row_map)) return run_as<false, T>(problem, static_cast<cudaStream_t>(stream));
    run_as<true, T>(problem, static_cast<cudaStream_t>(stream));
  });
}

void count_panels(const int32_t* offsets, int32_t groups, int32_t* panels, te_stream stream) {
  panels_kernel<<<1, kCountingThreads, 0, static_cast<cudaStream_t>(stream)>>>(offsets, groups, panels);
  check_launch("te_grouped_panels");
}

}  // namespace te::quantize::grouped::cuda
