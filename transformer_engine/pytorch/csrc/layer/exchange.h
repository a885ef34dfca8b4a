// Between a layer's source and its product: hands the product rows of the operand as they become ready, and takes rows
// of the result away. Locally there is none: the operand is whole, and the result stays where it is made.
#pragma once

#include <memory>

#include "product.h"

namespace te_torch::layer {

// The product, by what it reads: the layer's operand, or the gradient of its result.
enum class Pass : uint8_t { kFprop, kDgrad };

// One product's way through an exchange.
class TE_EXPORT Transfer {
 public:
  Transfer() = default;
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // What the product reads; of its rows only those that next() has named.
  virtual const Operand& operand() const = 0;
  // The next rows that have arrived; of an operand without rows, once, none of them. False: there are no more.
  virtual bool next(Rows& rows) = 0;
  // These rows of the product's result, [rows, features].
  virtual void take(const Rows& rows, const Tensor& result) = 0;
  // What goes on in place of the result, when all rows were taken.
  virtual Tensor finish() = 0;
};

class TE_EXPORT Exchange {
 public:
  Exchange() = default;
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // `mine` is what this process has; `like` has its leading dimensions and the dtype of the result. Null: all is
  // here and stays here; in a call that is traced (route) rows do not arrive one behind the other.
  virtual std::unique_ptr<Transfer> begin(const Route& route, Pass pass, const Operand& mine,
                                          const Tensor& like) const = 0;
  // All rows of what the product of this pass reads, for the product of a weight's gradient, which reads both.
  virtual Operand whole(const Route& route, Pass pass, const Operand& mine) const = 0;
};

// product(operand, rows, like) for all rows; rows is null for the whole. Its result has the leading dimensions of
// `like`.
template <class Product>
Tensor through(const Exchange* exchange, const Route& route, Pass pass, const Operand& mine, const Tensor& like,
               Product&& product) {
  const std::unique_ptr<Transfer> transfer = exchange == nullptr ? nullptr : exchange->begin(route, pass, mine, like);
  if (transfer == nullptr) return product(mine, static_cast<const Rows*>(nullptr), like);
  Rows rows;
  while (transfer->next(rows)) {
    const Tensor shape = like.new_empty({0}).expand({rows.count, 0});
    transfer->take(rows, product(rows_of(transfer->operand(), rows), &rows, shape));
  }
  return transfer->finish();
}

}  // namespace te_torch::layer
