// The thread that watches the shared words of a channel, and reports a peer that is dead, late or in another call. It
// makes no CUDA call, so that captures and stuck streams do not block it.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "ops/comm/peer.h"

namespace te::comm {

namespace {

constexpr auto kPeriod = std::chrono::milliseconds(2);
constexpr double kMostPassed = 0.1;   // seconds: the process was stopped if more have passed between two checks
constexpr double kDeadPeriod = 0.25;  // seconds between checks for dead processes

void copy_text(char* target, const std::string& text) {
  const size_t n = std::min(text.size(), size_t(TE_COMM_PEER_TEXT - 1));
  std::memcpy(target, text.data(), n);
  target[n] = 0;
}

}  // namespace

uint32_t hash_of(const char* text) {
  uint32_t hash = 2166136261u;
  for (; *text != 0; ++text) hash = (hash ^ uint8_t(*text)) * 16777619u;
  return (hash & ~kSeen) | 2u;  // neither 0 nor 1
}

uint64_t process_start(uint32_t pid) {
  std::ifstream file(concat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return 0;
  const size_t name = line.rfind(')');
  if (name == std::string::npos) return 0;
  std::istringstream fields(line.substr(name + 1));
  std::string field;
  fields >> field;
  if (field == "Z" || field == "X") return 0;
  for (int i = 0; i < 19; ++i) fields >> field;  // the 22nd of all
  return std::strtoull(field.c_str(), nullptr, 10) + 1;
}

void fail(const Words& words, te_comm_peer_trouble trouble, int32_t rank, int32_t peer, bool freeing,
          const std::string& op, const std::string& other) {
  Shared& shared = words.shared();
  if (word(shared.claimed).exchange(1) != 0) return;
  shared.info.trouble = trouble;
  shared.info.rank = rank;
  shared.info.peer = peer;
  shared.info.freeing = freeing;
  copy_text(shared.info.op, op);
  copy_text(shared.info.other, other);
  word(shared.failed).store(1, std::memory_order_release);
}

Watch::Watch(const Words& words, int32_t ranks, int32_t rank, double timeout_s)
    : words_(words),
      ranks_(ranks),
      rank_(rank),
      timeout_s_(timeout_s),
      seen_(size_t(kSlots) * size_t(ranks)),
      dead_(size_t(ranks), false),
      thread_([this] { run(); }) {}

Watch::~Watch() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  stop_signal_.notify_all();
  thread_.join();
}

void Watch::run() {
  using Clock = std::chrono::steady_clock;
  Clock::time_point before = Clock::now();
  double until_dead = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_signal_.wait_for(lock, kPeriod, [this] { return stop_; })) {
    const Clock::time_point now = Clock::now();
    const double passed = std::min(std::chrono::duration<double>(now - before).count(), kMostPassed);
    before = now;
    look(passed);
    until_dead -= passed;
    if (until_dead <= 0 && !words_.failed()) {
      look_for_dead();
      until_dead = kDeadPeriod;
    }
  }
}

std::string Watch::text_of(int32_t rank, uint32_t hash) const {
  Member& member = words_.member(rank);
  const uint32_t written = word(member.texts).load(std::memory_order_acquire);
  for (uint32_t i = 0; i < std::min<uint32_t>(written, kTexts); ++i) {
    if (member.text[i].hash == hash) return member.text[i].text;
  }
  return concat("a call of number ", hash);
}

void Watch::look(double passed) {
  for (int32_t slot = 0; slot < kSlots; ++slot) {
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      Line& line = words_.line(slot, rank_, peer);
      Seen& seen = seen_[size_t(slot * ranks_ + peer)];
      look_at(line.arrived, line.expected_arrived, seen.arrived, passed, peer, false);
      look_at(line.freed, line.expected_freed, seen.freed, passed, peer, true);
    }
  }
}

void Watch::look_at(uint32_t& value, uint32_t& expected, double& seen, double passed, int32_t peer, bool freeing) {
  const uint32_t found = word(expected).load(std::memory_order_acquire), wanted = found & ~kSeen;
  if (wanted == 0) return;
  const uint32_t got = word(value).load(std::memory_order_acquire);
  if (got == wanted) return;
  if (words_.failed()) {  // no peer may start to wait unseen: `expected` is read again after it
    word(value).store(wanted, std::memory_order_release);
    return;
  }
  // `expected` is written before the value is read, so that a value next to it belongs to this wait or to no wait.
  if (got != 0 && word(expected).load() == found && word(value).load() == got) {
    fail(words_, TE_COMM_PEER_OTHER, rank_, peer, freeing, text_of(rank_, wanted), text_of(peer, got));
    return;
  }
  if (word(expected).load() != found) return;  // it has ended meanwhile
  if (dead_[size_t(peer)]) {                   // it had ended before the value was read
    fail(words_, TE_COMM_PEER_DEAD, rank_, peer, freeing, freeing ? last_words() : text_of(rank_, wanted), "");
    return;
  }
  if (found == wanted) {
    uint32_t unseen = wanted;
    if (!word(expected).compare_exchange_strong(unseen, wanted | kSeen)) return;
    seen = 0;
  }
  seen += passed;
  const std::string op = freeing ? std::string() : text_of(rank_, wanted);
  if (word(words_.member(peer).left).load() != 0 && seen > 2 * kDeadPeriod) {
    fail(words_, TE_COMM_PEER_LEFT, rank_, peer, freeing, op, "");
  } else if (seen >= timeout_s_) {
    fail(words_, TE_COMM_PEER_LATE, rank_, peer, freeing, op, "");
  }
}

std::string Watch::last_words() const {
  const Member& me = words_.member(rank_);
  const uint32_t texts = word(words_.member(rank_).texts).load();
  return texts > 0 ? me.text[(texts - 1) % kTexts].text : "";
}

void Watch::look_for_dead() {
  for (int32_t peer = 0; peer < ranks_; ++peer) {
    Member& member = words_.member(peer);
    const uint32_t pid = word(member.pid).load(std::memory_order_acquire);
    if (peer == rank_ || pid == 0 || dead_[size_t(peer)] || word(member.left).load() != 0) continue;
    if (process_start(pid) == member.start) continue;
    dead_[size_t(peer)] = word(member.left).load() == 0;
  }
}

}  // namespace te::comm
