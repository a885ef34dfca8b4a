// See permute.h.
#include "ops/permute.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/Exceptions.h>
#include <transformer_engine/permute.h>

#include "gemm/grouped_gemm.h"

namespace te_torch {

namespace {

constexpr const char* kPermute = "permute";
constexpr const char* kUnpermute = "unpermute";

// ---- checks, on sizes that may be symbolic ----

void check_dim(const Tensor& t, const char* op, const char* argument, int64_t dim, const char* wanted) {
  TORCH_CHECK_VALUE(t.dim() == dim, op, ": argument '", argument, "' has shape ", t.sym_sizes(), ", wanted ", wanted,
                    ".");
}

void check_integers(const Tensor& t, const char* op, const char* argument, at::ScalarType dtype, const Tensor& like) {
  TORCH_CHECK_VALUE(t.scalar_type() == dtype, op, ": argument '", argument, "' has dtype ", t.scalar_type(),
                    ", wanted ", dtype, ".");
  TORCH_CHECK_VALUE(t.device() == like.device(), op, ": argument '", argument, "' is on ", t.device(), ", wanted ",
                    like.device(), " like the input; move it with .to(device).");
}

c10::SymInt columns_of(const Tensor& map, bool of_mask) {
  return of_mask ? (map.sym_size(1) - 1) / 2 : map.sym_size(1);
}

// inp: on the map's device.
void check_map(const char* op, const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
               const OptionalTensor& pad_offsets) {
  check_dim(map, op, "map", 2, of_mask ? "[T, 2 E + 1]" : "[T, k]");
  check_integers(map, op, "map", at::kInt, inp);
  if (of_mask) {
    TORCH_CHECK_VALUE(map.sym_size(1) >= 3 && map.sym_size(1) % 2 == 1, op, ": argument 'map' has shape ",
                      map.sym_sizes(), ", wanted [T, 2 E + 1], as moe_permute returned it.");
  }
  if (probs.has_value()) {
    TORCH_CHECK_VALUE(
        probs->dim() == 2 && probs->sym_size(0) == map.sym_size(0) && probs->sym_size(1) == columns_of(map, of_mask),
        op, ": argument 'probs' has shape ", probs->sym_sizes(), ", wanted [", map.sym_size(0), ", ",
        columns_of(map, of_mask), "], as the map has it.");
    TORCH_CHECK_VALUE(probs->device() == inp.device(), op, ": argument 'probs' is on ", probs->device(), ", wanted ",
                      inp.device(), " like the input; move it with .to(device).");
  }
  if (!pad_offsets.has_value()) return;
  TORCH_CHECK_VALUE(of_mask, op, ": argument 'pad_offsets' is present, wanted none with a map of ids.");
  check_integers(*pad_offsets, op, "pad_offsets", at::kLong, inp);
  TORCH_CHECK_VALUE(pad_offsets->dim() == 1 && pad_offsets->sym_size(0) == columns_of(map, of_mask), op,
                    ": argument 'pad_offsets' has shape ", pad_offsets->sym_sizes(), ", wanted [",
                    columns_of(map, of_mask), "].");
}

void check_permute(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                   const OptionalTensor& pad_offsets, const OptionalTensor& scales, const c10::SymInt& rows) {
  check_dim(inp, kPermute, "inp", 2, "[T, H]");
  if (inp.scalar_type() != at::kByte) check_float(inp, kPermute, "inp");
  check_map(kPermute, inp, map, of_mask, probs, pad_offsets);
  TORCH_CHECK_VALUE(map.sym_size(0) == inp.sym_size(0), kPermute, ": argument 'map' has shape ", map.sym_sizes(),
                    ", wanted the map of ", inp.sym_size(0), " tokens.");
  TORCH_CHECK_VALUE(rows >= 0, kPermute, ": argument 'rows' is ", rows, ", wanted at least 0.");
  if (!probs.has_value()) return;
  TORCH_CHECK_VALUE(of_mask, kPermute, ": argument 'probs' is present, wanted none with a map of ids.");
  TORCH_CHECK_VALUE(probs->is_floating_point(), kPermute, ": argument 'probs' has dtype ", probs->scalar_type(),
                    ", wanted a float dtype.");
}

void check_unpermute(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                     const OptionalTensor& pad_offsets, const OptionalTensor& row_probs) {
  check_dim(inp, kUnpermute, "inp", 2, "[rows, H]");
  check_float(inp, kUnpermute, "inp");
  check_map(kUnpermute, inp, map, of_mask, probs, pad_offsets);
  if (probs.has_value()) check_float(*probs, kUnpermute, "probs");
  if (!row_probs.has_value()) return;
  TORCH_CHECK_VALUE(row_probs->dim() == 1 && row_probs->sym_size(0) == inp.sym_size(0), kUnpermute,
                    ": argument 'row_probs' has shape ", row_probs->sym_sizes(), ", wanted [", inp.sym_size(0), "].");
}

void check_gather(const Tensor& inp, const Tensor& source) {
  constexpr const char* kOp = "permute_gather";
  TORCH_CHECK_VALUE(inp.dim() == 1 || inp.dim() == 2, kOp, ": argument 'inp' has shape ", inp.sym_sizes(),
                    ", wanted [rows, H] or [rows].");
  check_dim(source, kOp, "source", 1, "[rows]");
  check_integers(source, kOp, "source", at::kInt, inp);
}

void check_mask(const Tensor& mask) {
  constexpr const char* kOp = "permute_mask_map";
  check_dim(mask, kOp, "routing_map", 2, "[T, E]");
  const auto dtype = mask.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kBool || dtype == at::kByte || dtype == at::kInt, kOp,
                    ": argument 'routing_map' has dtype ", dtype, ", wanted bool, uint8 or int32.");
}

// ---- tensors for the C API ----

// Of probabilities and masks, which kernels compare with 0: float64 as its bits, bool as bytes.
Tensor bits_of(const Tensor& t) {
  if (t.scalar_type() == at::kDouble) return t.view(at::kLong);
  return t.scalar_type() == at::kBool ? t.view(at::kByte) : t;
}

// Elements of any dtype that are only copied, as those of a dtype of the engine; of 16 bytes (complex128) as two.
Tensor copied_bits_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
    case at::kInt:
    case at::kLong:
    case at::kByte:
      return t;
    default:
      break;
  }
  switch (t.element_size()) {
    case 1:
      return t.view(at::kByte);
    case 2:
      return t.view(at::kHalf);
    case 4:
      return t.view(at::kInt);
    case 8:
      return t.view(at::kLong);
    default:
      return at::view_as_real(t).flatten(-2).view(at::kLong);
  }
}

OptionalTensor dense(const OptionalTensor& t) {
  return t.has_value() && t->defined() ? OptionalTensor(bits_of(rows_of(*t))) : std::nullopt;
}

// Holds copies until the launch.
class EngineMap {
 public:
  EngineMap(const Tensor& map, bool of_mask, const OptionalTensor& pad_offsets)
      : rows_(map.contiguous()), of_mask_(of_mask), pad_offsets_(dense(pad_offsets)) {}

  te_permute_map view(const char* op) const {
    return {view_2d(rows_, op, "map"), view_2d(pad_offsets_, op, "pad_offsets"), int32_t(of_mask_)};
  }

 private:
  Tensor rows_;
  bool of_mask_;
  OptionalTensor pad_offsets_;
};

Tensor workspace(int64_t rows, const Tensor& like) { return at::empty({rows}, like.options().dtype(at::kByte)); }

template <class Int>
Int padded_to_four(const Int& n) {
  return (n + 3) / 4 * 4;
}

}  // namespace

Tensor permute_mask_map(const Tensor& routing_map) {
  check_mask(routing_map);
  const Tensor mask = bits_of(rows_of(routing_map));
  const auto ints = mask.options().dtype(at::kInt);
  const int64_t tokens = mask.size(0), experts = mask.size(1);
  const Tensor map = at::empty({tokens, 2 * experts + 1}, ints);
  const Tensor counts = at::empty({(tokens + TE_PERMUTE_CHUNK - 1) / TE_PERMUTE_CHUNK, experts}, ints);
  constexpr const char* kOp = "permute_mask_map";
  check(te_permute_mask_map(view_2d(mask, kOp, "routing_map"), view_2d(map, kOp, "map"), view_2d(counts, kOp, "counts"),
                            current_stream(mask)));
  return map;
}

Tensor permute_mask_map_meta(const Tensor& routing_map) {
  check_mask(routing_map);
  return routing_map.new_empty_symint({routing_map.sym_size(0), 2 * routing_map.sym_size(1) + 1},
                                      routing_map.options().dtype(at::kInt));
}

namespace {
void check_ids(const char* op, const char* argument, const Tensor& ids, int64_t first, int64_t last) {
  check_dim(ids, op, argument, 2, "[T, k]");
  check_integers(ids, op, argument, at::kInt, ids);
  TORCH_CHECK_VALUE(first >= 0 && last > first && last <= first + TE_PERMUTE_MAX_EXPERTS && last <= INT32_MAX, op,
                    ": argument 'last_expert' is ", last, " for experts from ", first, " on, wanted 1 to ",
                    TE_PERMUTE_MAX_EXPERTS, " experts, from 0 on.");
}

// The part of the plan that both row maps have; experts [first, last).
te_permute_row_map_plan row_map_plan(const char* op, const char* name, const Tensor& ids, const Tensor& token_of_row,
                                     const Tensor& row_of_pair, const Tensor& offsets, int64_t first) {
  te_permute_row_map_plan plan{};
  plan.ids = view_2d(ids, op, name);
  plan.row_of_pair = view_2d(row_of_pair, op, "row_of_pair");
  plan.token_of_row = view_2d(token_of_row, op, "token_of_row");
  plan.offsets = view_2d(offsets, op, "offsets");
  plan.rows = token_of_row.size(0);
  plan.first_expert = int32_t(first);
  plan.last_expert = int32_t(first + offsets.size(0) - 1);
  return plan;
}

constexpr const char* kRouting = "permute_routing";

void check_routing(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last, const c10::SymInt& rows) {
  check_ids(kRouting, "chosen", chosen, first, last);
  check_float(probs, kRouting, "probs");
  TORCH_CHECK_VALUE(probs.dim() == 2 && probs.sym_size(0) == chosen.sym_size(0) && probs.sym_size(1) >= last, kRouting,
                    ": argument 'probs' has shape ", probs.sym_sizes(), ", wanted [", chosen.sym_size(0), ", ", last,
                    " experts or more].");
  TORCH_CHECK_VALUE(probs.device() == chosen.device(), kRouting, ": argument 'probs' is on ", probs.device(),
                    ", wanted ", chosen.device(), " like 'chosen'; move it with .to(device).");
  TORCH_CHECK_VALUE(rows >= 0, kRouting, ": argument 'rows' is ", rows, ", wanted at least 0.");
}

void check_counts(const Tensor& into, const Tensor& probs) {
  TORCH_CHECK_VALUE(into.dim() == 1 && into.size(0) == probs.size(1) && into.scalar_type() == at::kLong &&
                        into.is_contiguous() && into.device() == probs.device() && !into.requires_grad(),
                    kRouting, ": argument 'counts' is ", into.scalar_type(), " ", into.sizes(), " of strides ",
                    into.strides(), " on ", into.device(), ", wanted contiguous Long [", probs.size(1), "] on ",
                    probs.device(), ".");
}

void check_routing_bwd(const Tensor& grad, const Tensor& chosen, const Tensor& row_of_pair) {
  check_dim(grad, kRouting, "grad", 1, "[rows]");
  check_integers(chosen, kRouting, "chosen", at::kInt, grad);
  check_integers(row_of_pair, kRouting, "row_of_pair", at::kInt, grad);
}
}  // namespace

Routed permute_routing_fwd(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last,
                           c10::SymInt row_count, bool count) {
  return permute_routing_into(probs, chosen, first, last, row_count.expect_int(), count, Tensor(), Tensor());
}

Routed permute_routing_into(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last, int64_t rows,
                            bool count, const Tensor& into, const Tensor& zero) {
  check_routing(probs, chosen, first, last, rows);
  if (into.defined()) check_counts(into, probs);
  const Tensor ids = chosen.contiguous(), values = rows_of(probs);
  const Tensor token_of_row = at::empty({rows}, ids.options()), row_of_pair = at::empty(ids.sizes(), ids.options());
  const Tensor offsets = at::empty({last - first + 1}, ids.options()), row_probs = at::empty({rows}, values.options());
  const Tensor counts = into.defined() ? into : at::empty({values.size(1)}, ids.options().dtype(at::kLong));
  te_permute_row_map_plan plan = row_map_plan(kRouting, "chosen", ids, token_of_row, row_of_pair, offsets, first);
  plan.ascending = 1;
  plan.probs = view_2d(values, kRouting, "probs");
  plan.row_probs = view_2d(row_probs, kRouting, "row_probs");
  plan.tokens_per_expert = view_2d(counts, kRouting, "tokens_per_expert");
  if (count) {
    auto* const counters = static_cast<uint32_t*>(split_counters(ids.device()).mutable_data_ptr());
    plan.cut = counters + 1;
    plan.even = float(ids.numel()) * float(last - first) / float(values.size(1));
    if (plan.even > 0) plan.factor = reinterpret_cast<float*>(counters + 2);
  }
  if (zero.defined()) plan.zero = zero.mutable_data_ptr<float>();
  check(te_permute_row_map(&plan, current_stream(ids)));
  if (into.defined()) note_written(into);
  return {row_probs, token_of_row, row_of_pair, offsets, counts};
}

Routed permute_routing_fwd_meta(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last,
                                c10::SymInt rows, bool) {
  check_routing(probs, chosen, first, last, rows);
  return {probs.new_empty_symint({rows}), chosen.new_empty_symint({rows}), chosen.new_empty_symint(chosen.sym_sizes()),
          chosen.new_empty({last - first + 1}),
          chosen.new_empty_symint({probs.sym_size(1)}, chosen.options().dtype(at::kLong))};
}

Tensor permute_routing_bwd(const Tensor& grad, const Tensor& chosen, const Tensor& row_of_pair, c10::SymInt experts) {
  check_routing_bwd(grad, chosen, row_of_pair);
  const Tensor ids = chosen.contiguous(), map = row_of_pair.contiguous(), rows = grad.resolve_neg().contiguous();
  const Tensor out = at::empty({ids.size(0), experts.expect_int()}, grad.options());
  check(te_permute_row_probs_backward(view_2d(ids, kRouting, "chosen"), view_2d(map, kRouting, "row_of_pair"),
                                      view_2d(rows, kRouting, "grad"), view_2d(out, kRouting, "dprobs"),
                                      current_stream(grad)));
  return out;
}

Tensor permute_routing_bwd_meta(const Tensor& grad, const Tensor& chosen, const Tensor& row_of_pair,
                                c10::SymInt experts) {
  check_routing_bwd(grad, chosen, row_of_pair);
  return grad.new_empty_symint({chosen.sym_size(0), experts});
}

Maps permute_row_map(const Tensor& ids, int64_t first, int64_t last, c10::SymInt row_count, bool strict) {
  constexpr const char* kOp = "permute_row_map";
  check_ids(kOp, "ids", ids, first, last);
  const int64_t rows = row_count.expect_int();
  const Tensor dense_ids = ids.contiguous();
  const auto ints = ids.options();
  const Tensor token_of_row = at::empty({rows}, ints), row_of_pair = at::empty(ids.sizes(), ints);
  const Tensor offsets = at::empty({last - first + 1}, ints), panels = at::empty({1}, ints);
  te_permute_row_map_plan plan = row_map_plan(kOp, "ids", dense_ids, token_of_row, row_of_pair, offsets, first);
  plan.panels = view_2d(panels, kOp, "panels");
  plan.strict = strict;
  if (strict) plan.outside = static_cast<uint32_t*>(split_counters(ids.device()).mutable_data_ptr()) + 1;
  check(te_permute_row_map(&plan, current_stream(ids)));
  return {token_of_row, row_of_pair, offsets, panels};
}

Maps permute_row_map_meta(const Tensor& ids, int64_t first, int64_t last, c10::SymInt rows, bool) {
  check_ids("permute_row_map", "ids", ids, first, last);
  return {ids.new_empty_symint({rows}), ids.new_empty_symint(ids.sym_sizes()), ids.new_empty({last - first + 1}),
          ids.new_empty({1})};
}

namespace {
void check_chunks(const Tensor& sizes, const Tensor& order) {
  constexpr const char* kOp = "permute_chunk_map";
  check_dim(sizes, kOp, "split_sizes", 1, "[chunks]");
  check_integers(sizes, kOp, "split_sizes", at::kLong, sizes);
  check_integers(order, kOp, "sorted_index", at::kLong, sizes);
  TORCH_CHECK_VALUE(order.dim() == 1 && order.sym_size(0) == sizes.sym_size(0), kOp,
                    ": argument 'sorted_index' has shape ", order.sym_sizes(), ", wanted [", sizes.sym_size(0),
                    "], like split_sizes.");
}
}  // namespace

std::tuple<Tensor, Tensor> permute_chunk_map(const Tensor& sizes, const Tensor& order, c10::SymInt row_count,
                                             bool count) {
  check_chunks(sizes, order);
  constexpr const char* kOp = "permute_chunk_map";
  const int64_t rows = row_count.expect_int();
  const Tensor dense_sizes = sizes.contiguous(), dense_order = order.contiguous();
  const auto ints = sizes.options().dtype(at::kInt);
  const Tensor source = at::empty({rows}, ints), destination = at::empty({rows}, ints);
  const Tensor starts = at::empty({3, sizes.size(0) + 1}, sizes.options());
  const bool on_device = count && !sizes.is_cpu();  // on a CPU, contents that do not fit are errors
  void* const counters = on_device ? split_counters(sizes.device()).mutable_data_ptr() : nullptr;
  check(te_permute_chunk_map(view_2d(dense_sizes, kOp, "split_sizes"), view_2d(dense_order, kOp, "sorted_index"),
                             view_2d(source, kOp, "source"), view_2d(destination, kOp, "destination"),
                             view_2d(starts, kOp, "starts"), static_cast<uint32_t*>(counters), current_stream(sizes)));
  return {source, destination};
}

std::tuple<Tensor, Tensor> permute_chunk_map_meta(const Tensor& sizes, const Tensor& order, c10::SymInt rows, bool) {
  check_chunks(sizes, order);
  const auto ints = sizes.options().dtype(at::kInt);
  return {sizes.new_empty_symint({rows}, ints), sizes.new_empty_symint({rows}, ints)};
}

Permuted permute_fwd(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                     const OptionalTensor& pad_offsets, const OptionalTensor& scales, c10::SymInt row_count) {
  check_permute(inp, map, of_mask, probs, pad_offsets, scales, row_count);
  const int64_t rows = row_count.expect_int();
  const Tensor tokens = rows_of(inp), covered = workspace(rows, inp);
  const EngineMap engine_map(map, of_mask, pad_offsets);
  const OptionalTensor dense_probs = dense(probs), dense_scales = dense(scales);
  const Tensor out = at::empty({rows, inp.size(1)}, inp.options());
  const Tensor row_probs =
      at::empty({probs.has_value() ? rows : 0}, probs.has_value() ? probs->options() : inp.options().dtype(at::kFloat));
  const auto floats = inp.options().dtype(at::kFloat);
  const Tensor row_scales =
      scales.has_value() ? at::empty({scales->size(0), padded_to_four(rows)}, floats) : at::empty({0}, floats);
  te_permute_forward_plan plan{};
  plan.map = engine_map.view(kPermute);
  plan.inp = view_2d(tokens, kPermute, "inp");
  plan.out = view_2d(out, kPermute, "out");
  plan.probs = view_2d(dense_probs, kPermute, "probs");
  if (probs.has_value()) plan.out_probs = view_2d(bits_of(row_probs), kPermute, "row_probs");
  plan.scales = view_2d(dense_scales, kPermute, "scales");
  if (scales.has_value()) plan.out_scales = view_2d(row_scales, kPermute, "row_scales");
  plan.covered = view_2d(covered, kPermute, "covered");
  check(te_permute_forward(&plan, current_stream(inp)));
  return {out, row_probs, row_scales};
}

Permuted permute_fwd_meta(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                          const OptionalTensor& pad_offsets, const OptionalTensor& scales, c10::SymInt rows) {
  check_permute(inp, map, of_mask, probs, pad_offsets, scales, rows);
  const auto floats = inp.options().dtype(at::kFloat);
  return {inp.new_empty_symint({rows, inp.sym_size(1)}),
          probs.has_value() ? probs->new_empty_symint({rows}) : inp.new_empty({0}, floats),
          scales.has_value() ? inp.new_empty_symint({scales->sym_size(0), padded_to_four(rows)}, floats)
                             : inp.new_empty({0}, floats)};
}

Tensor permute_probs_bwd(const Tensor& grad, const Tensor& map, const OptionalTensor& pad_offsets) {
  check_dim(grad, kPermute, "grad", 1, "[rows]");
  check_map(kPermute, grad, map, true, std::nullopt, pad_offsets);
  const EngineMap engine_map(map, true, pad_offsets);
  const Tensor rows = bits_of(grad.resolve_neg().contiguous()),
               out = at::empty({map.size(0), (map.size(1) - 1) / 2}, grad.options());
  const te_permute_map view = engine_map.view(kPermute);
  check(te_permute_probs_backward(&view, view_2d(rows, kPermute, "grad"), view_2d(bits_of(out), kPermute, "dprobs"),
                                  current_stream(grad)));
  return out;
}

Tensor permute_probs_bwd_meta(const Tensor& grad, const Tensor& map, const OptionalTensor& pad_offsets) {
  check_map(kPermute, grad, map, true, std::nullopt, pad_offsets);
  return grad.new_empty_symint({map.sym_size(0), columns_of(map, true)});
}

Tensor unpermute_fwd(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                     const OptionalTensor& pad_offsets, const OptionalTensor& row_probs) {
  check_unpermute(inp, map, of_mask, probs, pad_offsets, row_probs);
  const Tensor rows = rows_of(inp);
  const EngineMap engine_map(map, of_mask, pad_offsets);
  const OptionalTensor dense_probs = dense(probs), dense_row_probs = dense(row_probs);
  const Tensor out = at::empty({map.size(0), inp.size(1)}, inp.options());
  te_permute_unpermute_plan plan{};
  plan.map = engine_map.view(kUnpermute);
  plan.inp = view_2d(rows, kUnpermute, "inp");
  plan.probs = view_2d(dense_probs, kUnpermute, "probs");
  plan.row_probs = view_2d(dense_row_probs, kUnpermute, "row_probs");
  plan.out = view_2d(out, kUnpermute, "out");
  check(te_permute_unpermute(&plan, current_stream(inp)));
  return out;
}

Tensor unpermute_fwd_meta(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                          const OptionalTensor& pad_offsets, const OptionalTensor& row_probs) {
  check_unpermute(inp, map, of_mask, probs, pad_offsets, row_probs);
  return inp.new_empty_symint({map.sym_size(0), inp.sym_size(1)});
}

std::tuple<Tensor, Tensor> unpermute_bwd(const Tensor& grad, const Tensor& map, bool of_mask, const OptionalTensor& inp,
                                         const Tensor& probs, const OptionalTensor& pad_offsets, c10::SymInt row_count,
                                         bool to_rows) {
  check_unpermute(grad, map, of_mask, probs, pad_offsets, std::nullopt);
  const int64_t rows = row_count.expect_int();
  const Tensor tokens = rows_of(grad), dense_probs = rows_of(probs), covered = workspace(to_rows ? rows : 0, grad);
  const OptionalTensor dense_inp = dense(inp);
  const EngineMap engine_map(map, of_mask, pad_offsets);
  const Tensor dinp = to_rows ? at::empty({rows, grad.size(1)}, grad.options()) : at::empty({0}, grad.options());
  const Tensor dprobs = inp.has_value() ? at::empty(probs.sizes(), probs.options()) : at::empty({0}, probs.options());
  te_permute_unpermute_backward_plan plan{};
  plan.map = engine_map.view(kUnpermute);
  plan.grad = view_2d(tokens, kUnpermute, "grad");
  plan.inp = view_2d(dense_inp, kUnpermute, "inp");
  plan.probs = view_2d(dense_probs, kUnpermute, "probs");
  if (to_rows) plan.dinp = view_2d(dinp, kUnpermute, "dinp");
  if (inp.has_value()) plan.dprobs = view_2d(dprobs, kUnpermute, "dprobs");
  plan.covered = view_2d(covered, kUnpermute, "covered");
  check(te_permute_unpermute_backward(&plan, current_stream(grad)));
  return {dinp, dprobs};
}

std::tuple<Tensor, Tensor> unpermute_bwd_meta(const Tensor& grad, const Tensor& map, bool of_mask,
                                              const OptionalTensor& inp, const Tensor& probs,
                                              const OptionalTensor& pad_offsets, c10::SymInt rows, bool to_rows) {
  check_unpermute(grad, map, of_mask, probs, pad_offsets, std::nullopt);
  return {to_rows ? grad.new_empty_symint({rows, grad.sym_size(1)}) : grad.new_empty({0}),
          inp.has_value() ? probs.new_empty_symint(probs.sym_sizes()) : probs.new_empty({0})};
}

Tensor permute_gather_fwd(const Tensor& inp, const Tensor& source) {
  check_gather(inp, source);
  constexpr const char* kOp = "permute_gather";
  const bool vector = inp.dim() == 1;
  const Tensor values = inp.resolve_conj(), from = source.contiguous();
  const Tensor rows = copied_bits_of(rows_of(vector ? values.unsqueeze(1) : values));
  const Tensor out =
      vector ? at::empty({source.size(0)}, inp.options()) : at::empty({source.size(0), inp.size(1)}, inp.options());
  check(te_permute_gather(view_2d(rows, kOp, "inp"), view_2d(from, kOp, "source"),
                          view_2d(copied_bits_of(vector ? out.unsqueeze(1) : out), kOp, "out"), current_stream(inp)));
  return out;
}

Tensor permute_gather_fwd_meta(const Tensor& inp, const Tensor& source) {
  check_gather(inp, source);
  return inp.dim() == 1 ? inp.new_empty_symint({source.sym_size(0)})
                        : inp.new_empty_symint({source.sym_size(0), inp.sym_size(1)});
}

}  // namespace te_torch
