// See fingerprints.h. One thread of the process compares all of its groups.
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

constexpr auto kPeriod = std::chrono::milliseconds(10);           // between two comparisons
constexpr std::chrono::milliseconds kSeek{100}, kMostSeek{5000};  // between two searches for the other ranks' rings
constexpr auto kMostSought = std::chrono::seconds(120);           // rings not found after this are on other machines
constexpr auto kMostEnqueueing = std::chrono::milliseconds(500);  // that an abort waits for an EnqueueGuard
constexpr auto kMostAtTheEnd = std::chrono::milliseconds(2000);   // that the end of the process waits for the thread

struct Peer {
  std::string address;                    // in the store
  std::unique_ptr<FingerprintRing> ring;  // null: not found yet, or on another machine
  uint64_t compared = 0;                  // number of equal records
};

// The fingerprints of one group: this rank's ring and the other ranks'.
class GroupComparison {
 public:
  GroupComparison(Group& group, c10::DeviceType type)
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

  void post(const CollectiveCall& call) {
    raise_if_failed();
    if (getpid() != process_) return;  // a forked process is no member of its parent's groups
    if (stopped_.load(std::memory_order_relaxed)) return;
    const CallNumbers numbers = encode_call(call);
    const std::lock_guard<std::mutex> lock(posting_);
    mine_->post(numbers);
  }

  void raise_if_failed() const {
    if (!failed_.load(std::memory_order_acquire)) return;
    TORCH_CHECK_VALUE(false, failure_);
  }

  void stop() {
    raise_if_failed();
    stopped_.store(true, std::memory_order_relaxed);
  }

  const std::shared_ptr<std::shared_timed_mutex>& enqueueing() const { return enqueueing_; }

  // Called by the thread. False where nothing is left to compare.
  bool compare_new() {
    try {
      if (compare_peers()) return true;
    } catch (const std::exception&) {
      store_.reset();
      throw;
    }
    store_.reset();  // else its server would outlive the group
    return false;
  }

  bool has_failed() const { return failed_.load(std::memory_order_acquire); }

  // Aborts the communicators. Called by a thread of its own: an abort frees device memory and so waits for kernels of
  // other groups, whose calls may differ too.
  void abort() {
    while (!try_abort()) std::this_thread::sleep_for(kPeriod);
  }

 private:
  // Waits for a collective that is being enqueued. Returns false after kMostEnqueueing, as the collective may wait for
  // the abort, or make a communicator that does not exist yet: the caller tries again.
  bool try_abort() {
    const std::unique_lock<std::shared_timed_mutex> lock(*enqueueing_, kMostEnqueueing);
    try {
      if (const auto group = group_.lock()) group->getBackend(type_)->abort();
    } catch (const std::exception& error) {
      TORCH_WARN("the communicators of a process group cannot be aborted, so that its ranks may hang: ", error.what());
      return true;
    }
    return lock.owns_lock();
  }

  bool compare_peers() {
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

  // Searches for the other ranks' rings without waiting. An address that an earlier group left in the same store is of
  // a ring with another met(), and is read again.
  void seek() {
    seek_next_ = Clock::now() + seek_wait_;
    seek_wait_ = std::min(2 * seek_wait_, kMostSeek);
    if (!published_) {
      store_ = store_->clone();  // another connection: the group's may be blocked in a wait
      const std::string address = mine_->address();
      store_->set(key(rank_), std::vector<uint8_t>(address.begin(), address.end()));
      peers_[rank_].address = address;
      published_ = true;
    }
    bool all = true, settled = true;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      if (rank == rank_) continue;
      Peer& peer = peers_[rank];
      const bool has_met = peer.ring != nullptr && mine_->met() != 0 && peer.ring->met() == mine_->met();
      if (!has_met && store_->check({key(rank)})) {
        const std::vector<uint8_t> value = store_->get(key(rank));
        const std::string address(value.begin(), value.end());
        if (address != peer.address) peer = {address, nullptr, 0};
        if (peer.ring == nullptr) peer.ring = FingerprintRing::open(address);
      }
      all = all && !peer.address.empty();
      settled = settled && has_met;
    }
    if (all) mine_->set_met(hash_of_addresses());
    if (!all) sought_since_ = Clock::now();  // until every rank has made its first call
    if (settled || Clock::now() > sought_since_ + kMostSought) store_.reset();
  }

  uint64_t hash_of_addresses() const {
    uint64_t hash = 14695981039346656037u;
    for (const Peer& peer : peers_) {
      for (const char letter : peer.address + ";") hash = (hash ^ uint8_t(letter)) * 1099511628211u;
    }
    return hash | 1;
  }

  // Whether the records that both rings have are equal. Overwritten records are skipped: later ones include their hash.
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
    std::ostringstream text;
    std::vector<std::string> descriptions;
    bool differ = false, raised = false;
    CollectiveCall first;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      const FingerprintRing* const ring = rank == rank_ ? mine_.get() : peers_[rank].ring.get();
      Fingerprint found;
      if (ring == nullptr || ring->met() != mine_->met() || !ring->read(number, found)) continue;
      const CollectiveCall call = decode_call(found.call);
      differ = differ || (!descriptions.empty() && !(call == first));
      raised = raised || call.variant == CollectiveCall::kRaised;
      if (descriptions.empty()) first = call;
      descriptions.push_back(describe_call(rank, call));
    }
    text << "the ranks of the process group '" << name_ << "' call different things: ";
    for (size_t i = 0; i < descriptions.size(); ++i) text << (i > 0 ? ", " : "") << descriptions[i];
    if (!differ) text << ", after a call that differed";
    text << (raised ? "" : "; wanted the same layer on each, with equally many tokens")
         << ". The group's communicators are aborted, and results since then are invalid; make a new group.";
    failure_ = text.str();
    failed_.store(true, std::memory_order_release);
    TORCH_WARN(failure_);  // in case this library calls the group no more
  }

  const c10::weak_intrusive_ptr<Group> group_;
  const c10::DeviceType type_;
  const std::string name_;
  const size_t rank_;
  const pid_t process_;
  c10::intrusive_ptr<c10d::Store> store_;  // null after the others are found
  const std::unique_ptr<FingerprintRing> mine_;
  const std::shared_ptr<std::shared_timed_mutex> enqueueing_ = std::make_shared<std::shared_timed_mutex>();
  std::mutex posting_;
  std::vector<Peer> peers_;
  Clock::time_point sought_since_, seek_next_{};
  std::chrono::milliseconds seek_wait_ = kSeek;
  bool published_ = false;
  std::string failure_;  // written before failed_
  std::atomic<bool> failed_{false}, stopped_{false};
};

// Shared by the threads and the process; it outlives both.
struct Watched {
  std::mutex mutex;
  std::condition_variable signal;
  std::vector<std::shared_ptr<GroupComparison>> groups;
  bool stop = false, stopped = false;
  int aborting = 0;  // number of threads
};

void abort_in_thread(const std::shared_ptr<Watched>& watched, const std::shared_ptr<GroupComparison>& group) {
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
    const std::vector<std::shared_ptr<GroupComparison>> groups = watched->groups;
    lock.unlock();
    std::vector<const GroupComparison*> ended;
    for (const auto& group : groups) {
      bool continues = false;
      try {
        continues = group->compare_new();
      } catch (const std::exception& error) {
        TORCH_WARN_ONCE("the calls of a process group's ranks are no longer compared: ", error.what());
      }
      if (continues) continue;
      ended.push_back(group.get());
      if (group->has_failed()) abort_in_thread(watched, group);
    }
    lock.lock();
    std::erase_if(watched->groups,
                  [&](const auto& group) { return std::find(ended.begin(), ended.end(), group.get()) != ended.end(); });
  }
  watched->stopped = true;
  watched->signal.notify_all();
}

// The groups of the process, and the thread, which starts with the first group.
class Groups {
 public:
  Groups() : watched_(std::make_shared<Watched>()), process_(getpid()) {}

  // Waits for the threads, at most kMostAtTheEnd: one may be blocked in a store whose server is gone.
  ~Groups() {
    if (!running_ || getpid() != process_) return;
    std::unique_lock<std::mutex> lock(watched_->mutex);
    watched_->stop = true;
    watched_->signal.notify_all();
    watched_->signal.wait_for(lock, kMostAtTheEnd, [this] { return watched_->stopped && watched_->aborting == 0; });
  }

  std::shared_ptr<GroupComparison> of(Group& group, c10::DeviceType type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto known = known_.find(&group); known != known_.end() && known->second->is_of(group)) {
      return known->second;
    }
    if (refused_) return nullptr;
    std::erase_if(known_, [&](const auto& each) { return !each.second->is_of(*each.first); });
    std::shared_ptr<GroupComparison> found;
    try {
      found = std::make_shared<GroupComparison>(group, type);
    } catch (const std::exception& error) {  // training continues without the check
      TORCH_WARN("the calls of ranks over NCCL are not compared: ", error.what());
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

  std::shared_ptr<GroupComparison> known(Group& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(&group);
    return found != known_.end() && found->second->is_of(group) ? found->second : nullptr;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Group*, std::shared_ptr<GroupComparison>> known_;
  const std::shared_ptr<Watched> watched_;
  const pid_t process_;
  bool running_ = false, refused_ = false;
};

Groups& groups() {
  static Groups all;
  return all;
}

}  // namespace

void post_fingerprint(Group& group, c10::DeviceType type, const CollectiveCall& call) {
  if (group.getSize() < 2) return;
  if (const auto found = groups().of(group, type)) found->post(call);
}

void stop_comparing(Group& group, c10::DeviceType type) {
  if (group.getSize() < 2) return;
  if (const auto found = groups().of(group, type)) found->stop();
}

void refuse_disagreement(Group& group) {
  if (const auto found = groups().known(group)) found->raise_if_failed();
}

EnqueueGuard::EnqueueGuard(Group& group) {
  const auto found = groups().known(group);
  if (found == nullptr) return;
  held_ = found->enqueueing();
  held_->lock_shared();
  try {
    found->raise_if_failed();
  } catch (...) {
    held_->unlock_shared();
    throw;
  }
}

EnqueueGuard::~EnqueueGuard() {
  if (held_ != nullptr) held_->unlock_shared();
}

void register_fingerprints(pybind11::module_& m) {
  m.def(
      "post_fingerprint",
      torch::wrap_pybind_function_no_gil([](const std::string& group, at::Device device, const std::string& op,
                                            int64_t variant, at::ScalarType dtype, const std::vector<int64_t>& sizes) {
        post_fingerprint(*c10d::resolve_process_group(group), device.type(), {op, variant, dtype, sizes});
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
