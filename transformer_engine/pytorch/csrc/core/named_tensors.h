// Tensors by name: the arguments of a node, or its saved tensors. A name may have several tensors in a row (a list of
// weights, the parts of an FP8 matrix); absent tensors take no slot.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <vector>

namespace te_torch {

class NamedTensors {
 public:
  // The part of an operand: the plain tensor, or data or scales of an FP8 matrix in one direction (gemm/product.h).
  struct Label {
    uint8_t name = 0;
    uint8_t part = 0;
  };
  using Labels = c10::SmallVector<Label, 16>;

  NamedTensors() { tensors_.reserve(8); }  // enough for a layer
  NamedTensors(std::vector<at::Tensor> tensors, Labels labels)
      : tensors_(std::move(tensors)), labels_(std::move(labels)) {}

  void reserve(size_t tensors) { tensors_.reserve(tensors), labels_.reserve(tensors); }
  void add(int name, const at::Tensor& t, uint8_t part = 0) {
    if (!t.defined()) return;
    tensors_.push_back(t);
    labels_.push_back({static_cast<uint8_t>(name), part});
  }
  void add(int name, const std::optional<at::Tensor>& t) {
    if (t.has_value()) add(name, *t);
  }

  size_t size() const { return tensors_.size(); }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  std::vector<at::Tensor>& tensors() { return tensors_; }
  const Labels& labels() const { return labels_; }

  // The index of the first one of a name, or size().
  size_t find(int name) const {
    size_t place = 0;
    while (place < labels_.size() && labels_[place].name != name) ++place;
    return place;
  }
  bool has(int name) const { return find(name) < size(); }

  // The first one of a name, or an undefined tensor.
  const at::Tensor& operator[](int name) const {
    static const at::Tensor none;
    const size_t place = find(name);
    return place < size() ? tensors_[place] : none;
  }
  std::optional<at::Tensor> optional(int name) const {
    const size_t place = find(name);
    return place < size() ? std::optional<at::Tensor>(tensors_[place]) : std::nullopt;
  }
  at::TensorList list(int name) const {
    const size_t first = find(name);
    size_t last = first;
    while (last < size() && labels_[last].name == name) ++last;
    return at::TensorList(tensors_).slice(first, last - first);
  }

 private:
  std::vector<at::Tensor> tensors_;
  Labels labels_;
};

}  // namespace te_torch
