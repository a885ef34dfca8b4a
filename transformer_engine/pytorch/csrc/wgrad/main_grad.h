// Weight gradients that go to parameters themselves: into main_grad as the product is made, or left to backward_dw(),
// which Python's store keeps. What parameters say (main_grad, get_main_grad(), overwrite_main_grad, zero_out_wgrad,
// grad_added_to_main_grad) is read in the backward, under the GIL, and never kept. No product is computed here.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "wgrad/grad_accumulator.h"

namespace te_torch {

// What errors call a product: its module, and its parameters.
struct WeightNames {
  std::string op;
  std::vector<std::string> weights;
};

// What parameters say in a backward of theirs.
struct WeightTargets {
  std::vector<WeightTarget> list;
  c10::SmallVector<bool, 4> tells;  // which of them wait for grad_added_to_main_grad
  // Of which of them autograd gets a dummy, so that its hooks fire, and of which one of zeros. Of one matrix's, in
  // whose place there is one dummy, all that want a gradient have to.
  c10::SmallVector<bool, 4> stands_in, zero;
};

// A call's product, as its weight gradients need it: weights and biases are the rows of its matrices, in order; those
// that wanted no gradient when it was called get none.
struct WeightParameters {
  std::shared_ptr<const WeightNames> names;
  std::vector<Tensor> weights, biases;
  c10::SmallVector<bool, 4> wanted, wanted_biases;
  bool fused = false;
  bool overwrite = false;       // as the call said; a weight may say so too
  std::vector<size_t> unasked;  // weights, then biases, whose gradients the backward does not bring

  // In a backward: `unasked`. For autograd the parameters of one matrix are one, of which all is wanted or none.
  std::vector<size_t> find_unasked() const;
  bool asked(size_t number) const;
  // Those, and what wanted no gradient when the product was called.
  std::vector<size_t> left_out() const;
  // As an accumulator of autograd's: a weight that was frozen since the call gets nothing.
  bool takes(size_t number) const;
  std::vector<int64_t> rows() const;

  // Under the GIL: where the wanted gradients are added to; others are undefined. Unless `ask`, a get_main_grad() is
  // left to the backward. ValueError for a missing or unfit one.
  std::vector<Tensor> main_grads(bool ask) const;
  WeightTargets targets(const std::vector<Tensor>& main_grads) const;

  // The wanted gradients into their targets. Returns the biases', one for each; none unless `with_bias`.
  // The GIL is let go where it is held: nothing is computed or waited for under it.
  std::vector<Tensor> accumulate(const WgradTask& product, const WeightTargets& targets, bool with_bias) const;

  // What autograd gets for gradients that are in main_grad: nothing, or where the owners of main_grad wait for
  // autograd's hooks (they set grad_added_to_main_grad) a dummy.
  c10::SmallVector<Tensor, 1> stand_ins(const WeightTargets& targets, const WgradTask& product) const;
};

class ParameterGradAccumulator : public GradAccumulator {
 public:
  ParameterGradAccumulator(WeightParameters parameters, std::shared_ptr<PyObject> store)
      : parameters_(std::move(parameters)), store_(std::move(store)) {}

  WeightGrads take(std::shared_ptr<const WgradTask> product, bool with_bias) const override;
  bool computes_now() const override { return store_ == nullptr; }

 private:
  WeightParameters parameters_;
  std::shared_ptr<PyObject> store_;  // none: gradients are computed now
};

// A gradient that stands for one already in main_grad. One buffer a shape, shared by all: a fresh alias of it each
// time, else autograd would copy it. Its values mean nothing, unless `zero`. Without the GIL.
Tensor dummy_weight_grad(at::IntArrayRef shape, at::ScalarType dtype, const at::Device& device, bool zero);

// The buffers that dummies are aliases of; and to let go of them.
std::vector<Tensor> dummy_weight_grads();
void clear_dummy_weight_grads();

// Sets of Python's that get the ids of weights whose gradients are added to main_grad. Under the GIL.
void note_accumulations(PyObject* noted);
void forget_accumulations(PyObject* noted);

}  // namespace te_torch
