// The plan: the division of rows into runs, and the steps of one rank. A scatter is a gather in reverse: own rows come
// last instead of first, and rows are sent after their run is computed instead of being computed after they arrive.
#include "ops/comm/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>

#include "core/error.h"

namespace te::comm {

namespace {

constexpr int64_t kOwnCuts = 32;  // largest number of places where own rows may be divided

constexpr const char* kOps[] = {"gather_product", "product_scatter"};
constexpr const char* kSchedules[] = {"auto", "serial", "chunked"};
constexpr const char* kKinds[] = {"push", "wait", "gemm", "sum"};

int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

struct Range {
  int64_t first, last;
};

// Clusters of two tiles, in tiles of the costs (128 x 256). cuBLASLt takes one of these for a product of these layers,
// as timelines of H200s show, and fills the multiprocessors wave by wave: 128 x 256, 128 x 320, 192 x 192. For a
// problem that does not say which one, a division that is good for all of them is taken.
struct UsualTile {
  double rows, cols;
};
constexpr UsualTile kTiles[] = {{2, 1}, {2, 1.25}, {1.5, 1.5}};

std::vector<te_comm_tile> tiles_of(const te_comm_problem& p) {
  if (p.tile.units > 0) return {p.tile};
  std::vector<te_comm_tile> tiles;
  for (const UsualTile& each : kTiles) {
    tiles.push_back({int32_t(std::llround(each.rows * p.costs.tile_rows)),
                     int32_t(std::llround(each.cols * p.costs.tile_cols)), 2});
  }
  return tiles;
}

class Planner {
 public:
  explicit Planner(const te_comm_problem& problem)
      : p_(problem), shard_(problem.rows / problem.ranks), tiles_(tiles_of(problem)) {}

  StepPlan make() {
    StepPlan plan{};
    if (p_.rows == 0) {
      plan.prediction = {TE_COMM_SERIAL, 0, 0, 0};
      return plan;
    }
    const bool alone = p_.ranks == 1;
    const double serial = (alone ? 0 : transfer_us(p_.costs.serial_bytes_per_us)) + whole_us() + sum_us();
    plan.prediction = {TE_COMM_SERIAL, 1, serial, serial};
    runs_ = {p_.rows};
    if (!alone && p_.schedule != TE_COMM_SERIAL) {
      std::vector<int64_t> runs;
      // Two launches more: streams that fork and join, and the check for a failure.
      const double chunked = best_runs(runs) + sum_us() + 2 * p_.costs.launch_us;
      if (p_.schedule == TE_COMM_CHUNKED || chunked < serial) {
        plan.prediction = {TE_COMM_CHUNKED, int32_t(runs.size()), chunked, serial};
        runs_ = runs;
      }
    }
    steps_ = &plan.steps;
    if (alone) {
      add(TE_COMM_STEP_GEMM, -1, {0, p_.rows});
    } else if (p_.op == TE_COMM_GATHER_PRODUCT) {
      gather();
    } else {
      scatter();
    }
    return plan;
  }

 private:
  // ---- predictions ----

  double gemm_us(int64_t rows, const te_comm_tile& tile) const {
    const te_comm_costs& c = p_.costs;
    const int64_t clusters = ceil_div(rows, tile.rows) * ceil_div(p_.cols, tile.cols);
    const int64_t at_once = std::max(c.units / tile.units, 1);
    const double us = 2.0 * double(tile.rows) * double(tile.cols) * double(p_.depth) * double(at_once) / c.flops_per_us;
    return double(ceil_div(clusters, at_once)) * us + c.launch_us;
  }

  double whole_us() const {
    double least = INFINITY;
    for (const te_comm_tile& tile : tiles_) least = std::min(least, gemm_us(p_.rows, tile));
    return least;
  }

  double shard_us(double bytes_per_us) const {
    const int64_t width = p_.op == TE_COMM_GATHER_PRODUCT ? p_.depth : p_.cols;
    return double(shard_) * double(width) * double(te_dtype_bytes(p_.dtype)) / bytes_per_us;
  }

  double transfer_us(double bytes_per_us) const {
    return double(p_.ranks - 1) * shard_us(bytes_per_us) + p_.costs.hop_us;
  }

  // The time at which the first `rows` rows have arrived, counted in the order of arrival: own ones at 0.
  double arrival(int64_t rows) const {
    const int64_t others = ceil_div(rows, shard_) - 1;
    return others == 0 ? 0 : double(others) * shard_us(p_.costs.link_bytes_per_us) + p_.costs.hop_us;
  }

  // The time of the run [begin, end) from `from` on: longer while rows are being transferred. Own rows beside others'
  // are read from a copy, which is one launch more; of divisions that differ in nothing else, the one without it is
  // taken. Among those for unknown tiles that would outweigh waves.
  double run_us(int64_t begin, int64_t end, double from, const te_comm_tile& tile) const {
    const bool copies = p_.tile.units > 0 && p_.op == TE_COMM_GATHER_PRODUCT && begin < shard_ && end > shard_;
    const double us = gemm_us(end - begin, tile) + (copies ? p_.costs.launch_us : 0);
    return us * (from < transfer_us(p_.costs.link_bytes_per_us) ? p_.costs.beside : 1);
  }

  double sum_us() const {
    if (p_.op == TE_COMM_GATHER_PRODUCT || p_.ranks == 1) return 0;
    const double bytes = double(p_.ranks + 1) * double(shard_) * double(p_.cols) * double(te_dtype_bytes(p_.dtype));
    return bytes / p_.costs.memory_bytes_per_us;
  }

  // Where own rows may be divided, and the ends of shards, in the order of arrival.
  std::vector<int64_t> cuts() const {
    std::vector<int64_t> cuts{0};
    const int64_t tiles = (shard_ - 1) / p_.costs.tile_rows, step = ceil_div(std::max<int64_t>(tiles, 1), kOwnCuts);
    for (int64_t tile = step; tile <= tiles; tile += step) cuts.push_back(tile * p_.costs.tile_rows);
    for (int32_t rank = 1; rank <= p_.ranks; ++rank) cuts.push_back(rank * shard_);
    return cuts;
  }

  // The ends of the runs of the division that finishes first with this tile; the first run has own rows alone.
  std::vector<int64_t> best_runs(const std::vector<int64_t>& cuts, const te_comm_tile& tile) const {
    const size_t n = cuts.size();
    std::vector<double> done(n, 0);
    std::vector<size_t> before(n, 0);
    for (size_t end = 1; end < n; ++end) {
      done[end] = INFINITY;
      for (size_t start = cuts[end] <= shard_ ? 0 : 1; start < end; ++start) {
        const double from = std::max(done[start], arrival(cuts[end]));
        const double us = from + run_us(cuts[start], cuts[end], from, tile);
        if (us < done[end]) {
          done[end] = us;
          before[end] = start;
        }
      }
    }
    std::vector<int64_t> ends;
    for (size_t end = n - 1; end != 0; end = before[end]) ends.insert(ends.begin(), cuts[end]);
    return ends;
  }

  double us_of(const std::vector<int64_t>& ends, const te_comm_tile& tile) const {
    double done = 0;
    int64_t begin = 0;
    for (const int64_t end : ends) {
      const double from = std::max(done, arrival(end));
      done = from + run_us(begin, end, from, tile);
      begin = end;
    }
    return done;
  }

  // Of the best divisions of each tile the one that is best for all: its sum over the tiles is the least. Returns its
  // time with the tile that suits it most, as cuBLASLt takes a suitable one.
  double best_runs(std::vector<int64_t>& ends) const {
    const std::vector<int64_t> places = cuts();
    double best = INFINITY, us = 0;
    for (const te_comm_tile& tile : tiles_) {
      const std::vector<int64_t> runs = best_runs(places, tile);
      double sum = 0, least = INFINITY;
      for (const te_comm_tile& other : tiles_) {
        const double with = us_of(runs, other);
        sum += with;
        least = std::min(least, with);
      }
      if (sum < best) {
        best = sum;
        us = least;
        ends = runs;
      }
    }
    return us;
  }

  // ---- rows ----

  int32_t rank_at(int64_t step) const { return int32_t((p_.rank + step + p_.ranks) % p_.ranks); }
  Range shard_of(int32_t rank) const { return {rank * shard_, (rank + 1) * shard_}; }

  // Rows [begin, end) in the order of arrival: own ones, those of rank - 1, of rank - 2 and so on. Own ones are divided
  // so that the remaining ones are adjacent to the next ones.
  std::vector<Range> rows_of(int64_t begin, int64_t end) const {
    std::vector<Range> ranges;
    for (int32_t other = 0; other < p_.ranks; ++other) {
      const int64_t from = std::max(begin, other * shard_) - other * shard_;
      const int64_t to = std::min(end, (other + 1) * shard_) - other * shard_;
      if (from >= to) continue;
      const Range all = shard_of(rank_at(-other));
      if (p_.rank == 0 && other == 0) {
        ranges.push_back({all.first + from, all.first + to});
      } else {
        ranges.push_back({all.last - to, all.last - from});
      }
    }
    return joined(ranges);
  }

  // Merges adjacent ranges, in the order of the last arrival among their rows.
  static std::vector<Range> joined(const std::vector<Range>& ranges) {
    std::vector<Range> out;
    for (Range range : ranges) {
      for (size_t i = 0; i < out.size();) {
        if (out[i].last == range.first || out[i].first == range.last) {
          range = {std::min(range.first, out[i].first), std::max(range.last, out[i].last)};
          out.erase(out.begin() + int64_t(i));
        } else {
          ++i;
        }
      }
      out.push_back(range);
    }
    return out;
  }

  // ---- steps ----

  void add(te_comm_step_kind kind, int32_t peer, Range rows) { steps_->push_back({kind, peer, rows.first, rows.last}); }

  void gather() {
    const Range own = shard_of(p_.rank);
    for (int32_t step = 1; step <= p_.ranks; ++step) add(TE_COMM_STEP_PUSH, rank_at(step), own);
    std::vector<bool> waited(size_t(p_.ranks), false);
    int64_t begin = 0;
    for (const int64_t end : runs_) {
      for (const Range& rows : rows_of(begin, end)) {
        const bool own_alone = rows.first >= own.first && rows.last <= own.last;
        for (int32_t other = 1; other <= p_.ranks && !own_alone; ++other) {
          const int32_t peer = rank_at(-other);  // itself last: that copy follows the pushes
          const Range from = shard_of(peer);
          if (waited[size_t(peer)] || from.last <= rows.first || from.first >= rows.last) continue;
          add(TE_COMM_STEP_WAIT, peer, from);
          waited[size_t(peer)] = true;
        }
        add(TE_COMM_STEP_GEMM, -1, rows);
      }
      begin = end;
    }
    // A peer may not push to a released slot.
    if (!waited[size_t(p_.rank)]) add(TE_COMM_STEP_WAIT, p_.rank, own);
  }

  void scatter() {
    int32_t pushed = 1;
    for (size_t run = runs_.size(); run-- > 0;) {
      const int64_t begin = run == 0 ? 0 : runs_[run - 1];
      std::vector<Range> ranges = rows_of(begin, runs_[run]);
      std::reverse(ranges.begin(), ranges.end());
      for (const Range& rows : ranges) add(TE_COMM_STEP_GEMM, -1, rows);
      // Shard rank + step is at position ranks - step in the order of arrival: after that run all of it has been
      // computed.
      for (; pushed < p_.ranks && (p_.ranks - pushed) * shard_ >= begin; ++pushed) {
        add(TE_COMM_STEP_PUSH, rank_at(pushed), shard_of(rank_at(pushed)));
      }
    }
    const Range own = shard_of(p_.rank);
    for (int32_t step = 1; step < p_.ranks; ++step) add(TE_COMM_STEP_WAIT, rank_at(-step), own);
    add(TE_COMM_STEP_SUM, -1, own);
  }

  const te_comm_problem& p_;
  const int64_t shard_;
  const std::vector<te_comm_tile> tiles_;
  std::vector<int64_t> runs_;  // their ends, in the order of arrival
  std::vector<te_comm_step>* steps_ = nullptr;
};

void check_problem(const char* op, const te_comm_problem& p) {
  if (p.op != TE_COMM_GATHER_PRODUCT && p.op != TE_COMM_PRODUCT_SCATTER) {
    bad_argument(op, "problem.op", int(p.op), "a te_comm_op");
  }
  if (p.schedule < TE_COMM_AUTO || p.schedule > TE_COMM_CHUNKED) {
    bad_argument(op, "problem.schedule", int(p.schedule), "a te_comm_schedule");
  }
  if (p.ranks < 1 || p.ranks > TE_COMM_MOST_RANKS) {
    bad_argument(op, "problem.ranks", p.ranks, concat("a number from 1 to ", TE_COMM_MOST_RANKS));
  }
  if (p.rank < 0 || p.rank >= p.ranks) bad_argument(op, "problem.rank", p.rank, concat("0 to ", p.ranks - 1));
  if (p.rows < 0 || p.rows % p.ranks != 0) {
    bad_argument(op, "problem.rows", p.rows, concat("a multiple of the ", p.ranks, " ranks"));
  }
  if (p.depth < 0) bad_argument(op, "problem.depth", p.depth, "a size >= 0");
  if (p.cols < 0) bad_argument(op, "problem.cols", p.cols, "a size >= 0");
  if (te_dtype_name(p.dtype) == nullptr) bad_argument(op, "problem.dtype", int(p.dtype), "a te_dtype");
  check_costs(op, "problem.costs", p.costs);
  const te_comm_tile& t = p.tile;
  const bool unknown = t.rows == 0 && t.cols == 0 && t.units == 0;
  if (!unknown && (t.rows < 1 || t.cols < 1 || t.units < 1)) {
    bad_argument(op, "problem.tile", concat(t.rows, " x ", t.cols, " on ", t.units), "numbers > 0, or 0 for all three");
  }
}

// All that a plan depends on.
using Key = std::array<double, 21>;
constexpr size_t kMostKnown = 1024;

Key key_of(const te_comm_problem& p) {
  const te_comm_costs& c = p.costs;
  return {double(p.op),
          double(p.schedule),
          double(p.rows),
          double(p.depth),
          double(p.cols),
          double(p.ranks),
          double(p.rank),
          double(p.dtype),
          c.flops_per_us,
          c.link_bytes_per_us,
          c.serial_bytes_per_us,
          c.memory_bytes_per_us,
          c.launch_us,
          c.hop_us,
          c.beside,
          double(c.units),
          double(c.tile_rows),
          double(c.tile_cols),
          double(p.tile.rows),
          double(p.tile.cols),
          double(p.tile.units)};
}

std::string text_of(const te_comm_problem& p, const StepPlan& plan) {
  const te_comm_prediction& prediction = plan.prediction;
  std::string text = concat(kOps[p.op], " ", p.rows, " x ", p.depth, " x ", p.cols, " ", te_dtype_name(p.dtype),
                            ", rank ", p.rank, " of ", p.ranks, ": ", kSchedules[prediction.schedule], ", ",
                            prediction.runs, prediction.runs == 1 ? " run, " : " runs, ", std::llround(prediction.us),
                            " us predicted, serial ", std::llround(prediction.serial_us), " us\n");
  for (const te_comm_step& step : plan.steps) {
    const char* to = step.kind == TE_COMM_STEP_PUSH ? " to " : step.kind == TE_COMM_STEP_WAIT ? " for " : "";
    text += concat("  ", kKinds[step.kind], to, step.peer < 0 ? "" : std::to_string(step.peer), " [", step.first, ", ",
                   step.last, ")\n");
  }
  return text;
}

}  // namespace

StepPlan make_plan(const char* op, const te_comm_problem& problem) {
  check_problem(op, problem);
  // A plan takes some 50 us, and layers ask for the same few at every call.
  static std::mutex mutex;
  static std::map<Key, StepPlan> known;
  const Key key = key_of(problem);
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  if (known.size() >= kMostKnown) known.clear();
  return known.emplace(key, Planner(problem).make()).first->second;
}

}  // namespace te::comm

extern "C" {

te_status te_comm_plan(const te_comm_problem* problem, te_comm_step* steps, int64_t capacity, int64_t* count,
                       te_comm_prediction* prediction) {
  return te::c_guard([&] {
    const char* op = "te_comm_plan";
    if (problem == nullptr) te::bad_argument(op, "problem", "NULL", "a problem");
    te::check_place(op, "count", count);
    if (capacity < 0 || (steps == nullptr && capacity != 0)) {
      te::bad_argument(op, "steps", steps == nullptr ? "NULL" : "of negative capacity", "room for `capacity` steps");
    }
    const te::comm::StepPlan plan = te::comm::make_plan(op, *problem);
    *count = int64_t(plan.steps.size());
    std::copy_n(plan.steps.begin(), std::min(capacity, *count), steps);
    if (prediction != nullptr) *prediction = plan.prediction;
  });
}

te_status te_comm_plan_print(const te_comm_problem* problem, char* text, size_t capacity, size_t* length) {
  return te::c_guard([&] {
    const char* op = "te_comm_plan_print";
    if (problem == nullptr) te::bad_argument(op, "problem", "NULL", "a problem");
    te::check_place(op, "length", length);
    if (text == nullptr && capacity != 0) te::bad_argument(op, "text", "NULL", "room for `capacity` bytes");
    const std::string words = te::comm::text_of(*problem, te::comm::make_plan(op, *problem));
    *length = words.size();
    if (capacity == 0) return;
    const size_t copied = std::min(capacity - 1, words.size());
    std::memcpy(text, words.data(), copied);
    text[copied] = 0;
  });
}

}  // extern "C"
