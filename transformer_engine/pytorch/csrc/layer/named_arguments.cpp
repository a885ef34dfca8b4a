// See named_arguments.h.
#include "layer/named_arguments.h"

namespace te_torch::layer {

ArgumentPlaces places_of(const NamedTensors& arguments) {
  ArgumentPlaces places;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const int name = arguments.labels()[i].name;
    if (!places.empty() && places.back().name == name) {
      ++places.back().count;
    } else {
      places.push_back({name, i, 1});
    }
  }
  return places;
}

const ArgumentPlace* find_place(const ArgumentPlaces& places, int name) {
  for (const ArgumentPlace& place : places) {
    if (place.name == name) return &place;
  }
  return nullptr;
}

void WantedByLayer::note(int name) {
  const int per_layer = weight_of(1) - weight_of(0);
  WantedGradients& layer = layers[size_t((name - kFirstWeight) / per_layer)];
  const int own = (name - kFirstWeight) % per_layer - 1;
  if (own < 0) {
    layer.weight = true;
  } else if (own < kOwnNames) {
    layer.prologue.bits |= 1u << own;
  } else {
    layer.epilogue.bits |= 1u << (own - kOwnNames);
  }
}

void WantedByLayer::follow(bool x) {
  any = x;
  for (size_t i = 0; i < layers.size(); ++i) {
    WantedGradients& layer = layers[i];
    layer.input = any;
    layer.operand = any || layer.prologue.any();
    any = layer.operand || layer.weight || (i + 1 < layers.size() && layer.epilogue.any());
  }
}

}  // namespace te_torch::layer
