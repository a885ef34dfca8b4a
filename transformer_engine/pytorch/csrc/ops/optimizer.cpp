// The binding of the multi-tensor functions: ops over lists, their schemas and Meta functions. optimizer_step.cpp has
// the steps of whole optimizers.
#include "ops/optimizer.h"

#include <ATen/ops/empty.h>
#include <algorithm>

#include "core/op_registration.h"

namespace te_torch {

namespace {

using List = at::TensorList;

void bump_versions(List list) {
  for (const Tensor& t : list) bump_version(t);
}

void check_lengths(const char* op, const char* name, List list, List like) {
  TORCH_CHECK_VALUE(list.size() == like.size(), op, ": list '", name, "' has ", list.size(), " tensors, wanted ",
                    like.size(), " like the others.");
}

// Divides lists by dtypes and device: `go` is called with the tensors of each kind.
class Kinds {
 public:
  using Dtypes = std::array<te_dtype, TE_OPTIMIZER_LISTS>;
  struct Kind {
    at::Device device;
    Dtypes dtypes;
    std::vector<te_optimizer_tensor> tensors;
    const Tensor* any;
  };

  Kinds(const char* op, const std::vector<std::pair<const char*, List>>& lists) {
    for (const auto& [name, list] : lists) check_lengths(op, name, list, lists[0].second);
    for (size_t i = 0; i < lists[0].second.size(); ++i) {
      const Tensor& like = lists[0].second[i];
      Dtypes dtypes{};
      te_optimizer_tensor member{like.numel(), {}};
      for (size_t k = 0; k < lists.size(); ++k) {
        const Tensor& t = lists[k].second[i];
        member.data[k] = reinterpret_cast<void*>(memory_of(t, like, op, lists[k].first, int64_t(i)).begin);
        dtypes[k] = dtype_of(t, op, lists[k].first);
      }
      kind_of(like, dtypes).tensors.push_back(member);
    }
  }

  const std::vector<Kind>& all() const { return kinds_; }

 private:
  Kind& kind_of(const Tensor& like, const Dtypes& dtypes) {
    for (Kind& kind : kinds_) {
      if (kind.device == like.device() && kind.dtypes == dtypes) return kind;
    }
    kinds_.push_back({like.device(), dtypes, {}, &like});
    return kinds_.back();
  }

  std::vector<Kind> kinds_;
};

// `written` may not overlap other memory, except that a tensor of `read` may be that of the same index in `written`.
void check_overlaps(const char* op, const std::vector<std::pair<const char*, List>>& written,
                    const std::pair<const char*, List>& read, bool in_place) {
  std::vector<Span> writes, reads;
  for (const auto& [name, list] : written) {
    for (size_t i = 0; i < list.size(); ++i) {
      writes.push_back(written_memory_of(list[i], list[i], op, name, int64_t(i)));
    }
  }
  for (size_t i = 0; i < read.second.size(); ++i) {
    const Span span = memory_of(read.second[i], read.second[i], op, read.first, int64_t(i));
    if (!in_place || span.begin != writes[i].begin || span.end != writes[i].end) reads.push_back(span);
  }
  OverlapGuard().check(op, writes, reads);
}

// ---- Adam ----

void optimizer_adam(List grads, List params, List exp_avgs, List exp_avg_sqs, List masters, List fp8_scales,
                    List fp8_amaxes, List fp8_scale_invs, const OptionalTensor& noop, const OptionalTensor& lr_tensor,
                    const OptionalTensor& step_tensor, const OptionalTensor& inv_scale, const OptionalTensor& clip,
                    double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
                    bool decoupled, bool bias_correction, bool e5m2) {
  const char* op = "optimizer_adam";
  const bool fp8 = !fp8_scales.empty();
  for (const auto& [name, list] :
       {std::pair("param", params), std::pair("exp_avg", exp_avgs), std::pair("exp_avg_sq", exp_avg_sqs)}) {
    check_lengths(op, name, list, grads);
  }
  if (!masters.empty()) check_lengths(op, "master_param", masters, grads);
  if (fp8) {
    check_lengths(op, "scale", fp8_scales, grads);
    check_lengths(op, "amax", fp8_amaxes, grads);
    check_lengths(op, "scale_inv", fp8_scale_invs, grads);
  }
  AdamCalls calls(op);
  const Tensor none;
  const auto of = [&](List list, size_t i) -> const Tensor& { return list.empty() ? none : list[i]; };
  for (size_t i = 0; i < grads.size(); ++i) {
    calls.add({grads[i], params[i], exp_avgs[i], exp_avg_sqs[i], of(masters, i), none, none, none, of(fp8_scales, i),
               of(fp8_amaxes, i), of(fp8_scale_invs, i), e5m2, at::kFloat},
              int64_t(i));
  }
  OverlapGuard().check(op, calls.written(), calls.read());
  calls.run({lr, beta1, beta2, eps, weight_decay, step, decoupled, bias_correction, noop, lr_tensor, step_tensor,
             inv_scale, clip});
}

// ---- SGD ----

void optimizer_sgd(List grads, List params, List momentums, List copies, const OptionalTensor& noop, double lr,
                   double weight_decay, double momentum, double dampening, bool nesterov, bool first_run,
                   bool decay_after_momentum, double scale) {
  const char* op = "optimizer_sgd";
  const bool has_momentum = momentum != 0.0, has_copy = !copies.empty();
  std::vector<std::pair<const char*, List>> lists{{"grad", grads}, {"param", params}};
  lists.push_back({"momentum", has_momentum ? momentums : params});  // a placeholder without momentum
  if (has_copy) lists.push_back({"copy", copies});
  const Kinds kinds(op, lists);
  std::vector<std::pair<const char*, List>> written{{"param", params}};
  if (has_momentum) written.push_back({"momentum", momentums});
  if (has_copy) written.push_back({"copy", copies});
  check_overlaps(op, written, {"grad", grads}, false);
  const auto run = [&](const Kinds::Kind& kind, bool really) {
    te_sgd_plan plan{};
    plan.lr = lr;
    plan.weight_decay = weight_decay;
    plan.momentum = momentum;
    plan.dampening = dampening;
    plan.scale = scale;
    plan.nesterov = nesterov;
    plan.first_run = first_run;
    plan.decay_after_momentum = decay_after_momentum;
    plan.has_copy = has_copy;
    plan.grad = kind.dtypes[0];
    plan.param = kind.dtypes[1];
    plan.momentum_buffer = kind.dtypes[2];
    if (has_copy) plan.copy = kind.dtypes[3];
    plan.noop = one_of(noop, op, "noop_flag");
    check(te_optimizer_sgd(&plan, kind.tensors.data(), really ? int64_t(kind.tensors.size()) : 0, ordinal(kind.device),
                           current_stream(*kind.any)));
  };
  for (const auto& kind : kinds.all()) run(kind, false);  // checks all calls before the first one runs
  for (const auto& kind : kinds.all()) run(kind, true);
  for (const auto& [name, list] : written) bump_versions(list);
}

// ---- scaling ----

void optimizer_scale(List inputs, List outputs, const OptionalTensor& noop, double scale,
                     const OptionalTensor& scale_tensor) {
  const char* op = "optimizer_scale";
  const Kinds kinds(op, {{"in", inputs}, {"out", outputs}});
  check_overlaps(op, {{"out", outputs}}, {"in", inputs}, true);
  const auto run = [&](const Kinds::Kind& kind, bool really) {
    te_scale_plan plan{};
    plan.scale = scale;
    plan.scale_device = one_of(scale_tensor, op, "scale");
    plan.in = kind.dtypes[0];
    plan.out = kind.dtypes[1];
    plan.noop = one_of(noop, op, "noop_flag");
    check(te_optimizer_scale(&plan, kind.tensors.data(), really ? int64_t(kind.tensors.size()) : 0,
                             ordinal(kind.device), current_stream(*kind.any)));
  };
  for (const auto& kind : kinds.all()) run(kind, false);
  for (const auto& kind : kinds.all()) run(kind, true);
  bump_versions(outputs);
  if (noop.has_value()) bump_version(*noop);
}

// ---- norms ----

std::tuple<Tensor, Tensor> norm_results(const Tensor& like, int64_t count, bool per_tensor) {
  const auto floats = like.options().dtype(at::kFloat);
  return {at::empty({1}, floats), at::empty({per_tensor ? count : 0}, floats)};
}

std::tuple<Tensor, Tensor> optimizer_l2norm(List tensors, const OptionalTensor& noop, const OptionalTensor& inv_scale,
                                            bool per_tensor) {
  const char* op = "optimizer_l2norm";
  const bool any = !tensors.empty();
  TORCH_CHECK_VALUE(any || noop.has_value(), op,
                    ": list 'tensors' is empty and 'noop_flag' is None, wanted at least one of them.");
  const Tensor& like = any ? tensors[0] : *noop;
  std::vector<te_optimizer_tensor> members;
  std::vector<int64_t> chunks;
  int64_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    const Span span = memory_of(t, t, op, "tensors", int64_t(i));
    check_float(t, op, "tensors");
    TORCH_CHECK_VALUE(t.device() == like.device(), op, ": 'tensors' ", i, " is on ", t.device(), ", wanted ",
                      like.device(), " like the first one.");
    members.push_back({t.numel(), {reinterpret_cast<void*>(span.begin)}});
    chunks.push_back((t.numel() + TE_OPTIMIZER_NORM_CHUNK - 1) / TE_OPTIMIZER_NORM_CHUNK);
    total += chunks.back();
  }
  const auto count = int64_t(members.size());
  const auto [norm, each] = norm_results(like, count, per_tensor);
  const Tensor partials = at::empty({total}, like.options().dtype(at::kDouble));
  auto* sums = static_cast<double*>(partials.data_ptr());
  const te_tensor factor = one_of(inv_scale, op, "inv_scale");
  const te_stream stream = current_stream(like);
  for (size_t first = 0; first < members.size();) {  // runs of one dtype
    const auto dtype = tensors[first].scalar_type();
    size_t last = first;
    int64_t sums_of_run = 0;
    for (; last < members.size() && tensors[last].scalar_type() == dtype; ++last) sums_of_run += chunks[last];
    if (sums_of_run != 0) {
      check(te_optimizer_square_sums(members.data() + first, int64_t(last - first),
                                     dtype_of(tensors[first], op, "tensors"), factor, sums, ordinal(like.device()),
                                     stream));
    }
    sums += sums_of_run;
    first = last;
  }
  check(te_optimizer_norm(static_cast<const double*>(partials.data_ptr()), chunks.data(), count,
                          view_2d(norm, op, "norm"), per_tensor ? view_2d(each, op, "per_tensor") : absent(),
                          one_of(noop, op, "noop_flag"), stream));
  if (noop.has_value()) bump_version(*noop);
  return {norm, each};
}

// ---- FP8 scales ----

void optimizer_compute_scales(List amaxes, List scales, List scale_invs, double max_fp8, bool pow_2_scales,
                              double epsilon) {
  const char* op = "optimizer_compute_scales";
  const Kinds kinds(op, {{"amax", amaxes}, {"scale", scales}, {"scale_inv", scale_invs}});
  check_overlaps(op, {{"scale", scales}, {"scale_inv", scale_invs}}, {"amax", amaxes}, false);
  for (const auto& kind : kinds.all()) {
    const bool floats = std::count(kind.dtypes.begin(), kind.dtypes.begin() + 3, TE_FLOAT32) == 3;
    TORCH_CHECK_VALUE(floats, op, ": the lists have other dtypes, wanted float32 amaxes, scales and inverse scales.");
  }
  for (const auto& kind : kinds.all()) {
    check(te_optimizer_compute_scales(kind.tensors.data(), int64_t(kind.tensors.size()), float(max_fp8), pow_2_scales,
                                      float(epsilon), ordinal(kind.device), current_stream(*kind.any)));
  }
  bump_versions(scales);
  bump_versions(scale_invs);
}

void optimizer_count_step(const Tensor& step, const OptionalTensor& noop) {
  const char* op = "optimizer_count_step";
  check(te_optimizer_count_step(one_of(step, op, "step"), one_of(noop, op, "noop_flag"), current_stream(step)));
  bump_version(step);
}

// ---- Meta functions: shapes alone ----

void adam_meta(List, List, List, List, List, List, List, List, const OptionalTensor&, const OptionalTensor&,
               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double, double, double, double,
               double, c10::SymInt, bool, bool, bool) {}
void sgd_meta(List, List, List, List, const OptionalTensor&, double, double, double, double, bool, bool, bool, double) {
}
void scale_meta(List, List, const OptionalTensor&, double, const OptionalTensor&) {}
std::tuple<Tensor, Tensor> l2norm_meta(List tensors, const OptionalTensor& noop, const OptionalTensor&,
                                       bool per_tensor) {
  return norm_results(tensors.empty() ? *noop : tensors[0], int64_t(tensors.size()), per_tensor);
}
void compute_scales_meta(List, List, List, double, bool, double) {}
void count_step_meta(const Tensor&, const OptionalTensor&) {}

}  // namespace

TE_OP_REGISTRATION(optimizer, ops) {
  using Tensors = std::vector<Tensor>;
  ops.op("optimizer_adam(Tensor(a!)[] grads, Tensor(b!)[] params, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
         "Tensor(e!)[] masters, Tensor[] fp8_scales, Tensor(f!)[] fp8_amaxes, Tensor(g!)[] fp8_scale_invs, Tensor? "
         "noop, Tensor? lr_tensor, Tensor? step_tensor, Tensor? inv_scale, Tensor? clip, float lr, float beta1, float "
         "beta2, float eps, float weight_decay, SymInt step, bool decoupled, bool bias_correction, bool e5m2) -> ()")
      .kernel(optimizer_adam)
      .meta(adam_meta)
      .python([](const Tensors& grads, const Tensors& params, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
                 const Tensors& masters, const Tensors& fp8_scales, const Tensors& fp8_amaxes,
                 const Tensors& fp8_scale_invs, const OptionalTensor& noop, const OptionalTensor& lr_tensor,
                 const OptionalTensor& step_tensor, const OptionalTensor& inv_scale, const OptionalTensor& clip,
                 double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step, bool decoupled,
                 bool bias_correction, bool e5m2) {
        optimizer_adam(grads, params, exp_avgs, exp_avg_sqs, masters, fp8_scales, fp8_amaxes, fp8_scale_invs, noop,
                       lr_tensor, step_tensor, inv_scale, clip, lr, beta1, beta2, eps, weight_decay, step, decoupled,
                       bias_correction, e5m2);
      });
  ops.op("optimizer_sgd(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] momentums, Tensor(c!)[] copies, Tensor? "
         "noop, float lr, float weight_decay, float momentum, float dampening, bool nesterov, bool first_run, bool "
         "decay_after_momentum, float scale) -> ()")
      .kernel(optimizer_sgd)
      .meta(sgd_meta)
      .python([](const Tensors& grads, const Tensors& params, const Tensors& momentums, const Tensors& copies,
                 const OptionalTensor& noop, double lr, double weight_decay, double momentum, double dampening,
                 bool nesterov, bool first_run, bool decay_after_momentum, double scale) {
        optimizer_sgd(grads, params, momentums, copies, noop, lr, weight_decay, momentum, dampening, nesterov,
                      first_run, decay_after_momentum, scale);
      });
  ops.op("optimizer_scale(Tensor[] inputs, Tensor(a!)[] outputs, Tensor(b!)? noop, float scale, Tensor? scale_tensor) "
         "-> ()")
      .kernel(optimizer_scale)
      .meta(scale_meta)
      .python([](const Tensors& inputs, const Tensors& outputs, const OptionalTensor& noop, double scale,
                 const OptionalTensor& scale_tensor) { optimizer_scale(inputs, outputs, noop, scale, scale_tensor); });
  ops.op("optimizer_l2norm(Tensor[] tensors, Tensor(a!)? noop, Tensor? inv_scale, bool per_tensor) -> (Tensor, "
         "Tensor)")
      .kernel(optimizer_l2norm)
      .meta(l2norm_meta)
      .python([](const Tensors& tensors, const OptionalTensor& noop, const OptionalTensor& inv_scale, bool per_tensor) {
        return optimizer_l2norm(tensors, noop, inv_scale, per_tensor);
      });
  ops.op("optimizer_compute_scales(Tensor[] amaxes, Tensor(a!)[] scales, Tensor(b!)[] scale_invs, float max_fp8, bool "
         "pow_2_scales, float epsilon) -> ()")
      .kernel(optimizer_compute_scales)
      .meta(compute_scales_meta)
      .python(
          [](const Tensors& amaxes, const Tensors& scales, const Tensors& scale_invs, double max_fp8, bool pow_2_scales,
             double epsilon) { optimizer_compute_scales(amaxes, scales, scale_invs, max_fp8, pow_2_scales, epsilon); });
  ops.op("optimizer_count_step(Tensor(a!) step, Tensor? noop) -> ()")
      .kernel(optimizer_count_step)
      .meta(count_step_meta)
      .python(optimizer_count_step);
}

}  // namespace te_torch
