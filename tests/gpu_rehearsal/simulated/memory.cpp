// Memory of the simulated devices: pages of the host, which are unmapped when they are freed, so that a later access ends
// the process. What nobody has written reads as NaN.
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>
#include <cstring>
#include <map>
#include <sys/mman.h>

#include "device.h"

namespace simulated {
namespace {

struct Allocation {
  size_t bytes;
  int device;
};

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Allocation> allocations;
  std::map<uintptr_t, size_t> pinned;
  std::map<int, size_t> used;
};

Memory& memory() {
  static Memory* kept = new Memory;
  return *kept;
}

size_t total() { return (size_t)setting("MEMORY_MB", 8 << 10) << 20; }

size_t in_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

template <typename Found>
auto containing(std::map<uintptr_t, Found>& all, const void* pointer) {
  auto next = all.upper_bound((uintptr_t)pointer);
  return next == all.begin() ? all.end() : std::prev(next);
}

}  // namespace

namespace {

// The card that a name in CUDA_VISIBLE_DEVICES means: its number, or the beginning of its UUID; -1 if there is none.
int card_named(const std::string& name) {
  const int present = (int)setting("DEVICES", 2);
  if (name.rfind("GPU-", 0) && name.rfind("MIG-", 0)) {
    char* end;
    const long number = strtol(name.c_str(), &end, 10);
    return !name.empty() && !*end && number >= 0 && number < present ? (int)number : -1;
  }
  for (int card = 0; card < present; card++) {
    char uuid[37];
    const int byte = card + 1;
    snprintf(uuid, sizeof uuid, "%02x%02x%02x%02x-%02x%02x-%02x%02x", byte, byte, byte, byte, byte, byte, byte, byte);
    if (!std::string(uuid).rfind(name.substr(4), 0)) return card;
  }
  return -1;
}

// The cards that this process sees, in its order. As CUDA does, it looks once, and sees nothing behind an invalid name;
// of slices of a card (MIG) it sees one.
const std::vector<int>& cards() {
  static const std::vector<int> found = [] {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    std::vector<int> cards;
    if (!visible)
      for (int card = 0; card < (int)setting("DEVICES", 2); card++) cards.push_back(card);
    std::stringstream names(visible ? visible : "");
    for (std::string name; std::getline(names, name, ',');) {
      const int card = card_named(name);
      if (card < 0) break;
      cards.push_back(card);
      if (!name.rfind("MIG-", 0)) break;
    }
    return cards;
  }();
  return found;
}

}  // namespace

int device_count() { return (int)cards().size(); }

int card_of(int device) { return device >= 0 && device < device_count() ? cards()[device] : -1; }

int allocate(void** pointer, size_t bytes, int device) {
  *pointer = nullptr;
  if (!bytes) return SUCCESS;
  std::lock_guard<std::mutex> lock(memory().mutex);
  if (memory().used[device] + bytes > total()) return OUT_OF_MEMORY;
  void* made = mmap(nullptr, in_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return OUT_OF_MEMORY;
  memset(made, POISON, bytes);
  memory().used[device] += bytes;
  memory().allocations[(uintptr_t)made] = {bytes, device};
  *pointer = made;
  return SUCCESS;
}

int release(void* pointer) {
  if (!pointer) return SUCCESS;
  Allocation found;
  {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto at = memory().allocations.find((uintptr_t)pointer);
    if (at == memory().allocations.end()) return INVALID_VALUE;
    found = at->second;
  }
  synchronize_device(found.device);  // as cudaFree does
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().allocations.erase((uintptr_t)pointer);
  memory().used[found.device] -= found.bytes;
  munmap(pointer, in_pages(found.bytes));
  return SUCCESS;
}

int allocate_pinned(void** pointer, size_t bytes) {
  if (posix_memalign(pointer, 4096, in_pages(bytes ? bytes : 1))) return OUT_OF_MEMORY;
  pin(*pointer, bytes);
  return SUCCESS;
}

int release_pinned(void* pointer) {
  unpin(pointer);
  free(pointer);
  return SUCCESS;
}

void pin(const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().pinned[(uintptr_t)pointer] = bytes;
}

void unpin(const void* pointer) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().pinned.erase((uintptr_t)pointer);
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = containing(memory().pinned, pointer);
  return found != memory().pinned.end() && (uintptr_t)pointer < found->first + found->second;
}

int device_of_pointer(const void* pointer) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = containing(memory().allocations, pointer);
  if (found == memory().allocations.end() || (uintptr_t)pointer >= found->first + found->second.bytes)
    return setting("HOST_MEMORY", 0) ? 0 : -1;
  return found->second.device;
}

void allocation_of(const void* pointer, void** base, size_t* bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = containing(memory().allocations, pointer);
  if (found == memory().allocations.end()) return;
  if (base) *base = (void*)found->first;
  if (bytes) *bytes = found->second.bytes;
}

void memory_info(int device, size_t* free, size_t* all) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  *all = total();
  *free = total() - memory().used[device];
}

void copy(void* destination, const void* source, size_t bytes, Stream* stream) {
  const bool to_device = device_of_pointer(destination) >= 0, from_device = device_of_pointer(source) >= 0;
  count(to_device && from_device ? "copies on a device" : to_device ? "copies to a device" : "copies to the host");
  if (!from_device && !is_pinned(source)) {
    auto staged = std::make_shared<std::string>((const char*)source, bytes);
    enqueue(stream, [=] { memcpy(destination, staged->data(), bytes); });
    if (!to_device) synchronize(stream);
    return;
  }
  enqueue(stream, [=] { memcpy(destination, source, bytes); });
  if (!to_device && !is_pinned(destination)) synchronize(stream);
}

}  // namespace simulated
