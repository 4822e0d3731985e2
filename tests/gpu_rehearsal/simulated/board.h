// Where the ranks of a simulated NCCL communicator meet: shared memory between processes.
//
// A mailbox for each rank carries collectives, one for each pair of ranks carries sends. A rank that has died never
// arrives, and the others wait for it until they abort, as NCCL's kernels do.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

namespace nccl {

constexpr int MOST_RANKS = 16;
constexpr size_t MAILBOX = 1 << 20;      // bytes of a rank's part in one round of a collective
constexpr size_t PAIR_BOX = 1 << 18;     // bytes on the way from one rank to another

struct Pair {
  std::atomic<long> written, read;  // bytes so far
};

struct Board {
  std::atomic<long> arrived[MOST_RANKS];
  std::atomic<int> bell;  // rung at each arrival; a futex
  int colors[MOST_RANKS], keys[MOST_RANKS];
  int processes[MOST_RANKS];
  char calls[MOST_RANKS][64];  // what each rank thinks that the collective under way is
  Pair pairs[MOST_RANKS][MOST_RANKS];

  char* mailbox(int rank);
  char* pair_box(int from, int to);

  // The board of a name; the first that comes makes it. All ranks of `size` map it before its name is removed.
  static Board* open(const std::string& name, int size);
};

// The number that this rank has arrived with last, and what ends its waiting.
struct Visitor {
  Board* board;
  int rank, size;
  long arrivals = 0;
  std::atomic<bool> aborted{false};

  // Wait until all ranks have arrived as often as this one. False: aborted.
  bool meet();
  // A rank whose process is gone, -1 for none.
  int lost();
  void ring();
  void nap();
};

}  // namespace nccl
