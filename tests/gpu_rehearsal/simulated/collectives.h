// What NCCL's kernels do, once they run on a stream: data goes through the board of the communicator.
#pragma once

#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "board.h"
#include "device.h"
#include "numbers.h"

// NCCL's statuses.
enum { NCCL_SUCCESS, UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };

struct ncclComm {
  nccl::Visitor visitor;
  std::string name;
  int device = 0;
  bool blocking = true, dead = false, is_connected = false;
  long splits = 0;
  std::map<int, std::pair<double, const void*>> factors;  // of a reduction that multiplies first: a number, or where it is
  std::atomic<int> state{NCCL_SUCCESS}, under_way{0};
  std::string last_error;
  simulated::Stream* last_stream = nullptr;  // of the last kernel, and its end
  simulated::MarkPointer last;
  std::shared_ptr<int> graphs = std::make_shared<int>();  // held by each kernel that a graph has captured

  void fail(int status, const std::string& why);
};

namespace nccl {

enum Kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE };

struct Call {
  Kind kind;
  const void* source;
  void* destination;
  size_t count;
  int type, reduction, root;  // root: the peer of SEND and RECEIVE
  ncclComm* communicator;
  simulated::Stream* stream;
};

void run_collective(const Call& call);
// Sends and receives of one group go on side by side, so that two ranks may send to each other.
void run_transfers(const std::vector<Call>& calls);

}  // namespace nccl
