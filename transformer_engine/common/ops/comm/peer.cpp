// The channel: its calls, and the verbs of the CPU, where the calling thread copies, sets words and waits for them.
#include "ops/comm/peer.h"

#include <sched.h>
#include <unistd.h>

#include <cstring>

#include "core/device.h"
#include "transformer_engine/comm.h"

namespace te::comm {

namespace {

constexpr int kSpins = 200;  // looks at a word before the thread sleeps between two of them

class CpuVerbs final : public Verbs {
 public:
  explicit CpuVerbs(const Words& words) : words_(words) {}

  void follow(te_stream) override {}
  void join(te_stream) override {}

  void copy(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t row_bytes,
            int64_t rows) override {
    if (target_pitch == row_bytes && source_pitch == row_bytes) {
      std::memcpy(target, source, row_bytes * size_t(rows));
      return;
    }
    for (size_t row = 0; row < size_t(rows); ++row) {
      std::memcpy(static_cast<char*>(target) + row * target_pitch,
                  static_cast<const char*>(source) + row * source_pitch, row_bytes);
    }
  }

  void set(bool, te_stream, uint32_t* value, uint32_t to) override {
    word(*value).store(to, std::memory_order_release);
  }

  void wait(bool, te_stream, const Awaited& what) override {
    word(*what.wants).store(what.wanted);
    int spins = 0;
    while (word(*what.value).load(std::memory_order_acquire) != what.wanted) {
      if (words_.failed()) break;
      if (++spins < kSpins) {
        sched_yield();
      } else {
        usleep(50);
      }
    }
    word(*what.value).store(0);
    word(*what.wants).store(0);
    word(*what.timed).store(0);
  }

  void poison(void* data, size_t bytes, uint32_t* failed, te_stream) override {
    if (word(*failed).load(std::memory_order_acquire) != 0) std::memset(data, 0xff, bytes);
  }

  bool idle() const override { return true; }

 private:
  const Words words_;
};

std::unique_ptr<Verbs> verbs_of(const te_comm_peer_options& options, const Words& words) {
  if (options.device == TE_DEVICE_CPU) return cpu_verbs(words);
#if defined(TE_WITH_CUDA)
  return cuda::peer_verbs(options.device, options.words, Words::bytes(options.ranks));
#else
  no_cuda("te_comm_peer_create");
#endif
}

}  // namespace

std::unique_ptr<Verbs> cpu_verbs(const Words& words) { return std::make_unique<CpuVerbs>(words); }

class Channel {
 public:
  explicit Channel(const te_comm_peer_options& o)
      : options_(o), words_(o.words, o.ranks), pid_(getpid()), verbs_(verbs_of(o, words_)), calls_(kSlots) {
    Member& me = words_.member(o.rank);
    me.start = process_start(uint32_t(getpid()));
    word(me.left).store(0);
    word(me.pid).store(uint32_t(getpid()), std::memory_order_release);
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      for (int32_t peer = 0; peer < o.ranks; ++peer) word(words_.line(slot, peer, o.rank).freed).store(kFree);
    }
    watch_ = std::make_unique<Watch>(words_, o.ranks, o.rank, o.timeout_s);
  }
  ~Channel() {
    if (getpid() != pid_) {  // no thread is there to end, and what it slept on would wait for it
      (void)watch_.release();
      return;
    }
    watch_.reset();
    word(words_.member(options_.rank).left).store(1);
  }

  void slot(const char* op, int32_t slot, void* const* addresses, size_t bytes) {
    Call& call = call_of(op, slot);
    if (addresses == nullptr) bad_argument(op, "addresses", "NULL", "an address for each rank");
    call.addresses.assign(addresses, addresses + options_.ranks);
    call.bytes = bytes;
  }

  void begin(const char* op, int32_t slot, const char* text) {
    Call& call = call_of(op, slot);
    if (text == nullptr) bad_argument(op, "text", "NULL", "what the call does");
    refuse_child(op);
    call.hash = hash_of(text);
    call.let_in.assign(size_t(options_.ranks), false);
    Member& me = words_.member(options_.rank);
    const uint32_t written = word(me.texts).load();
    for (uint32_t i = 0; i < std::min<uint32_t>(written, kTexts); ++i) {
      if (me.text[i].hash == call.hash) return;
    }
    Text& entry = me.text[written % kTexts];
    entry.hash = call.hash;
    std::strncpy(entry.text, text, TE_COMM_PEER_TEXT - 1);
    word(me.texts).store(written + 1, std::memory_order_release);
  }

  void push(const char* op, int32_t slot, int32_t to, size_t offset, size_t target_pitch, const void* source,
            size_t source_pitch, size_t row_bytes, int64_t rows) {
    Call& call = call_of(op, slot);
    check_rank(op, "to", to);
    if (rows < 0 || target_pitch < row_bytes || source_pitch < row_bytes) {
      bad_argument(op, "rows", rows, "rows of `row_bytes`, no longer than the pitches");
    }
    if (rows == 0 || row_bytes == 0) return;
    const size_t end = offset + size_t(rows - 1) * target_pitch + row_bytes;
    if (call.addresses.empty() || end > call.bytes) bad_argument(op, "offset", end, concat("<= ", call.bytes));
    let_in(call, slot, to);
    verbs_->copy(static_cast<char*>(call.addresses[size_t(to)]) + offset, target_pitch, source, source_pitch, row_bytes,
                 rows);
  }

  void signal(const char* op, int32_t slot, int32_t to) {
    Call& call = call_of(op, slot);
    check_rank(op, "to", to);
    let_in(call, slot, to);
    verbs_->set(true, nullptr, &words_.line(slot, to, options_.rank).arrived, call.hash);
  }

  void wait(const char* op, int32_t slot, int32_t from, te_stream stream) {
    const Call& call = call_of(op, slot);
    check_rank(op, "from", from);
    Line& line = words_.line(slot, options_.rank, from);
    verbs_->wait(false, stream, {&line.arrived, &line.wants_arrived, &line.timed_arrived, call.hash});
  }

  void done(const char* op, int32_t slot, int32_t from, te_stream stream) {
    call_of(op, slot);
    check_rank(op, "from", from);
    verbs_->set(false, stream, &words_.line(slot, from, options_.rank).freed, kFree);
  }

  void give_up(const char* text) {
    fail(words_, TE_COMM_PEER_LEFT, options_.rank, -1, false, text != nullptr ? text : "", "");
  }

  void poison(void* data, size_t bytes, te_stream stream) {
    if (bytes != 0) verbs_->poison(data, bytes, &words_.shared().failed, stream);
  }

  te_comm_peer_failure_info failure(const char* op) const {
    refuse_child(op);
    return words_.failed() ? words_.shared().info : te_comm_peer_failure_info{};
  }

  Verbs& verbs() { return *verbs_; }

 private:
  struct Call {
    std::vector<void*> addresses;
    size_t bytes = 0;
    uint32_t hash = 0;
    std::vector<bool> let_in;  // by peer: its slot is known to be free
  };

  Call& call_of(const char* op, int32_t slot) {
    if (slot < 0 || slot >= kSlots) bad_argument(op, "slot", slot, concat("0 to ", kSlots - 1));
    return calls_[size_t(slot)];
  }

  void check_rank(const char* op, const char* argument, int32_t rank) const {
    if (rank < 0 || rank >= options_.ranks) bad_argument(op, argument, rank, concat("0 to ", options_.ranks - 1));
  }

  void refuse_child(const char* op) const {
    if (getpid() == pid_) return;
    throw Error(TE_RUNTIME_ERROR, concat(op, ": this process (", getpid(), ") was forked from the one (", pid_,
                                         ") that is a rank of this channel; make a group in it."));
  }

  // Once in a call, ahead of the first push to `to`.
  void let_in(Call& call, int32_t slot, int32_t to) {
    if (call.let_in.size() != size_t(options_.ranks)) {
      throw Error(TE_INVALID_ARGUMENT, concat("te_comm_peer: slot ", slot,
                                              " has no call; te_comm_peer_begin() comes before pushes and signals."));
    }
    if (call.let_in[size_t(to)]) return;
    call.let_in[size_t(to)] = true;
    Line& line = words_.line(slot, options_.rank, to);
    verbs_->wait(true, nullptr, {&line.freed, &line.wants_freed, &line.timed_freed, kFree});
  }

  const te_comm_peer_options options_;
  const Words words_;
  const pid_t pid_;
  std::unique_ptr<Verbs> verbs_;
  std::vector<Call> calls_;
  std::unique_ptr<Watch> watch_;
};

namespace {

void check_options(const char* op, const te_comm_peer_options* o) {
  if (o == nullptr) bad_argument(op, "options", "NULL", "options");
  if (o->ranks < 2 || o->ranks > TE_COMM_MOST_RANKS) {
    bad_argument(op, "options.ranks", o->ranks, concat("a number from 2 to ", TE_COMM_MOST_RANKS));
  }
  if (o->rank < 0 || o->rank >= o->ranks) bad_argument(op, "options.rank", o->rank, concat("0 to ", o->ranks - 1));
  if (o->words == nullptr) bad_argument(op, "options.words", "NULL", "memory that the ranks share");
  if (!(o->timeout_s > 0)) bad_argument(op, "options.timeout_s", o->timeout_s, "a number > 0");
}

}  // namespace

}  // namespace te::comm

struct te_comm_peer : te::comm::Channel {
  using Channel::Channel;
};

namespace {

te_comm_peer& channel_of(const char* op, te_comm_peer* channel) {
  if (channel == nullptr) te::bad_argument(op, "channel", "NULL", "one that was created");
  return *channel;
}

}  // namespace

extern "C" {

using te::bad_argument;
using te::c_guard;

te_status te_comm_peer_bytes(int32_t ranks, size_t* bytes) {
  return c_guard([&] {
    const char* op = "te_comm_peer_bytes";
    if (ranks < 2 || ranks > TE_COMM_MOST_RANKS) {
      bad_argument(op, "ranks", ranks, te::concat("a number from 2 to ", TE_COMM_MOST_RANKS));
    }
    if (bytes == nullptr) bad_argument(op, "bytes", "NULL", "a place for the result");
    *bytes = te::comm::Words::bytes(ranks);
  });
}

te_status te_comm_peer_create(const te_comm_peer_options* options, te_comm_peer** out) {
  return c_guard([&] {
    const char* op = "te_comm_peer_create";
    te::comm::check_options(op, options);
    if (out == nullptr) bad_argument(op, "out", "NULL", "a place for the result");
    *out = new te_comm_peer(*options);
  });
}

te_status te_comm_peer_destroy(te_comm_peer* channel) {
  return c_guard([&] { delete &channel_of("te_comm_peer_destroy", channel); });
}

te_status te_comm_peer_slot(te_comm_peer* channel, int32_t slot, void* const* addresses, size_t bytes) {
  const char* op = "te_comm_peer_slot";
  return c_guard([&] { channel_of(op, channel).slot(op, slot, addresses, bytes); });
}

te_status te_comm_peer_begin(te_comm_peer* channel, int32_t slot, const char* text) {
  const char* op = "te_comm_peer_begin";
  return c_guard([&] { channel_of(op, channel).begin(op, slot, text); });
}

te_status te_comm_peer_follow(te_comm_peer* channel, te_stream stream) {
  return c_guard([&] { channel_of("te_comm_peer_follow", channel).verbs().follow(stream); });
}

te_status te_comm_peer_push(te_comm_peer* channel, int32_t slot, int32_t to, size_t offset, size_t target_pitch,
                            const void* source, size_t source_pitch, size_t row_bytes, int64_t rows) {
  const char* op = "te_comm_peer_push";
  return c_guard(
      [&] { channel_of(op, channel).push(op, slot, to, offset, target_pitch, source, source_pitch, row_bytes, rows); });
}

te_status te_comm_peer_signal(te_comm_peer* channel, int32_t slot, int32_t to) {
  const char* op = "te_comm_peer_signal";
  return c_guard([&] { channel_of(op, channel).signal(op, slot, to); });
}

te_status te_comm_peer_wait(te_comm_peer* channel, int32_t slot, int32_t from, te_stream stream) {
  const char* op = "te_comm_peer_wait";
  return c_guard([&] { channel_of(op, channel).wait(op, slot, from, stream); });
}

te_status te_comm_peer_join(te_comm_peer* channel, te_stream stream) {
  return c_guard([&] { channel_of("te_comm_peer_join", channel).verbs().join(stream); });
}

te_status te_comm_peer_done(te_comm_peer* channel, int32_t slot, int32_t from, te_stream stream) {
  const char* op = "te_comm_peer_done";
  return c_guard([&] { channel_of(op, channel).done(op, slot, from, stream); });
}

te_status te_comm_peer_poison(te_comm_peer* channel, void* data, size_t bytes, te_stream stream) {
  return c_guard([&] { channel_of("te_comm_peer_poison", channel).poison(data, bytes, stream); });
}

te_status te_comm_peer_give_up(te_comm_peer* channel, const char* text) {
  return c_guard([&] { channel_of("te_comm_peer_give_up", channel).give_up(text); });
}

te_status te_comm_peer_idle(te_comm_peer* channel, int32_t* idle) {
  return c_guard([&] {
    const char* op = "te_comm_peer_idle";
    if (idle == nullptr) bad_argument(op, "idle", "NULL", "a place for the result");
    *idle = channel_of(op, channel).verbs().idle() ? 1 : 0;
  });
}

te_status te_comm_peer_failure(te_comm_peer* channel, te_comm_peer_failure_info* info) {
  return c_guard([&] {
    const char* op = "te_comm_peer_failure";
    if (info == nullptr) bad_argument(op, "info", "NULL", "a place for the result");
    *info = channel_of(op, channel).failure(op);
  });
}

}  // extern "C"
