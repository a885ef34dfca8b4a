// gemm, contract: the checks of a problem and the C API. gemm_cpu.cpp and gemm.cu compute.
#include "transformer_engine/gemm.h"

#include "core/device.h"
#include "core/tensor.h"
#include "ops/gemm/gemm_fp8.h"

namespace te::gemm {

GemmShape check_problem(const te_gemm_problem& p) {
  const char* op = "te_gemm";
  check_tensor(op, "a", p.a);
  check_tensor(op, "b", p.b);
  const bool fp8 = is_fp8(p.a.dtype) || is_fp8(p.b.dtype);
  if (!fp8) {
    dispatch_float(p.a.dtype, op, "a", [](auto) {});
    check_like(op, "b", p.b, p.a);
    refuse_fp8_arguments(p);
  }
  const GemmShape s = gemm_shape(p);
  const int64_t k_of_b = p.layout == TE_GEMM_NT ? p.b.rows : p.b.cols;
  if (k_of_b != s.k) {
    bad_argument(op, "b", concat(shape_of(p.b), " for a ", shape_of(p.a), " in layout ", layout_name(p.layout)),
                 concat("a reduced dimension of ", s.k));
  }
  check_shape(op, "d", p.d, s.m, s.n);
  if (!fp8 && p.d.dtype != TE_FLOAT32) check_like(op, "d", p.d, p.a);
  if (p.d.device != p.a.device) bad_argument(op, "d", concat("on ", device_of(p.d)), device_of(p.a));
  if (int(p.epilogue) < TE_GEMM_NONE || int(p.epilogue) > TE_GEMM_BGRAD) {
    bad_argument(op, "epilogue", int(p.epilogue), "a te_gemm_epilogue");
  }
  if (fp8) check_fp8(p, s);
  const bool needs_bias = p.epilogue == TE_GEMM_BIAS || p.epilogue == TE_GEMM_BGRAD;
  const bool takes_bias = needs_bias || p.epilogue == TE_GEMM_GELU;
  const bool takes_aux = p.epilogue == TE_GEMM_GELU || p.epilogue == TE_GEMM_DGELU;
  if (!takes_bias && p.bias.data != nullptr) bad_argument(op, "bias", shape_of(p.bias), "none for this epilogue");
  if (!takes_aux && p.aux.data != nullptr) bad_argument(op, "aux", shape_of(p.aux), "none for this epilogue");
  if (needs_bias || (takes_bias && p.bias.data != nullptr)) {
    check_shape(op, "bias", p.bias, 1, p.epilogue == TE_GEMM_BGRAD ? s.m : s.n);
    if (fp8) check_fp8_bias(p);
    if (!fp8 && p.bias.dtype != p.a.dtype && p.bias.dtype != p.d.dtype) check_like(op, "bias", p.bias, p.a);
    if (p.bias.device != p.a.device) bad_argument(op, "bias", concat("on ", device_of(p.bias)), device_of(p.a));
  }
  if (p.epilogue == TE_GEMM_BGRAD && p.layout != TE_GEMM_NT) {
    bad_argument(op, "epilogue", concat("BGRAD with layout ", layout_name(p.layout)),
                 "layout NT, where b is a gradient");
  }
  if (takes_aux) {
    check_shape(op, "aux", p.aux, s.m, s.n);
    if (p.aux.dtype != p.d.dtype || p.aux.device != p.d.device) check_like(op, "aux", p.aux, p.d);
    if (p.accumulate) bad_argument(op, "accumulate", 1, "0 with a gelu epilogue");
  }
  if (p.whole_rows != 0 && (p.whole_rows < s.m || p.layout == TE_GEMM_NT || takes_aux || p.accumulate)) {
    bad_argument(op, "whole_rows", p.whole_rows,
                 "0, or at least d's rows in layout TN or NN, without aux or accumulate");
  }
  return s;
}

namespace {

[[noreturn]] void nothing_to_choose(const char* op) {
  bad_argument(op, "device", "the CPU", "a CUDA device: only cuBLASLt's algorithms can be chosen");
}

}  // namespace

}  // namespace te::gemm

extern "C" {

te_status te_gemm_workspace(const te_gemm_problem* problem, size_t* bytes) {
  return te::c_guard([&] {
    using namespace te;
    const gemm::GemmShape shape = gemm::check_problem(*problem);
    *bytes = 0;
    (void)shape;
    TE_ON_DEVICE_OF("te_gemm", problem->a, (void)0, *bytes = gemm::cuda::workspace(*problem, shape));
  });
}

te_status te_gemm_takes_runs(const te_gemm_problem* problem, int32_t* does, te_gemm_tile* tile) {
  return te::c_guard([&] {
    using namespace te;
    const gemm::GemmShape shape = gemm::check_problem(*problem);
    te_gemm_tile found{};
    *does = 1;
    (void)shape;
    TE_ON_DEVICE_OF("te_gemm_takes_runs", problem->a, (void)0, *does = gemm::cuda::takes_runs(*problem, shape, found));
    if (tile != nullptr) *tile = found;
  });
}

te_status te_gemm_splits(const te_gemm_problem* problem, int along_k, const int64_t* counts, int32_t number,
                         uint8_t* splits) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_gemm_splits";
    gemm::check_problem(*problem);
    if (number < 0) bad_argument(op, "number", number, ">= 0");
    for (int32_t i = 0; i < number; ++i) {
      if (counts[i] < 0) bad_argument(op, "counts", counts[i], ">= 0");
      splits[i] = 0;
    }
    TE_ON_DEVICE_OF(op, problem->a, (void)along_k,
                    gemm::cuda::splits_of(*problem, along_k != 0, counts, number, splits));
  });
}

te_status te_gemm(const te_gemm_problem* problem, void* workspace, size_t workspace_bytes, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const gemm::GemmShape shape = gemm::check_problem(*problem);
    TE_ON_DEVICE_OF("te_gemm", problem->a, gemm::cpu::run(*problem, shape),
                    gemm::cuda::run(*problem, shape, workspace, workspace_bytes, stream));
  });
}

te_status te_gemm_by_loop(const te_gemm_problem* problem) {
  return te::c_guard([&] {
    using namespace te;
    const gemm::GemmShape shape = gemm::check_problem(*problem);
    if (problem->a.device != TE_DEVICE_CPU) {
      bad_argument("te_gemm_by_loop", "a", concat("on ", device_of(problem->a)),
                   "the CPU: the plain loop reads host memory");
    }
    te_note_path("CPU loop", "");
    gemm::cpu::run_by(nullptr, *problem, shape);
  });
}

void te_set_cpu_gemm(te_cpu_gemm_hook hook) { te::gemm::cpu::install(hook); }

te_status te_gemm_key_of(const te_gemm_problem* problem, te_gemm_key* key) {
  return te::c_guard([&] {
    using namespace te;
    const gemm::GemmShape shape = gemm::check_problem(*problem);
    if (gemm::is_empty(shape)) bad_argument("te_gemm_key_of", "problem", shape_of(problem->d), "a product to compute");
    TE_ON_DEVICE_OF("te_gemm_key_of", problem->a, gemm::nothing_to_choose("te_gemm_key_of"),
                    *key = gemm::cuda::key_of(*problem, shape));
  });
}

te_status te_gemm_candidates(const te_gemm_key* key, int32_t most, te_gemm_choice* choices, int32_t* found) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_gemm_candidates";
    if (most < 1) bad_argument(op, "most", most, ">= 1");
    TE_ON_DEVICE_OF(op, *key, gemm::nothing_to_choose(op), *found = gemm::cuda::candidates(*key, most, choices));
  });
}

te_status te_gemm_choose(const te_gemm_key* keys, const te_gemm_choice* choices, int32_t count) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_gemm_choose";
    if (count == 0) return;
    for (int32_t i = 1; i < count; ++i) {
      if (keys[i].device != keys[0].device) {
        bad_argument(op, "keys", concat("of devices ", keys[0].device, " and ", keys[i].device), "keys of one device");
      }
    }
    TE_ON_DEVICE_OF(op, *keys, gemm::nothing_to_choose(op), gemm::cuda::choose(keys, choices, count));
  });
}

te_status te_gemm_forget_choices(void) {
  return te::c_guard([&] {
#if defined(TE_WITH_CUDA)
    te::gemm::cuda::forget_choices();
#endif
  });
}

te_status te_gemm_try(const te_gemm_key* key, const te_gemm_choice* choice, const te_gemm_operands* operands,
                      int32_t repeats, void* workspace, size_t workspace_bytes, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_gemm_try";
    TE_ON_DEVICE_OF(op, *key, gemm::nothing_to_choose(op),
                    gemm::cuda::try_choice(*key, *choice, *operands, repeats, workspace, workspace_bytes, stream));
  });
}

te_status te_gemm_library_version(int64_t* version) {
  return te::c_guard([&] {
#if defined(TE_WITH_CUDA)
    *version = te::gemm::cuda::library_version();
#else
    (void)version;
    te::no_cuda("te_gemm_library_version");
#endif
  });
}

}  // extern "C"
