// offload through the C API, on every device here: bytes come back as they left, and each state takes its own calls
// alone. The waits are test_offload_waits.cpp's.
#include "transformer_engine/offload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "offload_case.h"

namespace te {
namespace {

using namespace testing;

class Offload : public ::testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Devices, Offload, ::testing::ValuesIn(testing::devices()), testing::device_name);

TEST_P(Offload, PackedPiecesComeBack) {
  for (const auto& sizes : std::vector<std::vector<size_t>>{
           {}, {0}, {1}, {16384, 16385}, {255, 256, 257, 0, 100000, 3}, std::vector<size_t>(200, 77)}) {
    const Pieces from(GetParam(), sizes, true);
    const size_t bytes = te_offload_packed_bytes(sizes.data(), int64_t(sizes.size()));
    const Storage packed(GetParam(), 1, int64_t(bytes));
    TE_ASSERT_OK(te_offload_pack(from.spans.data(), int64_t(sizes.size()), packed.data(), GetParam(), nullptr));
    const Bytes flat = packed.read();
    size_t offset = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const Bytes wanted = pattern(sizes[i], int(i));
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), flat.begin() + int64_t(offset))) << "piece " << i;
      offset += (sizes[i] + 255) / 256 * 256;
    }
    const Pieces to(GetParam(), sizes, false);
    TE_ASSERT_OK(te_offload_unpack(packed.data(), to.spans.data(), int64_t(sizes.size()), GetParam(), nullptr));
    to.expect_patterns();
  }
}

TEST_P(Offload, UnalignedPiecesAreMovedByteByByte) {
  const Storage from(GetParam(), 1, 1001), to(GetParam(), 1, 1001), packed(GetParam(), 1, 1024);
  const Bytes values = pattern(1001, 5);
  const_cast<Storage&>(from).fill(values);
  const te_offload_piece source{from.data() + 1, 1000}, target{to.data() + 1, 1000};
  TE_ASSERT_OK(te_offload_pack(&source, 1, packed.data(), GetParam(), nullptr));
  TE_ASSERT_OK(te_offload_unpack(packed.data(), &target, 1, GetParam(), nullptr));
  const Bytes got = to.read();
  EXPECT_EQ(got[0], testing::kPoison);
  EXPECT_TRUE(std::equal(got.begin() + 1, got.end(), values.begin() + 1));
}

TEST_P(Offload, BytesComeBackAsTheyLeft) {
  const Engine engine(GetParam());
  const Layer layer(engine);
  const size_t large = 3 << 20;
  for (const auto& sizes : std::vector<std::vector<size_t>>{
           {}, {1}, {large}, {large, large + 1}, {300, large, 0, 4096, 2 << 20, 17}, {5, 6, 7}}) {
    Pieces from(GetParam(), sizes, true);
    std::unique_ptr<Storage> staging;
    start(layer, from, staging, GetParam(), nullptr);
    EXPECT_EQ(layer.state(), TE_OFFLOAD_STARTED);
    TE_ASSERT_OK(te_offload_join(layer.handle, nullptr));
    TE_ASSERT_OK(te_offload_release(layer.handle, nullptr));
    from.poison();
    if (staging) staging->poison();
    for (int again = 0; again < 2; ++again) {  // a retained graph goes back twice
      const Pieces to(GetParam(), sizes, false);
      TE_ASSERT_OK(te_offload_start_reload(layer.handle, to.spans.data(), int64_t(sizes.size()),
                                           staging ? staging->data() : nullptr, nullptr));
      TE_ASSERT_OK(te_offload_wait_reload(layer.handle, nullptr));
      to.expect_patterns();
      TE_ASSERT_OK(te_offload_park(layer.handle, nullptr));
      EXPECT_EQ(layer.state(), TE_OFFLOAD_FINISHED);
    }
    TE_ASSERT_OK(te_offload_reset(layer.handle, nullptr));
    EXPECT_EQ(engine.usage().used, 0u);
  }
}

TEST_P(Offload, EachStateTakesItsOwnCalls) {
  const Engine engine(GetParam());
  const char* calls[] = {"mark", "prepare", "start", "join", "release", "start_reload", "wait_reload", "park"};
  const te_offload_state wanted[] = {TE_OFFLOAD_NOT_OFFLOADED,  TE_OFFLOAD_NOT_OFFLOADED, TE_OFFLOAD_NOT_OFFLOADED,
                                     TE_OFFLOAD_STARTED,        TE_OFFLOAD_STARTED,       TE_OFFLOAD_FINISHED,
                                     TE_OFFLOAD_RELOAD_STARTED, TE_OFFLOAD_RELOAD_STARTED};
  for (int state = TE_OFFLOAD_NOT_OFFLOADED; state <= TE_OFFLOAD_RELOAD_STARTED; ++state) {
    for (int call = 0; call < 8; ++call) {
      const Layer layer(engine);
      Pieces pieces(GetParam(), {64}, true);
      std::unique_ptr<Storage> staging;
      const auto reload = [&] {
        return te_offload_start_reload(layer.handle, pieces.spans.data(), 1, nullptr, nullptr);
      };
      if (state >= TE_OFFLOAD_STARTED) start(layer, pieces, staging, GetParam(), nullptr);
      if (state >= TE_OFFLOAD_FINISHED) {
        TE_ASSERT_OK(te_offload_release(layer.handle, nullptr));
      }
      if (state >= TE_OFFLOAD_RELOAD_STARTED) {
        TE_ASSERT_OK(reload());
      }
      if (wanted[call] == state) continue;
      int64_t mark = 0;
      size_t bytes = 0;
      te_status status = TE_SUCCESS;
      if (call == 0) status = te_offload_mark(layer.handle, nullptr, &mark);
      if (call == 1) status = te_offload_prepare(layer.handle, pieces.sizes.data(), 1, nullptr, &bytes);
      if (call == 2) status = te_offload_start(layer.handle, pieces.spans.data(), nullptr, 1, nullptr, nullptr);
      if (call == 3) status = te_offload_join(layer.handle, nullptr);
      if (call == 4) status = te_offload_release(layer.handle, nullptr);
      if (call == 5) status = reload();
      if (call == 6) status = te_offload_wait_reload(layer.handle, nullptr);
      if (call == 7) status = te_offload_park(layer.handle, nullptr);
      EXPECT_EQ(status, TE_RUNTIME_ERROR) << calls[call] << " in state " << state;
      const std::string message = te_last_error();
      for (const std::string& word :
           {std::string("te_offload_") + calls[call], std::string(te_offload_state_name(te_offload_state(state))),
            std::string(te_offload_state_name(wanted[call]))}) {
        EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
      }
      EXPECT_EQ(layer.state(), state);
    }
  }
  const Layer layer(engine);
  EXPECT_EQ(te_offload_start(layer.handle, nullptr, nullptr, 0, nullptr, nullptr), TE_RUNTIME_ERROR);
  EXPECT_NE(std::string(te_last_error()).find("prepare"), std::string::npos);
}

TEST_P(Offload, ExhaustedMemoryNamesTheSizesAndChangesNothing) {
  const Engine engine(GetParam(), 4 << 20);
  const Layer layer(engine);
  const size_t sizes[] = {6 << 20};
  size_t staging = 0;
  ASSERT_EQ(te_offload_reserve(engine.handle, 6 << 20), TE_PINNED_MEMORY);
  ASSERT_EQ(te_offload_prepare(layer.handle, sizes, 1, nullptr, &staging), TE_PINNED_MEMORY);
  const std::string message = te_last_error();
  for (const char* word : {"pinned memory exhausted", "6291456", "4194304"}) {
    EXPECT_NE(message.find(word), std::string::npos) << message;
  }
  EXPECT_EQ(layer.state(), TE_OFFLOAD_NOT_OFFLOADED);
  const size_t smaller[] = {4 << 20};
  TE_EXPECT_OK(te_offload_prepare(layer.handle, smaller, 1, nullptr, &staging));
}

TEST_P(Offload, TheArenaIsAllocatedOnce) {
  const Engine engine(GetParam());
  TE_ASSERT_OK(te_offload_reserve(engine.handle, 5 << 20));
  const size_t reserved = engine.usage().reserved;
  EXPECT_GE(reserved, size_t(5) << 20);
  {
    const Layer kept(engine, true);
    const Pieces pieces(GetParam(), {1 << 20, 3 << 20}, true);
    for (int step = 0; step < 50; ++step) {
      std::unique_ptr<Storage> staging;
      const Layer passing(engine);
      start(step % 2 ? kept : passing, pieces, staging, GetParam(), nullptr);
      TE_ASSERT_OK(te_offload_reset((step % 2 ? kept : passing).handle, nullptr));
    }
    EXPECT_LE(engine.usage().reserved, reserved + (4 << 20));
    EXPECT_EQ(engine.usage().slots, 1);  // what `kept` retains
    EXPECT_EQ(engine.usage().used, size_t(4) << 20);
  }
  EXPECT_EQ(engine.usage().used, 0u);
  EXPECT_EQ(engine.usage().peak, size_t(8) << 20);
  TE_ASSERT_OK(te_offload_trim(engine.handle));
  EXPECT_EQ(engine.usage().reserved, 0u);
}

TEST_P(Offload, BadArgumentsAreNamed) {
  const Engine engine(GetParam());
  const Layer layer(engine);
  const Pieces pieces(GetParam(), {64}, true);
  size_t staging = 0;
  EXPECT_EQ(te_offload_prepare(nullptr, nullptr, 0, nullptr, &staging), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_offload_prepare(layer.handle, nullptr, 2, nullptr, &staging), TE_INVALID_ARGUMENT);
  TE_ASSERT_OK(te_offload_prepare(layer.handle, pieces.sizes.data(), 1, nullptr, &staging));
  EXPECT_EQ(te_offload_start(layer.handle, pieces.spans.data(), nullptr, 0, nullptr, nullptr), TE_INVALID_ARGUMENT);
  const te_offload_piece wrong{pieces.spans[0].data, 63};
  EXPECT_EQ(te_offload_start(layer.handle, &wrong, nullptr, 1, nullptr, nullptr), TE_INVALID_ARGUMENT);
  const int64_t mark = 4;
  EXPECT_EQ(te_offload_start(layer.handle, pieces.spans.data(), &mark, 1, nullptr, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_offload_engine_destroy(engine.handle), TE_INVALID_ARGUMENT);  // a layer is there
  te_offload_options options{};
  options.device = -3;
  te_offload_engine* none = nullptr;
  EXPECT_EQ(te_offload_engine_create(options, &none), TE_INVALID_ARGUMENT);
}

TEST_P(Offload, WhereAResultGoesMustBeSomewhere) {
  const Engine engine(GetParam());
  const Layer layer(engine);
  const size_t size = 64;
  te_stream stream = nullptr;
  te_offload_step step{};
  int64_t count = 0;
  const auto refused = [](const char* argument, te_status status) {
    EXPECT_EQ(status, TE_INVALID_ARGUMENT) << argument;
    EXPECT_NE(std::string(te_last_error()).find(argument), std::string::npos) << te_last_error();
  };
  refused("'out'", te_offload_engine_create(te_offload_options{}, nullptr));
  refused("'out'", te_offload_layer_create(engine.handle, 0, nullptr));
  refused("'out'", te_offload_get_usage(engine.handle, nullptr));
  refused("'d2h'", te_offload_streams(engine.handle, nullptr, &stream));
  refused("'h2d'", te_offload_streams(engine.handle, &stream, nullptr));
  refused("'count'", te_offload_get_trace(engine.handle, 0, 0, nullptr, nullptr));
  refused("'steps'", te_offload_get_trace(engine.handle, 0, 1, nullptr, &count));
  refused("'most'", te_offload_get_trace(engine.handle, 0, -1, &step, &count));
  refused("'mark'", te_offload_mark(layer.handle, nullptr, nullptr));
  refused("'sizes'", te_offload_prepare(layer.handle, nullptr, 1, nullptr, nullptr));
  refused("'staging'", te_offload_prepare(layer.handle, &size, 1, nullptr, nullptr));
  refused("'staging'", te_offload_staging(layer.handle, nullptr));
  EXPECT_EQ(te_offload_packed_bytes(nullptr, 2), 0u);
  EXPECT_EQ(engine.usage().slots, 0);
}

}  // namespace
}  // namespace te
