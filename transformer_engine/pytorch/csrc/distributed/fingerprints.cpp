// See fingerprints.h. One thread of the process looks after all of its groups.
#include "distributed/fingerprints.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <vector>

#include "distributed/fingerprint_ring.h"

namespace te_torch {

namespace {

using Clock = std::chrono::steady_clock;
using Group = c10d::ProcessGroup;

constexpr auto kPeriod = std::chrono::milliseconds(10);           // between two looks
constexpr std::chrono::milliseconds kSeek{100}, kMostSeek{5000};  // between two questions for the other ranks' rings
constexpr auto kMostSought = std::chrono::seconds(120);           // then those that were not found are other machines'
constexpr auto kMostEnqueueing = std::chrono::milliseconds(500);  // that an abort waits for a collective's beginning
constexpr auto kMostAtTheEnd = std::chrono::milliseconds(2000);   // that the end of the process waits for the thread

struct Peer {
  std::string address;                    // as the store has it
  std::unique_ptr<FingerprintRing> ring;  // null: not found so far, or on another machine
  uint64_t compared = 0;                  // records that were equal
};

// One group's fingerprints: this rank's, and what it has seen of the others'.
class Compared {
 public:
  Compared(Group& group, c10::DeviceType type)
      : group_(c10::intrusive_ptr<Group>::unsafe_reclaim_from_nonowning(&group)),
        type_(type),
        name_(group.getGroupName()),
        rank_(size_t(group.getRank())),
        process_(getpid()),
        store_(group.getStore()),
        mine_(FingerprintRing::make()),
        peers_(size_t(group.getSize())),
        sought_since_(Clock::now()) {}

  bool is_of(const Group& group) const { return !group_.expired() && group_._unsafe_get_target() == &group; }

  void post(const Said& said) {
    refuse();
    if (getpid() != process_) return;  // a fork has no part in its parent's groups
    if (stopped_.load(std::memory_order_relaxed)) return;
    const SaidNumbers numbers = numbers_of(said);
    const std::lock_guard<std::mutex> lock(posting_);
    mine_->post(numbers);
  }

  void refuse() const {
    if (!failed_.load(std::memory_order_acquire)) return;
    TORCH_CHECK_VALUE(false, failure_);
  }

  void stop() {
    refuse();
    stopped_.store(true, std::memory_order_relaxed);
  }

  const std::shared_ptr<std::shared_timed_mutex>& enqueueing() const { return enqueueing_; }

  // By the thread. False where there is nothing left to compare.
  bool look() {
    try {
      if (looked()) return true;
    } catch (const std::exception&) {
      store_.reset();
      throw;
    }
    store_.reset();  // whose server would outlive the group
    return false;
  }

  bool has_failed() const { return failed_.load(std::memory_order_acquire); }

  // Ends what the ranks wait for, by a thread of its own: an abort frees memory of the device and so waits for kernels
  // of other groups, whose ranks may differ meanwhile.
  void abort() {
    while (!aborted()) std::this_thread::sleep_for(kPeriod);
  }

 private:
  // Whether what the ranks wait for has ended. A collective that is being handed over ends that first, unless it waits
  // for what the abort ends, or makes its communicator, which cannot be aborted before it is there: then again.
  bool aborted() {
    const std::unique_lock<std::shared_timed_mutex> lock(*enqueueing_, kMostEnqueueing);
    try {
      if (const auto group = group_.lock()) group->getBackend(type_)->abort();
    } catch (const std::exception& error) {
      TORCH_WARN("the group's communicators cannot be aborted, so its ranks may wait: ", error.what());
      return true;
    }
    return lock.owns_lock();
  }

  bool looked() {
    if (group_.expired()) return false;
    if (store_ != nullptr && Clock::now() >= seek_next_) seek();
    if (mine_->met() == 0) return store_ != nullptr;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      Peer& peer = peers_[rank];
      if (peer.ring == nullptr || peer.ring->met() != mine_->met()) continue;
      if (!compare(peer)) {
        fail(peer.compared + 1);
        return false;
      }
    }
    return true;
  }

  static std::string key(size_t rank) { return "te_fingerprints/" + std::to_string(rank); }

  // Finds the other ranks' rings, without a wait. What an earlier group has left in the same store is of a ring that
  // has met others than this one's, and is asked for again.
  void seek() {
    seek_next_ = Clock::now() + seek_wait_;
    seek_wait_ = std::min(2 * seek_wait_, kMostSeek);
    if (!told_) {
      store_ = store_->clone();  // a connection of its own: the group's may be in a wait
      const std::string address = mine_->address();
      store_->set(key(rank_), std::vector<uint8_t>(address.begin(), address.end()));
      peers_[rank_].address = address;
      told_ = true;
    }
    bool all = true, settled = true;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      if (rank == rank_) continue;
      Peer& peer = peers_[rank];
      const bool meets = peer.ring != nullptr && mine_->met() != 0 && peer.ring->met() == mine_->met();
      if (!meets && store_->check({key(rank)})) {
        const std::vector<uint8_t> value = store_->get(key(rank));
        const std::string address(value.begin(), value.end());
        if (address != peer.address) peer = {address, nullptr, 0};
        if (peer.ring == nullptr) peer.ring = FingerprintRing::open(address);
      }
      all = all && !peer.address.empty();
      settled = settled && meets;
    }
    if (all) mine_->set_met(hash_of_addresses());
    if (!all) sought_since_ = Clock::now();  // a rank that has not called anything yet is waited for
    if (settled || Clock::now() > sought_since_ + kMostSought) store_.reset();
  }

  uint64_t hash_of_addresses() const {
    uint64_t hash = 14695981039346656037u;
    for (const Peer& peer : peers_) {
      for (const char letter : peer.address + ";") hash = (hash ^ uint8_t(letter)) * 1099511628211u;
    }
    return hash | 1;
  }

  // Whether the records that both have are equal. One that was overwritten is skipped: those behind it have its hash.
  bool compare(Peer& peer) const {
    for (;;) {
      const uint64_t mine = mine_->posted(), theirs = peer.ring->posted(), newest = std::max(mine, theirs);
      const uint64_t oldest = newest > FingerprintRing::kRecords ? newest - FingerprintRing::kRecords + 1 : 1;
      const uint64_t number = std::max(peer.compared + 1, oldest);
      if (number > std::min(mine, theirs)) return true;
      Fingerprint own, other;
      if (!mine_->read(number, own) || !peer.ring->read(number, other)) continue;
      peer.compared = number - 1;
      if (own.all != other.all) return false;
      peer.compared = number;
    }
  }

  void fail(uint64_t number) {
    std::ostringstream words;
    std::vector<std::string> each;
    bool differ = false, ended = false;
    Said first;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      const FingerprintRing* const ring = rank == rank_ ? mine_.get() : peers_[rank].ring.get();
      Fingerprint found;
      if (ring == nullptr || ring->met() != mine_->met() || !ring->read(number, found)) continue;
      const Said said = said_of(found.said);
      differ = differ || (!each.empty() && !(said == first));
      ended = ended || said.how == Said::kRaised;
      if (each.empty()) first = said;
      each.push_back(words_of(rank, said));
    }
    words << "the ranks of the process group '" << name_ << "' call different things: ";
    for (size_t i = 0; i < each.size(); ++i) words << (i > 0 ? ", " : "") << each[i];
    if (!differ) words << ", behind a call that differed";
    words << (ended ? "" : "; wanted the same layer on each, with equally many tokens")
          << ". The group's communicators are aborted, and what was computed since has no meaning; make a new group.";
    failure_ = words.str();
    failed_.store(true, std::memory_order_release);
    TORCH_WARN(failure_);  // where no call of ours follows
  }

  const c10::weak_intrusive_ptr<Group> group_;
  const c10::DeviceType type_;
  const std::string name_;
  const size_t rank_;
  const pid_t process_;
  c10::intrusive_ptr<c10d::Store> store_;  // null once the others are found
  const std::unique_ptr<FingerprintRing> mine_;
  const std::shared_ptr<std::shared_timed_mutex> enqueueing_ = std::make_shared<std::shared_timed_mutex>();
  std::mutex posting_;
  std::vector<Peer> peers_;
  Clock::time_point sought_since_, seek_next_{};
  std::chrono::milliseconds seek_wait_ = kSeek;
  bool told_ = false;
  std::string failure_;  // written before failed_
  std::atomic<bool> failed_{false}, stopped_{false};
};

// What the thread works on, which outlives both it and the process's end.
struct Watched {
  std::mutex mutex;
  std::condition_variable signal;
  std::vector<std::shared_ptr<Compared>> groups;
  bool stop = false, stopped = false;
  int aborting = 0;  // threads
};

void abort_beside(const std::shared_ptr<Watched>& watched, const std::shared_ptr<Compared>& group) {
  {
    const std::lock_guard<std::mutex> lock(watched->mutex);
    ++watched->aborting;
  }
  std::thread([watched, group] {
    group->abort();
    const std::lock_guard<std::mutex> lock(watched->mutex);
    --watched->aborting;
    watched->signal.notify_all();
  }).detach();
}

void watch(const std::shared_ptr<Watched>& watched) {
  std::unique_lock<std::mutex> lock(watched->mutex);
  while (!watched->signal.wait_for(lock, kPeriod, [&] { return watched->stop; })) {
    const std::vector<std::shared_ptr<Compared>> groups = watched->groups;
    lock.unlock();
    std::vector<const Compared*> ended;
    for (const auto& group : groups) {
      bool goes_on = false;
      try {
        goes_on = group->look();
      } catch (const std::exception& error) {
        TORCH_WARN_ONCE("what the ranks of a group do is not compared any more: ", error.what());
      }
      if (goes_on) continue;
      ended.push_back(group.get());
      if (group->has_failed()) abort_beside(watched, group);
    }
    lock.lock();
    std::erase_if(watched->groups,
                  [&](const auto& group) { return std::find(ended.begin(), ended.end(), group.get()) != ended.end(); });
  }
  watched->stopped = true;
  watched->signal.notify_all();
}

// The process's groups, and the thread, which begins with the first of them.
class Groups {
 public:
  Groups() : watched_(std::make_shared<Watched>()), process_(getpid()) {}

  // Waits for the threads, though not for ever: one may be in a question to a store whose server is gone.
  ~Groups() {
    if (!running_ || getpid() != process_) return;
    std::unique_lock<std::mutex> lock(watched_->mutex);
    watched_->stop = true;
    watched_->signal.notify_all();
    watched_->signal.wait_for(lock, kMostAtTheEnd, [this] { return watched_->stopped && watched_->aborting == 0; });
  }

  std::shared_ptr<Compared> of(Group& group, c10::DeviceType type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto known = known_.find(&group); known != known_.end() && known->second->is_of(group)) {
      return known->second;
    }
    if (refused_) return nullptr;
    std::erase_if(known_, [&](const auto& each) { return !each.second->is_of(*each.first); });
    std::shared_ptr<Compared> found;
    try {
      found = std::make_shared<Compared>(group, type);
    } catch (const std::exception& error) {  // a check that cannot be made ends no training
      TORCH_WARN("what the ranks of groups over NCCL do is not compared: ", error.what());
      refused_ = true;
      return nullptr;
    }
    known_[&group] = found;
    {
      const std::lock_guard<std::mutex> adding(watched_->mutex);
      watched_->groups.push_back(found);
      if (!running_ && getpid() == process_) {
        std::thread(watch, watched_).detach();
        running_ = true;
      }
    }
    return found;
  }

  std::shared_ptr<Compared> known(Group& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(&group);
    return found != known_.end() && found->second->is_of(group) ? found->second : nullptr;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Group*, std::shared_ptr<Compared>> known_;
  const std::shared_ptr<Watched> watched_;
  const pid_t process_;
  bool running_ = false, refused_ = false;
};

Groups& groups() {
  static Groups all;
  return all;
}

}  // namespace

void post_fingerprint(Group& group, c10::DeviceType type, const Said& said) {
  if (group.getSize() < 2) return;
  if (const auto found = groups().of(group, type)) found->post(said);
}

void stop_comparing(Group& group, c10::DeviceType type) {
  if (group.getSize() < 2) return;
  if (const auto found = groups().of(group, type)) found->stop();
}

void refuse_disagreement(Group& group) {
  if (const auto found = groups().known(group)) found->refuse();
}

EnqueueGuard::EnqueueGuard(Group& group) {
  const auto found = groups().known(group);
  if (found == nullptr) return;
  held_ = found->enqueueing();
  held_->lock_shared();
  try {
    found->refuse();
  } catch (...) {
    held_->unlock_shared();
    throw;
  }
}

EnqueueGuard::~EnqueueGuard() {
  if (held_ != nullptr) held_->unlock_shared();
}

void register_fingerprints(pybind11::module_& m) {
  m.def("post_fingerprint",
        torch::wrap_pybind_function_no_gil([](const std::string& group, at::Device device, const std::string& op,
                                              int64_t how, at::ScalarType dtype, const std::vector<int64_t>& sizes) {
          post_fingerprint(*c10d::resolve_process_group(group), device.type(), {op, how, dtype, sizes});
        }));
  pybind11::class_<EnqueueGuard, std::unique_ptr<EnqueueGuard>>(m, "EnqueueGuard",
                                                                "Held while a collective is enqueued.")
      .def(pybind11::init(torch::wrap_pybind_function_no_gil([](const std::string& group) {
        return std::make_unique<EnqueueGuard>(*c10d::resolve_process_group(group));
      })));
  m.def("stop_comparing", torch::wrap_pybind_function_no_gil([](const std::string& group, at::Device device) {
          stop_comparing(*c10d::resolve_process_group(group), device.type());
        }));
  m.def("refuse_disagreement", torch::wrap_pybind_function_no_gil([](const std::string& group) {
          refuse_disagreement(*c10d::resolve_process_group(group));
        }));
}

}  // namespace te_torch
