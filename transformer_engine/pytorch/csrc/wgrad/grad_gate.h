// A gate counts the gradients of a parameter for its bucket group (ready_counts.h), whose reduction starts when all of
// them are there.
// - It is a hook of autograd's accumulator of the parameter, which runs once a backward, however often the parameter is
//   used: it adds .grad to main_grad, drops it, and counts.
// - A product that adds to main_grad itself is counted at once, before the node's next product, where the accumulator
//   would bring nothing more.
// - Python is entered only to start the reduction of a complete group, to read what marks a parameter with a .grad has,
//   and for errors.
#pragma once

#include <pybind11/pybind11.h>

#include "core/common.h"

namespace te_torch {

// Called after a product was added to a parameter's main_grad on that stream, without the GIL. brings_more: autograd
// still gets a gradient, or a dummy, for the parameter. Does nothing without gates.
void notify_gate(const Tensor& parameter, te_stream stream, bool brings_more);

void register_grad_gate(pybind11::module_& m);

}  // namespace te_torch
