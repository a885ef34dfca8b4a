// Adds weight gradients to the main_grad of parameters, in the backward or in backward_dw(), for which Python has a
// store.
// - The attributes of parameters (main_grad, get_main_grad(), overwrite_main_grad, zero_out_wgrad,
//   grad_added_to_main_grad) are read in the backward, under the GIL, and never cached.
// - wgrad_task.h computes.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "wgrad/grad_accumulator.h"

namespace te_torch {

// Names for errors: the module of a product, and its parameters.
struct WeightNames {
  std::string op;
  std::vector<std::string> weights;
};

// The attributes of a product's parameters, as the backward reads them.
struct WeightTargets {
  std::vector<WeightTarget> list;
  c10::SmallVector<bool, 4> has_added_flag;  // which parameters have grad_added_to_main_grad, which the backward sets
  // For which parameters autograd receives a dummy, so that its hooks fire, and for which one of zeros. The parameters
  // of one matrix share one dummy, if all that want a gradient need one.
  c10::SmallVector<bool, 4> stands_in, zero;
};

// A call's product, as its weight gradients need it: weights and biases are the rows of its matrices, in order; those
// that wanted no gradient when it was called get none.
struct WeightParameters {
  std::shared_ptr<const WeightNames> names;
  std::vector<Tensor> weights, biases;
  c10::SmallVector<bool, 4> wanted, wanted_biases;
  bool fused = false;
  bool overwrite = false;           // an argument of the call; a weight may have overwrite_main_grad too
  std::vector<size_t> unrequested;  // weights, then biases, whose gradients the backward does not bring

  // In a backward: `unrequested`. For autograd the parameters of one matrix are one, of which all is wanted or none.
  std::vector<size_t> find_unrequested() const;
  bool requested(size_t number) const;
  // `unrequested`, and the parameters that wanted no gradient when the product was called.
  std::vector<size_t> left_out() const;
  // As autograd does: a weight that was frozen since the call gets no gradient.
  bool takes(size_t number) const;

  // Under the GIL: where the wanted gradients are added to; others are undefined. Unless `call_lazy`, a get_main_grad()
  // is left to the backward. ValueError for a missing or unfit one.
  std::vector<Tensor> main_grads(bool call_lazy) const;
  WeightTargets targets(const std::vector<Tensor>& main_grads) const;

  // The wanted gradients into their targets. Returns the biases', one for each; none unless `with_bias`.
  // Releases the GIL where it is held while it computes or waits.
  std::vector<Tensor> accumulate(const WgradTask& product, const WeightTargets& targets, bool with_bias) const;

  // Returns the tensors for autograd in place of gradients that are in main_grad: none, or a dummy if the parameter has
  // grad_added_to_main_grad, since its owner waits for autograd's hooks.
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

// A dummy gradient in place of one that is already in main_grad. All dummies of a shape share one buffer; each is a new
// alias of it, or autograd would copy it. Its values are undefined, unless `zero`. Called without the GIL.
Tensor dummy_weight_grad(at::IntArrayRef shape, at::ScalarType dtype, const at::Device& device, bool zero);

// The buffers of the dummies; and releasing them.
std::vector<Tensor> dummy_weight_grads();
void clear_dummy_weight_grads();

// Adds or removes a set of Python that receives the ids of weights whose gradients are added to main_grad. Called under
// the GIL.
void note_accumulations(PyObject* noted);
void forget_accumulations(PyObject* noted);

}  // namespace te_torch
