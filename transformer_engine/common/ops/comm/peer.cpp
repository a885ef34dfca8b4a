// The channel's calls.
#include "ops/comm/peer.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core/device.h"
#include "transformer_engine/comm.h"

namespace te::comm {

namespace {

std::unique_ptr<Verbs> verbs_of(const te_comm_peer_options& options, const Words& words) {
  if (options.device == TE_DEVICE_CPU) return cpu_verbs(words);
#if defined(TE_WITH_CUDA)
  return cuda::peer_verbs(options.device, options.words, Words::bytes(options.ranks));
#else
  no_cuda("te_comm_peer_create");
#endif
}

// The forks by which this process has come from the one that loaded the library, counted in the child: a call does not
// ask the system for its process.
std::atomic<uint32_t>& forks() {
  static std::atomic<uint32_t> count{0};
  static const int counted = pthread_atfork(nullptr, nullptr, [] { forks().fetch_add(1, std::memory_order_relaxed); });
  if (counted != 0) throw Error(TE_RUNTIME_ERROR, concat("te_comm_peer_create: pthread_atfork failed: ", counted));
  return count;
}

}  // namespace

class Channel {
 public:
  explicit Channel(const te_comm_peer_options& o)
      : options_(o),
        words_(o.words, o.ranks),
        pid_(getpid()),
        forks_(forks().load()),
        verbs_(verbs_of(o, words_)),
        calls_(kSlots) {
    Member& me = words_.member(o.rank);
    me.start = process_start(uint32_t(getpid()));
    word(me.left).store(0);
    word(me.pid).store(uint32_t(getpid()), std::memory_order_release);
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      for (int32_t peer = 0; peer < o.ranks; ++peer) word(words_.line(slot, peer, o.rank).freed).store(kFree);
      Call& call = calls_[size_t(slot)];
      for (int32_t step = 1; step < o.ranks; ++step) {
        const int32_t peer = (o.rank + step) % o.ranks;
        Line &mine = words_.line(slot, o.rank, peer), &theirs = words_.line(slot, peer, o.rank);
        call.sets_arrived.push_back(&theirs.arrived);
        call.sets_freed.push_back(&theirs.freed);
        call.arrived.push_back({&mine.arrived, &mine.expected_arrived});
        call.freed.push_back({&mine.freed, &mine.expected_freed});
      }
    }
    watch_ = std::make_unique<Watch>(words_, o.ranks, o.rank, o.timeout_s);
  }
  ~Channel() {
    if (is_child()) {  // the thread does not exist in a forked process, and joining it would block
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
    if (text == nullptr) bad_argument(op, "text", "NULL", "a description of the call");
    refuse_child(op);
    call.hash = hash_of(text);
    call.let_in.assign(size_t(options_.ranks - 1), false);
    Member& me = words_.member(options_.rank);
    if (me.text[call.text].hash == call.hash) return;  // a slot's calls are alike
    const uint32_t written = word(me.texts).load();
    for (call.text = 0; call.text < std::min<uint32_t>(written, kTexts); ++call.text) {
      if (me.text[call.text].hash == call.hash) return;
    }
    call.text = written % kTexts;
    Text& entry = me.text[call.text];
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
    char* const target = static_cast<char*>(call.addresses[size_t(to)]) + offset;
    if (to == options_.rank) {
      verbs_->copy_own(slot, target, target_pitch, source, source_pitch, row_bytes, rows);
      return;
    }
    let_in(call, slot, steps_to(op, "to", to));
    verbs_->copy(target, target_pitch, source, source_pitch, row_bytes, rows);
  }

  void signal(const char* op, int32_t slot, int32_t to) {
    Call& call = call_of(op, slot);
    const Steps steps = steps_to(op, "to", to);
    let_in(call, slot, steps);
    verbs_->set(true, nullptr, steps.of(call.sets_arrived), call.hash);
  }

  void wait(const char* op, int32_t slot, int32_t from, te_stream stream) {
    const Call& call = call_of(op, slot);
    if (from == options_.rank) {
      verbs_->wait_own(slot, stream);
      return;
    }
    verbs_->wait(false, stream, steps_to(op, "from", from).of(call.arrived), call.hash);
  }

  void join(const char* op, int32_t slot, te_stream stream) {
    call_of(op, slot);
    verbs_->join(slot, stream);
  }

  void done(const char* op, int32_t slot, int32_t from, void* data, size_t bytes, te_stream stream) {
    const Call& call = call_of(op, slot);
    const Steps steps = steps_to(op, "from", from);
    poison(data, bytes, stream);
    verbs_->set(false, stream, steps.of(call.sets_freed), kFree);
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
  // Lists of peers begin with the next rank.
  struct Call {
    std::vector<void*> addresses;  // by rank
    size_t bytes = 0;
    uint32_t hash = 0, text = 0;                      // text: its place in this rank's list
    std::vector<bool> let_in;                         // the peer's slot is known to be free
    std::vector<uint32_t*> sets_arrived, sets_freed;  // of the peer
    std::vector<Awaited> arrived, freed;              // of this rank, set by the peer
  };

  // Some of the peers in such lists.
  struct Steps {
    size_t first, count;
    template <class T>
    Part<T> of(const std::vector<T>& all) const {
      return {all.data() + first, count};
    }
  };

  Call& call_of(const char* op, int32_t slot) {
    if (slot < 0 || slot >= kSlots) bad_argument(op, "slot", slot, concat("0 to ", kSlots - 1));
    return calls_[size_t(slot)];
  }

  void check_rank(const char* op, const char* argument, int32_t rank) const {
    if (rank < 0 || rank >= options_.ranks) bad_argument(op, argument, rank, concat("0 to ", options_.ranks - 1));
  }

  // That rank, or all but this one.
  Steps steps_to(const char* op, const char* argument, int32_t rank) const {
    if (rank == TE_COMM_PEER_OTHERS) return {0, size_t(options_.ranks - 1)};
    check_rank(op, argument, rank);
    if (rank == options_.rank) bad_argument(op, argument, rank, "another rank than this one");
    return {size_t((rank - options_.rank + options_.ranks) % options_.ranks - 1), 1};
  }

  bool is_child() const { return forks().load(std::memory_order_relaxed) != forks_; }

  void refuse_child(const char* op) const {
    if (!is_child()) return;
    throw Error(TE_RUNTIME_ERROR, concat(op, ": this process (", getpid(), ") was forked from process ", pid_,
                                         ", a rank of this channel; create a group in this process."));
  }

  // Once for each peer in a call, before the first push to it.
  void let_in(Call& call, int32_t slot, const Steps& to) {
    if (call.let_in.empty()) {
      throw Error(TE_INVALID_ARGUMENT, concat("te_comm_peer: slot ", slot,
                                              " has no call; call te_comm_peer_begin() before pushes and signals."));
    }
    for (size_t step = to.first, last = to.first + to.count; step < last; ++step) {
      Steps waits{step, 0};
      for (; step < last && !call.let_in[step]; ++step, ++waits.count) call.let_in[step] = true;
      if (waits.count > 0) verbs_->wait(true, nullptr, waits.of(call.freed), kFree);
    }
  }

  const te_comm_peer_options options_;
  const Words words_;
  const pid_t pid_;
  const uint32_t forks_;  // of this process at pid_
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

extern "C" {

using te::bad_argument;
using te::c_guard;
using te::check_place;
using te::object;

te_status te_comm_peer_bytes(int32_t ranks, size_t* bytes) {
  return c_guard([&] {
    const char* op = "te_comm_peer_bytes";
    if (ranks < 2 || ranks > TE_COMM_MOST_RANKS) {
      bad_argument(op, "ranks", ranks, te::concat("a number from 2 to ", TE_COMM_MOST_RANKS));
    }
    check_place(op, "bytes", bytes);
    *bytes = te::comm::Words::bytes(ranks);
  });
}

te_status te_comm_peer_create(const te_comm_peer_options* options, te_comm_peer** out) {
  return c_guard([&] {
    const char* op = "te_comm_peer_create";
    te::comm::check_options(op, options);
    check_place(op, "out", out);
    *out = new te_comm_peer(*options);
  });
}

te_status te_comm_peer_destroy(te_comm_peer* channel) {
  return c_guard([&] { delete &object("te_comm_peer_destroy", "channel", channel); });
}

te_status te_comm_peer_slot(te_comm_peer* channel, int32_t slot, void* const* addresses, size_t bytes) {
  const char* op = "te_comm_peer_slot";
  return c_guard([&] { object(op, "channel", channel).slot(op, slot, addresses, bytes); });
}

te_status te_comm_peer_begin(te_comm_peer* channel, int32_t slot, const char* text) {
  const char* op = "te_comm_peer_begin";
  return c_guard([&] { object(op, "channel", channel).begin(op, slot, text); });
}

te_status te_comm_peer_follow(te_comm_peer* channel, te_stream stream) {
  return c_guard([&] { object("te_comm_peer_follow", "channel", channel).verbs().follow(stream); });
}

te_status te_comm_peer_push(te_comm_peer* channel, int32_t slot, int32_t to, size_t offset, size_t target_pitch,
                            const void* source, size_t source_pitch, size_t row_bytes, int64_t rows) {
  const char* op = "te_comm_peer_push";
  return c_guard([&] {
    object(op, "channel", channel).push(op, slot, to, offset, target_pitch, source, source_pitch, row_bytes, rows);
  });
}

te_status te_comm_peer_signal(te_comm_peer* channel, int32_t slot, int32_t to) {
  const char* op = "te_comm_peer_signal";
  return c_guard([&] { object(op, "channel", channel).signal(op, slot, to); });
}

te_status te_comm_peer_wait(te_comm_peer* channel, int32_t slot, int32_t from, te_stream stream) {
  const char* op = "te_comm_peer_wait";
  return c_guard([&] { object(op, "channel", channel).wait(op, slot, from, stream); });
}

te_status te_comm_peer_join(te_comm_peer* channel, int32_t slot, te_stream stream) {
  const char* op = "te_comm_peer_join";
  return c_guard([&] { object(op, "channel", channel).join(op, slot, stream); });
}

te_status te_comm_peer_done(te_comm_peer* channel, int32_t slot, int32_t from, void* data, size_t bytes,
                            te_stream stream) {
  const char* op = "te_comm_peer_done";
  return c_guard([&] { object(op, "channel", channel).done(op, slot, from, data, bytes, stream); });
}

te_status te_comm_peer_poison(te_comm_peer* channel, void* data, size_t bytes, te_stream stream) {
  return c_guard([&] { object("te_comm_peer_poison", "channel", channel).poison(data, bytes, stream); });
}

te_status te_comm_peer_give_up(te_comm_peer* channel, const char* text) {
  return c_guard([&] { object("te_comm_peer_give_up", "channel", channel).give_up(text); });
}

te_status te_comm_peer_idle(te_comm_peer* channel, int32_t* idle) {
  return c_guard([&] {
    const char* op = "te_comm_peer_idle";
    check_place(op, "idle", idle);
    *idle = object(op, "channel", channel).verbs().idle() ? 1 : 0;
  });
}

te_status te_comm_peer_failure(te_comm_peer* channel, te_comm_peer_failure_info* info) {
  return c_guard([&] {
    const char* op = "te_comm_peer_failure";
    check_place(op, "info", info);
    *info = object(op, "channel", channel).failure(op);
  });
}

}  // extern "C"
