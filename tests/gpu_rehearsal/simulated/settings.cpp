// Settings, injected faults, and what was counted.
//
// RING_SIMULATED_FAULTS is a list of FUNCTION:CALL:STATUS, such as "cudaMalloc:3:2,ncclAllReduce:1:2": the third call of
// cudaMalloc in this process returns 2 (out of memory). CALL may be "+3": the third and all later ones.
// With RING_SIMULATED_COUNTS=1, a process prints at its end how often each function was called.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <sstream>
#include <unistd.h>
#include <vector>

#include "device.h"

namespace simulated {
namespace {

struct Fault {
  std::string function;
  long call;
  bool and_later;
  int status;
};

struct Counts {
  std::mutex mutex;
  std::map<std::string, long> counts;
  std::vector<Fault> faults;

  Counts() {
    const char* text = getenv("RING_SIMULATED_FAULTS");
    std::stringstream all(text ? text : "");
    for (std::string one; std::getline(all, one, ',');) {
      const auto first = one.find(':'), last = one.rfind(':');
      if (first == std::string::npos || first == last) {
        fprintf(stderr, "simulated CUDA: RING_SIMULATED_FAULTS holds %s, not FUNCTION:CALL:STATUS\n", one.c_str());
        _exit(2);
      }
      const bool later = one[first + 1] == '+';
      faults.push_back({one.substr(0, first), atol(one.c_str() + first + 1 + later), later, atoi(one.c_str() + last + 1)});
    }
  }
};

Counts*& kept() {
  static Counts* counts = new Counts;  // for ever: threads count until the process ends
  return counts;
}

Counts& counts() { return *kept(); }

struct AtExit {
  ~AtExit() {
    if (!setting("COUNTS", 0)) return;
    std::lock_guard<std::mutex> lock(counts().mutex);
    for (const auto& [what, times] : counts().counts) fprintf(stderr, "simulated CUDA: %8ld %s\n", times, what.c_str());
  }
} at_exit;

}  // namespace

long setting(const char* name, long otherwise) {
  const char* text = getenv((std::string("RING_SIMULATED_") + name).c_str());
  return text && *text ? atol(text) : otherwise;
}

void count(const std::string& what, long more) {
  std::lock_guard<std::mutex> lock(counts().mutex);
  counts().counts[what] += more;
}

int called(const char* what) {
  Counts& all = counts();
  std::lock_guard<std::mutex> lock(all.mutex);
  const long number = ++all.counts[what];
  for (const Fault& fault : all.faults)
    if (fault.function == what && (number == fault.call || (fault.and_later && number > fault.call))) {
      fprintf(stderr, "simulated CUDA: call %ld of %s in process %d fails with status %d\n", number, what, getpid(), fault.status);
      return fault.status;
    }
  return 0;
}

long random_below(long bound) {
  static thread_local std::minstd_rand generator(setting("SEED", 0) * 7919 + getpid() + (long)(intptr_t)&generator);
  return bound > 0 ? (long)(generator() % bound) : 0;
}

// For programs under test: how often something happened so far.
EXPORTED long simulated_count(const char* what) {
  std::lock_guard<std::mutex> lock(counts().mutex);
  auto found = counts().counts.find(what);
  return found == counts().counts.end() ? 0 : found->second;
}

// For a process that was forked and has other settings: counts begin anew.
EXPORTED void simulated_reset() { kept() = new Counts; }

}  // namespace simulated
