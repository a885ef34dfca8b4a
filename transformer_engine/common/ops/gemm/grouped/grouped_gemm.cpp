// grouped gemm, contract and CPU path. The path calls te_gemm's product for each group, so that device splits and host
// splits give the same bits.
#include "transformer_engine/grouped_gemm.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "core/device.h"
#include "core/fp8.h"
#include "ops/gemm/gemm_problem.h"
#include "ops/gemm/grouped/check.h"
#include "ops/gemm/grouped/problem.h"

namespace te::gemm::grouped {

namespace {

void check_weights(const te_grouped_gemm_problem& p, const ProblemShape& shape) {
  for (int32_t g = 0; g < p.groups; ++g) {
    if (!is_as(p.weights[g], shape.n, shape.k, p.rows.dtype, p.rows)) {
      check_as(kOp, element_name("weights", g).c_str(), p.weights[g], shape.n, shape.k, p.rows);
    }
    if (p.biases != nullptr && !is_as(p.biases[g], 1, shape.n, p.rows.dtype, p.rows)) {
      check_as(kOp, element_name("biases", g).c_str(), p.biases[g], 1, shape.n, p.rows);
    }
  }
}

void check_results(const te_grouped_gemm_problem& p, const ProblemShape& shape) {
  for (int32_t g = 0; g < p.groups; ++g) {
    te_tensor t = p.results[g];
    if (t.data == nullptr || is_as(t, shape.n, shape.k, t.dtype == TE_FLOAT32 ? TE_FLOAT32 : p.rows.dtype, p.rows))
      continue;
    const std::string argument = element_name("results", g);
    check_shape(kOp, argument.c_str(), t, shape.n, shape.k);
    if (t.dtype == TE_FLOAT32) t.dtype = p.rows.dtype;
    check_like(kOp, argument.c_str(), t, p.rows);
  }
}

}  // namespace

ProblemShape check(const te_grouped_gemm_problem& p) {
  if (int(p.product) < TE_GROUPED_FPROP || int(p.product) > TE_GROUPED_WGRAD) {
    bad_argument(kOp, "product", int(p.product), "TE_GROUPED_FPROP, TE_GROUPED_DGRAD or TE_GROUPED_WGRAD");
  }
  if (p.groups < 1) bad_argument(kOp, "groups", p.groups, ">= 1");
  if (p.offsets == nullptr) bad_argument(kOp, "offsets", "NULL", "int32 [groups + 1] on the operands' device");
  check_tensor(kOp, "rows", p.rows);
  const bool fp8 = is_fp8(p.rows.dtype);
  if (!fp8) dispatch_float(p.rows.dtype, kOp, "rows", [](auto) {});
  if (p.rows.rows > INT32_MAX) bad_argument(kOp, "rows", shape_of(p.rows), "fewer than 2^31 rows");
  const bool wgrad = p.product == TE_GROUPED_WGRAD;
  check_presence(p, "weights", !wgrad, p.weights != nullptr);
  check_presence(p, "results", wgrad, p.results != nullptr);
  if (p.product != TE_GROUPED_FPROP) check_presence(p, "biases", false, p.biases != nullptr);
  if (!wgrad) {
    check_presence(p, "depth_rows", false, p.depth_rows.data != nullptr);
    check_presence(p, "accumulate", false, p.accumulate != nullptr);
    if (fp8) return check_fp8(p);
    refuse_fp8_arguments(p);
    const bool fprop = p.product == TE_GROUPED_FPROP;
    const ProblemShape shape{p.rows.rows, fprop ? p.result.cols : p.rows.cols, fprop ? p.rows.cols : p.result.cols};
    check_as(kOp, "result", p.result, shape.rows, p.result.cols, p.rows);
    check_weights(p, shape);
    return shape;
  }
  check_presence(p, "result", false, p.result.data != nullptr);
  check_presence(p, "zero_tail", false, p.zero_tail != 0);
  if (fp8) return check_fp8(p);
  refuse_fp8_arguments(p);
  const ProblemShape shape{p.rows.rows, p.rows.cols, p.depth_rows.cols};
  check_as(kOp, "depth_rows", p.depth_rows, shape.rows, shape.k, p.rows);
  check_results(p, shape);
  return shape;
}

namespace cpu {

namespace {

void check_offsets(const te_grouped_gemm_problem& p, const ProblemShape& shape) {
  const auto refuse = [&](int32_t g, const char* wanted) {
    bad_argument(kOp, element_name("offsets", g).c_str(), p.offsets[g], wanted);
  };
  if (p.offsets[0] != 0) refuse(0, "0");
  for (int32_t g = 0; g < p.groups; ++g) {
    if (p.offsets[g + 1] < p.offsets[g]) refuse(g + 1, "at least the previous offset");
  }
  if (p.offsets[p.groups] > shape.rows)
    refuse(p.groups, "at most the number of rows (te_grouped_offsets cuts offsets to it)");
}

te_gemm_problem product_of(const te_grouped_gemm_problem& p, int32_t g) {
  const int32_t first = p.offsets[g], last = p.offsets[g + 1];
  te_gemm_problem one{};
  one.b = rows_of(p.rows, first, last);
  if (p.product == TE_GROUPED_WGRAD) {
    one.layout = TE_GEMM_NT;
    one.a = rows_of(p.depth_rows, first, last);
    one.d = p.results[g];
    one.accumulate = p.accumulate != nullptr && p.accumulate[g] != 0;
    return one;
  }
  one.layout = p.product == TE_GROUPED_FPROP ? TE_GEMM_TN : TE_GEMM_NN;
  one.a = p.weights[g];
  one.d = rows_of(p.result, first, last);
  if (p.biases != nullptr) {
    one.epilogue = TE_GEMM_BIAS;
    one.bias = p.biases[g];
  }
  return one;
}

// The result is not wanted, has no element, or nothing is added to it.
bool is_skipped(const te_gemm_problem& one) {
  return one.d.data == nullptr || one.d.rows * one.d.cols == 0 || (one.accumulate != 0 && one.b.rows == 0);
}

void run_groups(const te_grouped_gemm_problem& p) {
  for (int32_t g = 0; g < p.groups; ++g) {
    const te_gemm_problem one = product_of(p, g);
    if (!is_skipped(one)) gemm::cpu::run(one, check_problem(one));
  }
}

}  // namespace

void run(const te_grouped_gemm_problem& p, const ProblemShape& shape) {
  check_offsets(p, shape);
  is_fp8(p.rows.dtype) ? run_fp8(p, shape) : run_groups(p);
  if (p.zero_tail == 0) return;
  const te_tensor tail = rows_of(p.result, p.offsets[p.groups], int32_t(shape.rows));
  const auto bytes = int64_t(te_dtype_bytes(tail.dtype));
  for (int64_t row = 0; row < tail.rows && tail.cols > 0; ++row) {
    std::memset(static_cast<char*>(tail.data) + row * tail.row_pitch * bytes, 0, size_t(tail.cols * bytes));
  }
}

void offsets(const Splits& s, int32_t* offsets, uint32_t* counters) {
  int64_t sum = 0, negatives = 0;
  offsets[0] = 0;
  for (int32_t g = 0; g < s.groups; ++g) {
    const int64_t split = split_at(s, g);
    negatives += split < 0;
    sum = add_splits(sum, live_split(split));
    offsets[g + 1] = int32_t(at_most(sum, s.rows));
  }
  if (counters == nullptr) return;
  counters[0] = add_count(counters[0], negatives);
  counters[1] = add_count(counters[1], std::max<int64_t>(sum - s.rows, 0));
}

}  // namespace cpu

}  // namespace te::gemm::grouped

namespace te::gemm::grouped {

namespace {
std::atomic<int32_t> most_sms{0};
}

int32_t sms_of(int32_t available) {
  const int32_t most = most_sms.load(std::memory_order_relaxed);
  return most == 0 ? available : std::min(most, available);
}

}  // namespace te::gemm::grouped

extern "C" {

te_status te_grouped_gemm_sms(int32_t most) {
  return te::c_guard([&] {
    if (most < 0) te::bad_argument("te_grouped_gemm_sms", "most", most, ">= 0");
    te::gemm::grouped::most_sms.store(most, std::memory_order_relaxed);
  });
}

te_status te_grouped_gemm(const te_grouped_gemm_problem* problem, te_stream stream) {
  return te::c_guard([&] {
    using namespace te::gemm;
    const grouped::ProblemShape shape = grouped::check(*problem);
    TE_ON_DEVICE_OF("te_grouped_gemm", problem->rows, grouped::cpu::run(*problem, shape),
                    grouped::cuda::run(*problem, shape, stream));
  });
}

te_status te_grouped_offsets(const void* splits, int splits_are_int64, int32_t groups, int64_t rows, int32_t device,
                             int32_t* offsets, uint32_t* counters, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    using namespace te::gemm;
    const char* op = "te_grouped_offsets";
    if (groups < 1) bad_argument(op, "groups", groups, ">= 1");
    if (rows < 0 || rows > INT32_MAX) bad_argument(op, "rows", rows, "in [0, 2^31)");
    if (splits == nullptr) bad_argument(op, "splits", "NULL", "int32 or int64 [groups] on `device`");
    if (offsets == nullptr) bad_argument(op, "offsets", "NULL", "int32 [groups + 1] on `device`");
    const grouped::Splits s{splits, splits_are_int64 != 0, groups, rows};
    const te_tensor where{nullptr, 0, 0, 0, TE_INT32, device};
    TE_ON_DEVICE_OF(op, where, grouped::cpu::offsets(s, offsets, counters),
                    grouped::cuda::offsets(s, offsets, counters, stream));
  });
}

te_status te_grouped_offsets_of(const int64_t* splits, int32_t groups, int32_t device, int32_t* offsets,
                                te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    using namespace te::gemm;
    const char* op = "te_grouped_offsets_of";
    if (groups < 1) bad_argument(op, "groups", groups, ">= 1");
    if (splits == nullptr) bad_argument(op, "splits", "NULL", "int64 [groups] on the host");
    if (offsets == nullptr) bad_argument(op, "offsets", "NULL", "int32 [groups + 1] on `device`");
    std::vector<int32_t> at(1, 0);
    at.reserve(size_t(groups) + 1);
    for (int32_t g = 0; g < groups; ++g) {
      if (splits[g] < 0) bad_argument(op, "splits", splits[g], ">= 0");
      const int64_t sum = grouped::add_splits(at.back(), grouped::live_split(splits[g]));
      if (sum > INT32_MAX) bad_argument(op, "splits", concat("with a sum of at least ", sum), "one below 2^31");
      at.push_back(int32_t(sum));
    }
    const te_tensor where{nullptr, 0, 0, 0, TE_INT32, device};
    TE_ON_DEVICE_OF(op, where, (void)std::copy(at.begin(), at.end(), offsets),
                    grouped::cuda::write_offsets(at.data(), groups + 1, offsets, stream));
  });
}

}  // extern "C"
