// What the fake driver (fake_cuda.hpp) keeps of its devices, and the parts that it is made of.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_api.hpp"
#include "fake_cuda.hpp"
#include "unique_fd.hpp"

namespace changeover::stress {

inline constexpr int kDevices = 2;
inline constexpr cuda::Result kNotSupported = 801;

struct Physical {
  UniqueFd fd;
  std::uint64_t nbytes = 0;
  int device = 0;
};
struct Mapped {
  std::shared_ptr<Physical> memory;
  std::uint64_t nbytes = 0;
  std::array<int, kDevices> access{};
};
struct Work {
  std::uint64_t sequence;
  cuda::Stream stream;
  std::uint64_t address;
  std::uint64_t nbytes;
  const void* source;  // null where it only reads
};
struct EventState {
  std::uint64_t sequence = 0;
  cuda::Stream stream = nullptr;
  bool is_of_context = false;
};

struct State {
  std::mutex mutex;
  std::array<std::uint64_t, kDevices> free_bytes{kDeviceBytes, kDeviceBytes};
  bool has_peer_access = true;
  bool is_capturing = false;
  bool has_batches = true;
  bool is_stalled = false;
  std::vector<std::size_t> batches;  // copies in each, as they came
  std::uint64_t next_id = 1;
  std::uint64_t sequence = 0;
  std::map<cuda::AllocationHandle, std::shared_ptr<Physical>> handles;
  std::map<ino_t, std::weak_ptr<Physical>> allocations;  // what an fd is of
  std::map<std::uint64_t, std::uint64_t> reservations;
  std::map<std::uint64_t, Mapped> mappings;
  std::map<cuda::Event, EventState> events;
  std::map<cuda::Stream, int> streams;
  std::map<void*, std::size_t> pinned;
  std::vector<Work> pending;
  int call_in = 0;
  int call_result = 0;
  int calls = 0;
  std::map<std::string, std::pair<int, int>> entries;
};

// Of both devices, for as long as the program runs.
State& state();

// Of an entry point that can fail: what it answers now.
cuda::Result planned(State& s, const char* entry);

// Of the calling thread; the program ends where it has pushed no context.
int current_device();
int device_of(cuda::Context context);

// What `device` may do to all of a range that lies in one mapping.
int access_to(State& s, std::uint64_t address, std::uint64_t nbytes, int device);

// Do the pending work that is due, in the order in which it came.
void carry_out(State& s, const std::function<bool(const Work&)>& is_due);

inline void* as_pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// The driver's entry points by name; what is none of them is not supported.
using Entries = std::map<std::string, void*>;
Entries device_entries();
Entries memory_entries();
Entries work_entries();

template <typename Function>
void* erased(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace changeover::stress

// Of a function that looks at or changes the state: `s`, which is locked until it returns.
#define LOCKED                                                \
  changeover::stress::State& s = changeover::stress::state(); \
  const std::lock_guard lock(s.mutex)

// The same of an entry point that can fail, which does where that is planned.
#define MAY_FAIL(entry) \
  LOCKED;               \
  if (const changeover::cuda::Result result = changeover::stress::planned(s, entry); result != 0) return result
