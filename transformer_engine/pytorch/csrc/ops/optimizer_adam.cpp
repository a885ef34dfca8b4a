// See optimizer.h: the lists of Adam.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "ops/optimizer.h"

namespace te_torch {

namespace {

// Bytes from a tensor's first element to the end of its last one.
int64_t extent(const Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return (last + 1) * t.element_size();
}

uint64_t mixed(uint64_t seen, const std::vector<Span>& spans) {
  for (const Span& span : spans) {
    seen = (seen ^ span.begin) * 0x9e3779b97f4a7c15u;
    seen = (seen ^ (seen >> 29) ^ span.end) * 0xbf58476d1ce4e5b9u;
  }
  return seen | 1;  // never 0, which marks an empty state
}

[[noreturn]] void overlap(const char* op, const Span& a, const Span& b) {
  TORCH_CHECK_VALUE(false, op, ": '", a.list, "' ", a.index, " and '", b.list, "' ", b.index,
                    " overlap in memory, wanted separate memory; clone() one of them.");
}

}  // namespace

te_tensor one_of(const OptionalTensor& t, const char* op, const char* argument) {
  if (!t.has_value() || !t->defined()) return absent();
  TORCH_CHECK_VALUE(t->numel() == 1, op, ": argument '", argument, "' has shape ", t->sizes(), ", wanted one element.");
  te_tensor view = view_2d(*t, op, argument);
  view.rows = view.cols = view.row_pitch = 1;
  return view;
}

void OverlapGuard::check(const char* op, const std::vector<Span>& written, const std::vector<Span>& read) {
  const uint64_t written_now = mixed(17, written), read_now = mixed(written_now, read);
  if (read_now == read_seen_ && written_now == written_seen_) return;
  if (written_now != written_seen_) {
    written_seen_ = 0;
    sorted_.clear();
    for (const Span& span : written) {
      if (span.begin != span.end) sorted_.push_back(span);
    }
    std::sort(sorted_.begin(), sorted_.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < sorted_.size(); ++i) {
      if (sorted_[i].begin < sorted_[i - 1].end) overlap(op, sorted_[i - 1], sorted_[i]);
    }
    written_seen_ = written_now;
  }
  read_seen_ = 0;
  for (const Span& span : read) {
    if (span.begin == span.end) continue;
    const auto next = std::lower_bound(sorted_.begin(), sorted_.end(), span.end,
                                       [](const Span& a, uintptr_t end) { return a.begin < end; });
    if (next != sorted_.begin() && (next - 1)->end > span.begin) overlap(op, *(next - 1), span);
  }
  read_seen_ = read_now;
}

namespace {

// A fast path: true for nearly every tensor, which then needs none of the checks below.
bool is_plain(const Tensor& t, const Tensor& like) {
  const at::TensorImpl *a = t.unsafeGetTensorImpl(), *b = like.unsafeGetTensorImpl();
  return a->layout() == at::kStrided && a->device() == b->device() && (a->is_cpu() || a->is_cuda()) &&
         a->numel() == b->numel() && a->is_contiguous() && b->is_contiguous() && a->has_storage() &&
         a->unsafe_storage().nbytes() >= size_t(a->storage_offset() + a->numel()) * a->itemsize();
}

void check_member(const Tensor& t, const Tensor& like, const char* op, const char* list, int64_t index) {
  TORCH_CHECK_VALUE(t.defined(), op, ": '", list, "' ", index, " is None, wanted a tensor.");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, op, ": '", list, "' ", index, " has layout ", t.layout(),
                    ", wanted a dense tensor; call .to_dense(), or take an optimizer for sparse gradients.");
  TORCH_CHECK_VALUE(t.is_cpu() || t.is_cuda(), op, ": '", list, "' ", index, " is on ", t.device(),
                    ", wanted the CPU or a CUDA device.");
  TORCH_CHECK_VALUE(t.device() == like.device(), op, ": '", list, "' ", index, " is on ", t.device(), ", wanted ",
                    like.device(), " like its parameter.");
  TORCH_CHECK_VALUE(t.has_storage(), op, ": '", list, "' ", index, " is a ", t.toString(),
                    " without memory of its own, wanted a plain tensor.");
  const bool alike = t.sizes() == like.sizes() && t.strides() == like.strides() && t.is_non_overlapping_and_dense();
  TORCH_CHECK_VALUE(alike || (t.numel() == like.numel() && t.is_contiguous() && like.is_contiguous()), op, ": '", list,
                    "' ", index, " has shape ", t.sizes(), " and strides ", t.strides(), ", wanted ", like.sizes(),
                    " and ", like.strides(), ", without gaps; call .contiguous().");
  TORCH_CHECK_VALUE(
      t.numel() == 0 || int64_t(t.storage().nbytes()) >= t.storage_offset() * int64_t(t.element_size()) + extent(t), op,
      ": '", list, "' ", index, " has no memory (its storage of ", t.storage().nbytes(), " bytes was freed), wanted ",
      t.numel(), " elements.");
}

// A tensor class that must not be written to has the method _why_not_written: tensor/values_view.py.
void check_writable(const Tensor& t, const char* op, const char* list, int64_t index) {
  const pybind11::gil_scoped_acquire gil;
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(t));
  if (!pybind11::hasattr(object, "_why_not_written")) return;
  const auto reason = pybind11::cast<std::string>(object.attr("_why_not_written")());
  TORCH_CHECK_VALUE(false, op, ": '", list, "' ", index, " ", reason);
}

}  // namespace

Span memory_of(const Tensor& t, const Tensor& like, const char* op, const char* list, int64_t index) {
  if (!t.defined() || !is_plain(t, like)) check_member(t, like, op, list, index);
  check_in_memory(t, op, list);
  const at::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (impl->numel() == 0) return {0, 0, list, index};
  const auto begin = reinterpret_cast<uintptr_t>(impl->data());
  TORCH_CHECK_VALUE(
      begin != 0, op, ": '", list, "' ", index, " is a ", t.toString(),
      " without memory of its own, wanted a plain tensor; create the optimizer again where parameters were ",
      "swapped for others.");
  return {begin, begin + uintptr_t(impl->numel()) * impl->itemsize(), list, index};
}

Span written_memory_of(const Tensor& t, const Tensor& like, const char* op, const char* list, int64_t index) {
  if (t.defined() && t.key_set().has(c10::DispatchKey::Python)) check_writable(t, op, list, index);
  return memory_of(t, like, op, list, index);
}

namespace {

te_dtype moment_dtype(const Tensor& t, const char* op, const char* list) {
  if (t.scalar_type() == at::kByte) return TE_FLOAT8_E4M3;
  return dtype_of(t, op, list);
}

te_master master_of(const Tensor& master, const char* op) {
  if (!master.defined()) return TE_MASTER_NONE;
  switch (master.scalar_type()) {
    case at::kFloat:
      return TE_MASTER_FLOAT32;
    case at::kHalf:
      return TE_MASTER_FLOAT16;
    case at::kShort:
      return TE_MASTER_REMAINDER;
    default:
      TORCH_CHECK_VALUE(false, op, ": 'master_param' has dtype ", master.scalar_type(),
                        ", wanted float32, float16 with scales, or int16 remainders.");
  }
}

bool is_scaled(const Tensor& t) {
  return t.defined() && (t.scalar_type() == at::kHalf || t.scalar_type() == at::kByte);
}

float* floats_of(const Tensor& t, int64_t numel, const Tensor& like, const char* op, const char* list) {
  TORCH_CHECK_VALUE(
      t.scalar_type() == at::kFloat && t.numel() >= numel && t.is_contiguous() && t.device() == like.device(), op,
      ": the scale of '", list, "' is ", t.scalar_type(), " of shape ", t.sizes(), " on ", t.device(),
      ", wanted float32 of ", numel, " on ", like.device(), ".");
  return static_cast<float*>(t.data_ptr());
}

}  // namespace

AdamCalls::Call& AdamCalls::call_of(const te_adam_plan& plan, const Tensor& param) {
  for (auto call = calls_.rbegin(); call != calls_.rend(); ++call) {
    const te_adam_plan& p = call->plan;
    if (call->any.device() == param.device() && p.grad == plan.grad && p.param == plan.param &&
        p.rounding == plan.rounding && p.exp_avg == plan.exp_avg && p.exp_avg_sq == plan.exp_avg_sq &&
        p.master == plan.master) {
      return *call;
    }
  }
  calls_.push_back({plan, param, {}, {}});
  return calls_.back();
}

void AdamCalls::add(const AdamEntry& e, int64_t index) {
  for (const auto& [t, list] : {std::pair(&e.grad, "grad"), std::pair(&e.param, "param"),
                                std::pair(&e.exp_avg, "exp_avg"), std::pair(&e.exp_avg_sq, "exp_avg_sq")}) {
    TORCH_CHECK_VALUE(t->defined(), op_, ": '", list, "' ", index, " is None, wanted a tensor.");
  }
  te_adam_plan plan{};
  plan.grad = dtype_of(e.grad, op_, "grad");
  const bool fp8 = e.fp8_scale.defined();
  plan.param = fp8 ? (e.e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3) : dtype_of(e.param, op_, "param");
  plan.rounding = e.rounding == at::kBFloat16 ? TE_BFLOAT16 : e.rounding == at::kHalf ? TE_FLOAT16 : TE_FLOAT32;
  plan.exp_avg = moment_dtype(e.exp_avg, op_, "exp_avg");
  plan.exp_avg_sq = moment_dtype(e.exp_avg_sq, op_, "exp_avg_sq");
  plan.master = master_of(e.master, op_);
  TORCH_CHECK_VALUE(plan.master != TE_MASTER_REMAINDER || (!fp8 && plan.param == TE_BFLOAT16), op_, ": 'param' ", index,
                    " is ", e.param.scalar_type(), ", wanted bfloat16: its 'master_param' is a remainder of one; make ",
                    "its state again where its dtype has changed.");
  TORCH_CHECK_VALUE(!fp8 || e.master.defined(), op_, ": 'master_param' ", index, " is None beside an FP8 weight, ",
                    "wanted float32 or float16, as small updates of FP8 values would be lost.");
  // An FP8 weight's bytes may have a pitch: the layout of a state is the reference for all other tensors.
  const Tensor& like = fp8 ? e.exp_avg : e.param;
  te_optimizer_tensor tensor{e.param.numel(), {}};
  const auto take = [&](int list, const Span& span, std::vector<Span>& spans) {
    spans.push_back(span);
    tensor.data[list] = reinterpret_cast<void*>(span.begin);
  };
  const auto written = [&](int list, const Tensor& t, const char* name) {
    take(list, written_memory_of(t, like, op_, name, index), written_);
  };
  if (!fp8) written(1, e.param, "param");
  take(0, memory_of(e.grad, like, op_, "grad", index), read_);
  written(2, e.exp_avg, "exp_avg");
  written(3, e.exp_avg_sq, "exp_avg_sq");
  if (e.master.defined()) written(4, e.master, "master_param");
  Call& call = call_of(plan, e.param);
  if (fp8) {
    const te_tensor bytes = bytes_of(e.param, like, index);
    tensor.data[1] = bytes.data;
    const auto begin = reinterpret_cast<uintptr_t>(bytes.data);
    written_.push_back({begin, begin + uintptr_t(extent(e.param)), "param", index});
  }
  if (fp8 || is_scaled(e.exp_avg) || is_scaled(e.exp_avg_sq) || plan.master == TE_MASTER_FLOAT16) {
    call.scales.push_back(scales_of(e, like));
  }
  call.tensors.push_back(tensor);
  params_.push_back(e.param);
  grads_.push_back(e.grad);
}

te_tensor AdamCalls::bytes_of(const Tensor& param, const Tensor& like, int64_t index) const {
  TORCH_CHECK_VALUE(param.element_size() == 1 && param.sizes() == like.sizes() && param.device() == like.device(), op_,
                    ": 'param' ", index, " is ", param.scalar_type(), " of shape ", param.sizes(), " on ",
                    param.device(), ", wanted uint8 of shape ", like.sizes(), " on ", like.device(),
                    ": it has a scale.");
  TORCH_CHECK_VALUE(rows_of(param).is_same(param), op_, ": 'param' ", index, " has strides ", param.strides(),
                    ", wanted rows of bytes at one pitch.");
  TORCH_CHECK_VALUE(int64_t(param.storage().nbytes()) >= param.storage_offset() + extent(param), op_, ": 'param' ",
                    index, " has no memory, its storage was freed; allocate it again first.");
  return view_2d(param, op_, "param");
}

te_adam_scales AdamCalls::scales_of(const AdamEntry& e, const Tensor& like) const {
  const auto pair = [&](const Tensor& t, const Tensor& scale, const char* list) -> float* {
    if (!is_scaled(t)) return nullptr;
    TORCH_CHECK_VALUE(scale.defined(), op_, ": '", list, "' has dtype ", t.scalar_type(),
                      " but no scale, wanted float32 or bfloat16; FusedAdam keeps scaled states.");
    return floats_of(scale, 2, like, op_, list);
  };
  te_adam_scales scales{};
  scales.exp_avg = pair(e.exp_avg, e.exp_avg_pair, "exp_avg");
  scales.exp_avg_sq = pair(e.exp_avg_sq, e.exp_avg_sq_pair, "exp_avg_sq");
  scales.master = pair(e.master, e.master_pair, "master_param");
  if (!e.fp8_scale.defined()) return scales;
  scales.fp8_scale = floats_of(e.fp8_scale, 1, like, op_, "scale");
  scales.fp8_amax = floats_of(e.fp8_amax, 1, like, op_, "amax");
  scales.fp8_scale_inv = floats_of(e.fp8_scale_inv, 1, like, op_, "scale_inv");
  scales.fp8_cols = e.param.dim() == 0 ? 1 : e.param.size(-1);
  scales.fp8_row_pitch = view_2d(e.param, op_, "param").row_pitch;
  return scales;
}

void AdamCalls::run(const AdamOptions& o) const {
  const auto plan_of = [&](const Call& call) {
    te_adam_plan plan = call.plan;
    plan.lr = o.lr;
    plan.beta1 = o.beta1;
    plan.beta2 = o.beta2;
    plan.eps = o.eps;
    plan.weight_decay = o.weight_decay;
    plan.step = o.step;
    plan.decoupled = o.decoupled;
    plan.bias_correction = o.bias_correction;
    plan.noop = one_of(o.noop, op_, "noop_flag");
    plan.lr_device = one_of(o.lr_tensor, op_, "lr");
    plan.step_device = one_of(o.step_tensor, op_, "step");
    plan.inv_scale = one_of(o.inv_scale, op_, "inv_scale");
    plan.clip = one_of(o.clip, op_, "clip");
    return plan;
  };
  const auto step = [&](const Call& call, int64_t count) {
    const te_adam_plan plan = plan_of(call);
    check(te_optimizer_adam(&plan, call.tensors.data(), call.scales.empty() ? nullptr : call.scales.data(), count,
                            ordinal(call.any.device()), current_stream(call.any)));
  };
  for (const Call& call : calls_) step(call, 0);  // checks all calls before the first one runs
  for (const Call& call : calls_) step(call, int64_t(call.tensors.size()));
  for (const Tensor& t : params_) bump_version(t);  // states are in no graph
  if (o.inv_scale.has_value() && o.inv_scale->defined()) {
    for (const Tensor& t : grads_) bump_version(t);
  }
}

}  // namespace te_torch
