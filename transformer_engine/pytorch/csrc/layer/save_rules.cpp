// See save_rules.h.
#include "layer/save_rules.h"

namespace te_torch::layer {

namespace {

constexpr SavedInfo kQuantizedWeight{"quantized weight", "the input's gradient is taken with it",
                                     "a copy of a parameter: quantizing it again"};
constexpr SavedInfo kMlpInput{"MLP input", "norm, first product and activation are recomputed from it",
                              "the sum or product that made it: te.checkpoint around the layer", true};

// A weight as a backward in high precision reads it: the parameter; where that is held in FP8 alone, what it means.
// Such a parameter is a subclass in eager mode; in a recomputed layer it is FP8 data.
Operand weight_values(const DispatchMode& dispatch, const Tensor& parameter, const Operand& read, bool own) {
  const bool subclass = dispatch.direct() && parameter.key_set().has(c10::DispatchKey::Python);
  const bool values = !own || (parameter.is_floating_point() && !subclass);
  return read.quantized() && values ? Operand{parameter, {}} : read;
}

// Of the layer, or of the group of a stash, which counts the rows of a matrix alone.
LiveCounters live_counters(const DispatchMode& dispatch, const SaveContext& save, const LayerConfig& config,
                           const Tensor& x, const Operand& operand) {
  const LiveGroup& group = live_group();
  if (!group.open || !save.serves_a_graph() || !dispatch.direct()) return {};
  LiveCounters live = config.gemm_policy->live_counters(operand);
  const bool counted = group.tokens.has_value() && x.dim() == 2 && x.device() == group.tokens->device();
  if (!live.rows.defined() && counted) live = {*group.tokens, {}, true};
  return live;
}

// A row of the table: tensors, operands, or what a prologue or an epilogue saves, kept under a name (or reported as
// recomputed) if the condition holds.
struct SaveRule {
  SavedName name;
  bool condition;
  SaveMode mode;
  at::TensorList tensors;
  at::ArrayRef<Operand> operands;
  QuantizeUsage usage;  // directions of FP8 operands
  SavedInfo info;
  at::ArrayRef<OwnSaved> own = {};
};

}  // namespace

SavedInfo saved_info(SavedInfo info, const ProductQuantization* q) {
  if (const char* why = why_override(q)) info.reason = why;
  return info;
}

// The report shows the shape and size of a tensor that is not saved. If the backward reads values in high precision,
// that is their size, twice that of the FP8 data.
void report_recomputed(const SaveContext& save, const Operand& operand, const ProductQuantization* q,
                       const Tensor& like, const SavedInfo& info) {
  for (const Operand& group : operand.groups) report_recomputed(save, group, q, like, info);
  if (!operand.groups.empty()) return;
  if (!operand.quantized()) {
    save.recomputed(operand.plain, info);
  } else if (!reads_high_precision(q) || !probe::active()) {
    save.recomputed(operand.fp8.rowwise, info);
  } else {
    save.recomputed(like.new_empty({1}).expand_symint(operand.fp8.rowwise.sym_sizes()), info);
  }
}

void save_layer(const DispatchMode& dispatch, SaveContext& save, const LayerSaves& saves, SaveFor save_for) {
  const auto& [config, layer_idx, in, prologue_output, epilogue, operand, gathered, weights, wanted] = saves;
  const ProductQuantization* q = config.quantization.get();
  const Prologue& prologue = *config.prologue;
  const bool for_recompute = save_for == SaveFor::kRecompute;  // the backward runs prologue and GEMM again first
  const bool recompute_operand = !for_recompute && wanted.weight && config.operand == SaveMode::kRecompute;
  const bool through_prologue = !for_recompute && (wanted.operand || recompute_operand);
  // The input that is recomputed, or kept in FP8, goes by another name; the operand made of it is not named again.
  const bool recomputed_input = layer_idx > 0 && config.input == SaveMode::kRecompute;
  const bool keep_input = through_prologue && (prologue.reads_input() || recompute_operand) && !recomputed_input &&
                          !(layer_idx > 0 && config.input_in_fp8);
  const bool keep_whole = !for_recompute && !recompute_operand;
  const bool wanted_any = wanted.operand || wanted.weight || wanted.epilogue.any();
  const bool high_precision = reads_high_precision(q);

  std::vector<Tensor> used;
  if (for_recompute || (recompute_operand && !high_precision)) used = config.gemm_policy->used_scales(operand);
  c10::SmallVector<Operand, 1> values;
  const bool stacked = config.stacked && in.weights.size() == 1;  // the one tensor has the values of all
  for (size_t i = 0; high_precision && !stacked && i < weights.size(); ++i) {
    if (for_recompute && !weights[i].quantized()) continue;
    values.push_back(weight_values(dispatch, in.weights[i], weights[i], !in.own.empty()));
  }
  if (high_precision && stacked && !(for_recompute && weights[0].plain.is_same(in.weights[0]))) {
    values.push_back({in.weights[0], {}});
  }
  const at::ArrayRef<Operand> read_weights = high_precision && !for_recompute ? at::ArrayRef<Operand>(values) : weights;
  const QuantizeUsage read = kept_usage(q), read_twice{true, read.columnwise};
  const SavedInfo operand_info = saved_info(prologue.operand_info(), q), parameter = saved_info(kParameter, q);

  save.set_live(live_counters(dispatch, save, config, in.prologue.x, operand));

  constexpr SaveMode kKeep = SaveMode::kSave;
  const SaveRule rules[] = {
      {kInput, keep_input, kKeep, prologue_output.input, {}, {}, prologue.input_info()},
      {kInput, for_recompute, kKeep, prologue_output.input, {}, {}, kMlpInput},
      {kSavedPrologue, for_recompute, kKeep, {}, {}, {}, {}, prologue_output.saves},
      {kSavedEpilogue, for_recompute, kKeep, in.epilogue.list(kBias), {}, {}, kParameter},
      {kSavedEpilogue, for_recompute || wanted_any, kKeep, {}, {}, {}, {}, epilogue},
      {kUsedScales, for_recompute, kKeep, used, {}, {}, kScales},
      {kWeight, for_recompute || wanted.operand, kKeep, {}, read_weights, for_recompute ? read_twice : read, parameter},
      {kWeightValues, for_recompute, kKeep, {}, values, {}, parameter},
      {kOperand, recompute_operand && !recomputed_input, SaveMode::kRecompute, {}, operand, {}, operand_info},
      {kUsedScales, recompute_operand, kKeep, used, {}, {}, kScales},
      {kWholeOperand, keep_whole, kKeep, {}, gathered, read, saved_info(kGatheredInput, q)},
      {kOperand, keep_whole && wanted.weight && !gathered.defined(), kKeep, {}, operand, read, operand_info},
      {kSavedPrologue, through_prologue, kKeep, {}, {}, {}, {}, prologue_output.saves},
  };
  for (const SaveRule& rule : rules) {
    if (!rule.condition) continue;
    const int name = saved_name(layer_idx, rule.name);
    for (const Tensor& tensor : rule.tensors) save.keep(name, tensor, rule.info);
    for (const OwnSaved& own : rule.own) {
      const bool reads = for_recompute ? own.is_argument : recompute_operand || !own.recompute_reads;
      if (reads) save.keep(name + own.own, own.tensor, *own.info);
    }
    for (const Operand& one : rule.operands) {
      if (rule.mode == SaveMode::kRecompute) {
        report_recomputed(save, one, q, prologue_output.input, rule.info);
      } else {
        const bool fp8_weight = rule.name == kWeight && one.quantized();
        keep_operand(save, name, one, rule.usage, fp8_weight ? saved_info(kQuantizedWeight, q) : rule.info);
      }
    }
  }
}

}  // namespace te_torch::layer
