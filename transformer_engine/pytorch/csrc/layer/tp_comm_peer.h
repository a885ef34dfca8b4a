// A GEMM with communication over a channel to peers: copies push rows into the memory of peers, and chunks are computed
// as they arrive, or are pushed to their owners as they are computed.
// - If chunks would have other bits than one GEMM over all rows, the same copies run before or after that GEMM.
#pragma once

#include "distributed/peer.h"
#include "layer/tp_comm.h"

namespace te_torch::layer {

// Gathers `mine`, plain or FP8 by one scale. automatic: in chunks only where the costs of the channel predict that
// these are faster. buffers: null: the caller saves the gathered operand (off_pool()), which lasts as long as the
// CommOp.
std::unique_ptr<CommOp> peer_gather_product(std::shared_ptr<PeerChannel> channel, bool automatic, Pass pass,
                                            const Operand& mine, const Tensor& like, ScopedBuffers* buffers);

// Sends the result's rows to their owners, which sum them in the order of the ranks, and add the bias.
std::unique_ptr<CommOp> peer_product_scatter(std::shared_ptr<PeerChannel> channel, bool automatic, Pass pass,
                                             const Operand& mine, const Tensor& like, const OptionalTensor& bias);

}  // namespace te_torch::layer
