// A product's way over a channel to peers: rows are pushed into the peers' memory by copies, and computed in runs as
// they arrive, or pushed to their owners run by run as they are computed. Where runs would have other bits than the
// whole, the same copies stand before or behind one product.
#pragma once

#include "distributed/peer.h"
#include "layer/tp_comm.h"

namespace te_torch::layer {

// What arrives is read in runs, by the plan: `mine`, plain or FP8 by one scale. automatic: in runs where the channel's
// costs predict that these are faster. buffers: null where somebody keeps what arrives (off_pool()), which lasts as
// long as the CommOp then.
std::unique_ptr<CommOp> peer_gather_product(std::shared_ptr<PeerChannel> channel, bool automatic, Pass pass,
                                            const Operand& mine, const Tensor& like, ScopedBuffers* buffers);

// The result's rows go to their owners, who add them up in the order of the ranks, and the bias.
std::unique_ptr<CommOp> peer_product_scatter(std::shared_ptr<PeerChannel> channel, bool automatic, Pass pass,
                                             const Operand& mine, const Tensor& like, const OptionalTensor& bias);

}  // namespace te_torch::layer
